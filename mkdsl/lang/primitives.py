"""The primitives of task bodies: dot, fold, roll, valid and program_id.

Each has a plain meaning in jnp, so that a task is an ordinary function: it can be
called on arrays, jitted and vmapped. Inside a program the same primitives say what
passes through pages (the second operand of dot, the operands of fold) and what needs
shared memory (roll).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from mkdsl.errors import TraceError, caller

Array = Any
Tree = Any


def _primitive(name: str, meaning: Callable[..., list[Array]]) -> Primitive:
    """A primitive with many results that means what `meaning` computes."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def run(*args: Array, **params: Any) -> list[Array]:
        return jax.jit(functools.partial(meaning, **params))(*args)

    def shapes(*avals: Any, **params: Any) -> list[Any]:
        outs = jax.eval_shape(functools.partial(meaning, **params), *avals)
        return [core.ShapedArray(o.shape, o.dtype) for o in outs]

    def batch(args: Any, dims: Any, **params: Any) -> tuple[list[Array], list[int]]:
        mapped = jax.vmap(functools.partial(meaning, **params), in_axes=tuple(dims))
        outs = mapped(*args)
        return outs, [0] * len(outs)

    primitive.def_impl(run)
    primitive.def_abstract_eval(shapes)
    mlir.register_lowering(primitive, mlir.lower_fun(meaning, multiple_results=True))
    batching.primitive_batchers[primitive] = batch
    return primitive


def dot_meaning(x: Array, w: Array) -> list[Array]:
    """[columns, depth] . [rows, depth] -> [columns, rows] float32."""
    precise = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if x.ndim == 2 and x.shape[0] == 1 and x.dtype == jnp.bfloat16:
        # XLA on CPU has a fast bfloat16 product for two columns (84 MB: 3.5 ms) but
        # not for one (97 ms; 2 cores with avx512_bf16, jax 0.11.2, 2026-11-29).
        return [dot_meaning(jnp.pad(x, ((0, 1), (0, 0))), w)[0][:1]]
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return [
        lax.dot_general(
            x, w, dims, precision=precise, preferred_element_type=jnp.float32
        )
    ]


def block_at(stream: Array, first: Array, stop: Array, block: int) -> Array:
    """Rows [first, first + block) of a stream; zeros from row `stop` on."""
    if not stream.shape[0]:
        return jnp.zeros((block, *stream.shape[1:]), stream.dtype)
    rows = first + jnp.arange(block)
    at = jnp.take(stream, rows, axis=0, mode="fill", fill_value=0)
    return jnp.where((rows < stop)[:, None], at, jnp.zeros((), stream.dtype))


def fold_loop(
    jaxpr: Any,
    consts: Sequence[Array],
    streams: Sequence[tuple[Array, Array]],
    count: Array,
    init: Sequence[Array],
    block: int,
    evaluate: Callable[..., list[Array]],
) -> list[Array]:
    """The fold over `count` rows; each stream is (array, its first row)."""

    def step(i: Array, carry: list[Array]) -> list[Array]:
        at = [
            block_at(s, first + i * block, first + count, block) for s, first in streams
        ]
        valid = i * block + jnp.arange(block) < count
        return list(evaluate(jaxpr, [*consts, *at, valid, *carry]))

    blocks = (count + block - 1) // block
    return list(lax.fori_loop(0, blocks, step, list(init)))


def _fold_meaning(count: Array, *args: Array, **p: Any) -> list[Array]:
    consts, streams, init, _ = split_fold(args, p)
    run = lambda jaxpr, values: core.eval_jaxpr(jaxpr, (), *values)  # noqa: E731
    zero = jnp.int32(0)
    pairs = [(s, zero) for s in streams]
    return fold_loop(p["jaxpr"], consts, pairs, count, init, p["block"], run)


def split_fold(args: Sequence[Any], p: Any) -> tuple[Any, Any, Any, Any]:
    """(consts, streams, init, identity) of the operands of a fold after `count`."""
    a, b = p["consts"], p["consts"] + p["streams"]
    carries = (len(args) - b) // 2
    return args[:a], args[a:b], args[b : b + carries], args[b + carries :]


dot_p = _primitive("mk_dot", dot_meaning)


def _batch_dot(args: Any, dims: Any) -> tuple[list[Array], list[int]]:
    """Many blocks of rows of one matrix are one matrix: XLA would transpose them."""
    (x, w), (at_x, at_w) = args, dims
    if at_x is not None or w.ndim != 3:
        outs = jax.vmap(dot_meaning, in_axes=(at_x, at_w))(x, w)
        return outs, [0]
    blocks = jnp.moveaxis(w, at_w, 0)
    count, rows, depth = blocks.shape
    y = dot_p.bind(x, blocks.reshape(count * rows, depth))[0]
    return [y.reshape(*x.shape[:-1], count, rows)], [x.ndim - 1]


batching.primitive_batchers[dot_p] = _batch_dot
roll_p = _primitive("mk_roll", lambda x, *, shift: [jnp.roll(x, shift, -1)])
fold_p = _primitive("mk_fold", _fold_meaning)
extent_p = _primitive("mk_extent", lambda x, *, axis: [jnp.int32(x.shape[axis])])


def _no_program_id(*, axis: int) -> list[Array]:
    raise TraceError(
        f"mk.program_id({axis}) outside a program",
        caller(),
        "the grid exists only inside mk.call; pass the position as an operand",
    )


program_id_p = Primitive("mk_program_id")
program_id_p.multiple_results = True
program_id_p.def_abstract_eval(lambda *, axis: [core.ShapedArray((), jnp.int32)])
program_id_p.def_impl(_no_program_id)
mlir.register_lowering(
    program_id_p, mlir.lower_fun(_no_program_id, multiple_results=True)
)


def dot(x: Array, w: Array) -> Array:
    """x @ w.T with float32 accumulation.

    The weight-like operand `w` streams through pages over its second axis; `x` is an
    operand as it stands or anything the task computed.

    Args:
        x: [columns, depth], or [depth].
        w: [rows, depth], an operand of the task, a block of a fold, or its transpose.

    Returns:
        [columns, rows] float32, or [rows].

    Raises:
        TraceError: the depths or dtypes differ.
    """
    if x.ndim not in (1, 2) or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise TraceError(
            f"mk.dot of {_show(x)} and {_show(w)}: both need the same last axis",
            caller(),
            "mk.dot(x, w) contracts x [columns, depth] with w [rows, depth]",
        )
    if x.dtype != w.dtype:
        raise TraceError(
            f"mk.dot of {_show(x)} and {_show(w)}: the dtypes differ",
            caller(),
            "round explicitly: mk.dot(x.astype(w.dtype), w)",
        )
    if x.ndim == 1:
        return dot_p.bind(x[None], w)[0][0]
    return dot_p.bind(x, w)[0]


def roll(x: Array, shift: int) -> Array:
    """Rotate features: jnp.roll(x, shift, axis=-1).

    Args:
        x: [columns, features] or [features].
        shift: a Python integer.
    """
    return roll_p.bind(x, shift=int(shift) % x.shape[-1])[0]


def valid(x: Array, axis: int = -1) -> Array:
    """Which elements of an axis of an operand exist: bool [x.shape[axis]].

    A block at the ragged edge of an array, or of a bounded slice, reaches past it; the
    elements beyond read as zero. `x` must be an operand of the task.
    """
    axis = axis % x.ndim
    return jnp.arange(x.shape[axis]) < extent_p.bind(x, axis=axis)[0]


def program_id(axis: int) -> Array:
    """Position of this instance on grid axis `axis`, int32 []."""
    return program_id_p.bind(axis=axis)[0]


def fold(
    body: Callable[[Tree, tuple[Array, ...], Array], Tree],
    init: Tree,
    streams: Sequence[Array],
    *,
    block: int = 128,
    merge: Callable[[Tree, Tree], Tree] | None = None,
    identity: Tree | None = None,
) -> Tree:
    """carry = body(carry, blocks, valid) over blocks of rows of streamed operands.

    The rows folded are those that exist: all rows of the arrays, or those of the
    bounded slice that the spec of the first stream gives. Rows beyond read as zero.

    Args:
        body: gets the carry, one [block, features] value per stream, and `valid`,
            bool [block], which rows of the block exist; returns the next carry.
        init: the first carry, a pytree of [columns, features], [columns, 1] or
            [columns] arrays.
        streams: operands of the task, [rows, features] each.
        block: rows in a block.
        merge: merge(a, b), associative, joins the carries of two adjacent ranges of
            rows. With it the planner may split the fold; then `init` is used exactly
            once, by the first part.
        identity: the carry that the other parts start from: merge(c, identity) == c.
            Default: `init`, which must then be neutral itself.

    Returns:
        The last carry.
    """
    streams = tuple(streams)
    if not streams or any(s.ndim != 2 for s in streams):
        shapes = ", ".join(_show(s) for s in streams)
        raise TraceError(
            f"mk.fold over ({shapes})",
            caller(),
            "streams are operands of the task, [rows, features] each",
        )
    leaves, tree = jax.tree.flatten(init)
    leaves = [jnp.asarray(x) for x in leaves]
    if any(x.ndim not in (1, 2) for x in leaves):
        raise TraceError(
            f"mk.fold carries ({', '.join(map(_show, leaves))})",
            caller(),
            "a carry is [columns, features], [columns, 1] or [columns]: use "
            "jnp.zeros((columns, 1)) for a number",
        )
    neutral = leaves if identity is None else jax.tree.leaves(identity)
    if len(neutral) != len(leaves):
        raise TraceError(
            f"mk.fold: identity of {len(neutral)} arrays for an init of {len(leaves)}",
            caller(),
            "identity is a carry: it has the structure of init",
        )
    neutral = [jnp.asarray(n, x.dtype) for n, x in zip(neutral, leaves, strict=True)]

    def step(*args: Array) -> list[Array]:
        blocks, rest = args[: len(streams)], args[len(streams) :]
        carry = body(jax.tree.unflatten(tree, rest[1:]), blocks, rest[0])
        return _same(jax.tree.leaves(carry), leaves, "body of mk.fold")

    def join(*args: Array) -> list[Array]:
        assert merge is not None
        half = len(args) // 2
        a, b = (jax.tree.unflatten(tree, x) for x in (args[:half], args[half:]))
        return _same(jax.tree.leaves(merge(a, b)), leaves, "merge of mk.fold")

    shapes = [jax.ShapeDtypeStruct((block, *s.shape[1:]), s.dtype) for s in streams]
    mask = jax.ShapeDtypeStruct((block,), jnp.bool_)
    carry = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    traced = jax.make_jaxpr(step)(*shapes, mask, *carry)
    joined = None
    if merge is not None:
        closed = jax.make_jaxpr(join)(*carry, *carry)
        if closed.consts:
            shapes = ", ".join(str(jnp.shape(c)) for c in closed.consts)
            raise TraceError(
                f"the merge of an mk.fold captures values of shapes {shapes}",
                caller(),
                "put them in the carry",
            )
        joined = closed.jaxpr
    count = extent_p.bind(streams[0], axis=0)[0]
    outs = fold_p.bind(
        count,
        *traced.consts,
        *streams,
        *leaves,
        *neutral,
        jaxpr=pe.convert_constvars_jaxpr(traced.jaxpr),
        merge=joined,
        consts=len(traced.consts),
        streams=len(streams),
        block=block,
    )
    return jax.tree.unflatten(tree, outs)


def _same(got: list[Array], want: list[Array], who: str) -> list[Array]:
    shown = [f"({_show(g)})" for g in got], [f"({_show(w)})" for w in want]
    if shown[0] != shown[1]:
        raise TraceError(
            f"the {who} returns {', '.join(shown[0])}, its carry is "
            f"{', '.join(shown[1])}",
            caller(),
            "return the carry in the shapes and dtypes of init: cast with astype",
        )
    return got


def _show(x: Array) -> str:
    return f"{jnp.dtype(x.dtype).name}[{', '.join(map(str, x.shape))}]"
