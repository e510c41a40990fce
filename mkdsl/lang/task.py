"""@task: a pure function from tiles to tiles, and what the compiler knows of it.

A task is written in jnp and the primitives of mkdsl; called on arrays it is an
ordinary function. `define` traces it once for given block shapes and finds what each
operand is: a stream (second operand of mk.dot, operands of mk.fold), a scalar, a
vector or a tile; what shared memory its own values need; and where it may be split.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mkdsl.errors import MkdslError, SrcInfo, TraceError, caller, defined_at, raised_at
from mkdsl.lang.body import Body, make_body, without_cut
from mkdsl.lang.pieces import depth_in_pieces
from mkdsl.lang.primitives import dot_p, extent_p, fold_p
from mkdsl.lang.program import (
    Dot,
    Fold,
    Param,
    Stream,
    TaskDef,
    Use,
)
from mkdsl.lang.roles import (
    Role,
    check_primitives,
    check_roles,
)
from mkdsl.lang.scratch import planned_scratch


class TaskFunction:
    """What @task returns: callable on arrays, and the operand of mk.call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.src = defined_at(function)

    def __call__(self, *args: Any, **static: Any) -> Any:
        return self.function(*args, **static)

    def __repr__(self) -> str:
        return f"<task {self.name} at {self.src}>"


def task(function: Callable[..., Any]) -> TaskFunction:
    """Declare a pure per-tile function.

    Positional parameters are operands; keyword-only parameters are constants, bound
    with functools.partial. The function sees blocks as jnp values and returns one
    block per output.
    """
    return TaskFunction(function)


@dataclass(frozen=True, slots=True)
class Block:
    """Shape and dtype of an operand or result as the task sees it.

    ragged: per axis, whether some instance's block reaches past the array.
    """

    shape: tuple[int, ...]
    dtype: str
    ragged: tuple[bool, ...] = ()


def unwrap(fn: Any) -> tuple[TaskFunction, dict[str, Any]]:
    """The task and its bound constants."""
    static: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        if fn.args:
            raise TraceError(
                f"functools.partial of {fn.func!r} with positional arguments",
                caller(),
                "bind constants of a task by keyword; operands are those of mk.call",
            )
        static = {**fn.keywords, **static}
        fn = fn.func
    if not isinstance(fn, TaskFunction):
        raise TraceError(
            f"mk.call of {fn!r}, which is not a task",
            caller(),
            "decorate the function with @mk.task",
        )
    return fn, static


def define(fn: Any, blocks: Sequence[Block], src: SrcInfo) -> TaskDef:
    """Trace a task for the given operand blocks.

    Raises:
        TraceError: the body does something that has no meaning on tiles.
    """
    function, static = unwrap(fn)
    name = function.name
    avals = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in blocks]
    traced: list[Any] = []

    def run(*args: Any) -> list[Any]:
        out = function.function(*args, **static)
        traced.append(out)
        return list(out) if isinstance(out, tuple | list) else [out]

    try:
        closed = jax.make_jaxpr(run)(*avals)
    except MkdslError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{b.dtype}{list(b.shape)}" for b in blocks)
        raise TraceError(
            f"task '{name}' fails on blocks ({shapes}): {error}",
            raised_at(error, src),
            "the task sees blocks of these shapes: change it, or the in_specs of the "
            "call",
        ) from error
    if closed.consts:
        shapes = ", ".join(str(jnp.shape(c)) for c in closed.consts)
        raise TraceError(
            f"task '{name}' captures arrays of shapes {shapes}",
            function.src,
            "pass them as operands of the call",
        )
    body = make_body(closed.jaxpr)
    digest = hashlib.sha256(str(closed.jaxpr).encode()).hexdigest()[:12]
    names = _names(function, len(blocks))
    return _describe(name, body, blocks, names, digest, src)


def _names(function: TaskFunction, count: int) -> list[str]:
    """Names of the operands: the positional parameters, *rest numbered."""
    names: list[str] = []
    for p in inspect.signature(function.function).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}{i}" for i in range(count - len(names))]
        elif p.kind is not p.KEYWORD_ONLY:
            names.append(p.name)
    return names[:count] + [f"operand{i}" for i in range(len(names), count)]


def _describe(
    name: str,
    body: Body,
    blocks: Sequence[Block],
    names: Sequence[str],
    digest: str,
    src: SrcInfo,
) -> TaskDef:
    index = {id(v): i for i, v in enumerate(body.invars)}
    check_primitives(body.equations, name)
    _check_used(body, blocks, names, name, src)
    streams = _streams(body, index, name, src)
    streamed = {i for s in streams for i in _operands_of(s)}
    columns = _columns(name, body, blocks, streamed, src)
    uses: list[Use] = [_use(i, b, streamed, columns) for i, b in enumerate(blocks)]
    streams = tuple(_without_vector(s, uses) for s in streams)
    roles = {
        v: Role(_role_kind(u, b), _ragged(u, b))
        for v, u, b in zip(body.invars, uses, blocks, strict=True)
    }
    if body.cut == "dot" and any(
        e.invars[0].aval.shape[0] != columns for e in body.cut_equations
    ):
        # Accumulators of parts have all columns.
        body = without_cut(body)
    env = check_roles(body.equations, roles, columns, name)
    params = tuple(
        Param(n, _tile_shape(b.shape, u), b.dtype, u)
        for n, b, u in zip(names, blocks, uses, strict=True)
    )
    results = tuple(
        _result(v, env, columns, i, name, src) for i, v in enumerate(body.outvars)
    )
    cut_ins = [v for e in body.cut_equations for v in e.invars]
    return TaskDef(
        name=name,
        digest=digest,
        params=params,
        results=results,
        columns=columns,
        streams=streams,
        scratch=planned_scratch(body, columns),
        cut=body.cut,
        long=depth_in_pieces(body, params, streams, columns),
        before=tuple(sorted(body.operands(body.before, cut_ins))),
        after=tuple(sorted(body.operands(body.after, body.outvars))),
        body=body,
        src=src,
    )


def _check_used(
    body: Body, blocks: Sequence[Block], names: Sequence[str], name: str, src: SrcInfo
) -> None:
    used = body.operands(body.equations, body.outvars)
    for i, (block, operand) in enumerate(zip(blocks, names, strict=True)):
        if i not in used:
            raise TraceError(
                f"task '{name}': no result needs operand {i}, {operand}: "
                f"{block.dtype}{list(block.shape)}",
                src,
                "leave it out of the call: its block would be read for nothing",
            )


def _without_vector(stream: Stream, uses: Sequence[Use]) -> Stream:
    """A vector is no operand of the tensor cores as it stands: it is computed."""
    if isinstance(stream, Dot) and stream.lhs is not None:
        tile = uses[stream.lhs] == "tile"
        return stream if tile else replace(stream, lhs=None)
    return stream


def _operands_of(stream: Stream) -> tuple[int, ...]:
    return (stream.rhs,) if isinstance(stream, Dot) else stream.operands


def _streams(
    body: Body, index: dict[int, int], name: str, src: SrcInfo
) -> tuple[Stream, ...]:
    found: list[Stream] = []
    raw_uses: dict[int, int] = {}
    for e in body.equations:
        for v in e.invars:
            if id(v) in index and e.primitive not in (dot_p, extent_p):
                raw_uses[index[id(v)]] = raw_uses.get(index[id(v)], 0) + 1
    for e in body.equations:
        if e.primitive is dot_p:
            x, w = e.invars
            if id(w) not in index:
                raise TraceError(
                    f"task '{name}': the second operand of mk.dot is computed",
                    src,
                    "mk.dot(x, w): w is an operand of the task",
                )
            lhs = index.get(id(x))
            rows, depth = w.aval.shape
            raw = None if lhs is None or lhs in raw_uses else lhs
            found.append(Dot(raw, index[id(w)], rows, depth))
        elif e.primitive is fold_p:
            p = e.params
            a = 1 + p["consts"]
            operands = [index.get(id(v)) for v in e.invars[a : a + p["streams"]]]
            if None in operands:
                raise TraceError(
                    f"task '{name}': a stream of mk.fold is computed",
                    src,
                    "streams of mk.fold are operands of the task",
                )
            carries = tuple((tuple(v.aval.shape), str(v.aval.dtype)) for v in e.outvars)
            ids = tuple(i for i in operands if i is not None)
            found.append(Fold(ids, p["block"], carries))
    return tuple(found)


def _columns(
    name: str,
    body: Body,
    blocks: Sequence[Block],
    streamed: set[int],
    src: SrcInfo,
) -> int:
    shapes = [b.shape for i, b in enumerate(blocks) if i not in streamed]
    shapes += [tuple(v.aval.shape) for v in body.outvars]
    firsts = {s[0] for s in shapes if len(s) == 2}
    columns = max(firsts, default=1)
    if not firsts <= {1, columns}:
        listed = ", ".join(str(list(s)) for s in shapes if len(s) == 2)
        raise TraceError(
            f"task '{name}': blocks {listed} have different numbers of columns",
            src,
            "every tile of a task is [columns, features] with the same columns, or "
            "[1, features]",
        )
    return columns


def _use(i: int, block: Block, streamed: set[int], columns: int) -> Use:
    if i in streamed:
        return "stream"
    if not block.shape:
        return "scalar"
    if len(block.shape) == 1 or (block.shape[0] == 1 and columns > 1):
        return "vector"
    return "tile"


def _role_kind(use: Use, block: Block) -> Any:
    return "column" if use == "tile" and block.shape[1] == 1 else use


def _ragged(use: Use, block: Block) -> bool:
    if not block.ragged:
        return False
    return block.ragged[0] if use == "stream" else block.ragged[-1]


def _tile_shape(shape: tuple[int, ...], use: Use) -> tuple[int, ...]:
    return (1, *shape) if use == "vector" and len(shape) == 1 else shape


def _result(
    v: Any, env: dict[Any, Role], columns: int, i: int, name: str, src: SrcInfo
) -> Param:
    role = env.get(v, Role("scalar"))
    shape, dtype = tuple(v.aval.shape), str(v.aval.dtype)
    if role.kind == "stream" or not shape:
        raise TraceError(
            f"task '{name}': result {i} is a {role.kind if shape else 'scalar'} "
            f"{dtype}{list(shape)}",
            src,
            "results are tiles [columns, features], columns or feature vectors",
        )
    if dtype not in ("bfloat16", "float16", "float32", "int32"):
        raise TraceError(
            f"task '{name}': result {i} is {dtype}{list(shape)}",
            src,
            "results are bfloat16, float16, float32 or int32: cast it with astype",
        )
    use: Use = "tile"
    if len(shape) == 1 and role.kind == "column":
        shape = (shape[0], 1)
    elif len(shape) == 1 or (role.kind == "vector" and shape[0] == 1 and columns > 1):
        shape, use = (1, shape[-1]), "vector"
    return Param(f"result_{i}", shape, dtype, use)
