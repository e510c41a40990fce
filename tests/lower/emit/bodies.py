"""Random task bodies over the published table, and programs that run them.

A `Body` is a list of steps, printed as a little program; its function runs them in jnp.
Every float step of the `exact` table keeps small numbers, so that all orders of
evaluation and all roundings agree and results may be compared bit by bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

import mkdsl as mk
from mkdsl.lang.program import Program
from mkdsl.lang.trace import trace_program
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.emit.kernel import build
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import Options, compile_program

Array = Any
BF16, F32, I32, BOOL = "bfloat16", "float32", "int32", "bool"
FEATURES = (64, 128, 192, 320, 640, 2048)
COLUMNS = (1, 3, 8, 16)
ROWS = (8, 64, 100, 128)
# Two instances of every body, so that mk.program_id is not always 0.
INSTANCES = 2

UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "round": jnp.round,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "square": lambda x: jnp.square(jnp.clip(x, -3, 3)),
    "cube": lambda x: jnp.clip(x, -2, 2) ** 3,
    "clamp": lambda x: jnp.clip(x, -2, 2),
    "stop": lax.stop_gradient,
}
SMOOTH: dict[str, Callable[[Array], Array]] = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": lambda x: jnp.log(jnp.abs(x) + 0.5),
    "log2": lambda x: lax.log(jnp.abs(x) + 0.5),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "expm1": jnp.expm1,
    "tanh": jnp.tanh,
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0.5),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "sin": jnp.sin,
    "cos": jnp.cos,
    "power": lambda x: jnp.power(jnp.abs(x) + 0.5, 1.5),
    "reciprocal": lambda x: (jnp.abs(x) + 0.5) ** -1,
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softmax": lambda x: jax.nn.softmax(x, -1),
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda x, y: jnp.clip(x + y, -8, 8),
    "sub": lambda x, y: jnp.clip(x - y, -8, 8),
    "mul": lambda x, y: jnp.clip(x, -2, 2) * jnp.clip(y, -2, 2),
    "max": jnp.maximum,
    "min": jnp.minimum,
}
INTEGER: dict[str, Callable[[Array], Array]] = {
    "not": lambda x: ~x,
    "rem": lambda x: lax.rem(x, jnp.int32(3)),
    "div": lambda x: lax.div(x, jnp.int32(3)),
    "mod": lambda x: x % 3,
    "floordiv": lambda x: x // 3,
    "and": lambda x: x & 5,
    "or": lambda x: x | 2,
    "xor": lambda x: x ^ 3,
    "isign": jnp.sign,
    "ineg": jnp.negative,
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
LOGICAL: dict[str, Callable[[Array, Array], Array]] = {
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "xor": jnp.logical_xor,
    "nor": lambda x, y: ~(x | y),
}
REDUCE: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: jnp.clip(jnp.sum(x.astype(_wide(x)), -1, keepdims=True), -9, 9),
    "reduce_max": lambda x: jnp.max(x, -1, keepdims=True),
    "reduce_min": lambda x: jnp.min(x, -1, keepdims=True),
    "argmax": lambda x: jnp.argmax(x, -1).astype(jnp.int32)[..., None] % 128,
}


def _wide(x: Array) -> Any:
    return jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


@dataclass(frozen=True)
class Kind:
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def floating(self) -> bool:
        return self.dtype in (BF16, F32)


@dataclass(repr=False)
class Body:
    """Operands and steps: each step makes value len(operands) + its position.

    results: which values are returned, cast to what an array may hold.
    """

    columns: int
    operands: list[Kind]
    steps: list[tuple[str, Callable[..., Array], tuple[int, ...]]] = field(
        default_factory=list
    )
    kinds: list[Kind] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [f"columns {self.columns}"]
        lines += [f"v{i}: {k}" for i, k in enumerate(self.operands)]
        for i, (name, _, args) in enumerate(self.steps, len(self.operands)):
            listed = ", ".join(f"v{a}" for a in args)
            lines.append(f"v{i}: {self.kinds[i]} = {name}({listed})")
        return "\n".join([*lines, f"return {self.results}"])

    def __call__(self, *operands: Array) -> tuple[Array, ...]:
        values = list(operands)
        for _, fn, args in self.steps:
            values.append(fn(*[values[a] for a in args]))
        return tuple(self._result(values[i]) for i in self.results)

    def _result(self, x: Array) -> Array:
        """Masks as integers; rows have a multiple of 16 bytes."""
        if x.dtype == jnp.bool_:
            return x.astype(jnp.int32)
        narrow = x.dtype == jnp.bfloat16 and x.shape[-1] % 8
        return x.astype(jnp.float32) if narrow else x

    def broadcast(self, *values: int) -> bool:
        """True if the values have one shape together."""
        try:
            np.broadcast_shapes(*(self.kinds[v].shape for v in values))
        except ValueError:
            return False
        return True

    def storable(self, i: int) -> bool:
        """True if value i may be a result: 32-bit vectors come in 32 features."""
        shape = self.kinds[i].shape
        if i in self.weights or shape == (1,):
            return False
        vector = len(shape) == 1 or (shape[0] == 1 and self.columns > 1)
        return not vector or shape[-1] == 1 or shape[-1] % 32 == 0

    def pruned(self) -> "Body":
        """The same body without what no result needs."""
        count, needed = len(self.operands), set(self.results)
        for i in reversed(range(len(self.steps))):
            if count + i in needed:
                needed |= set(self.steps[i][2])
        at = {old: new for new, old in enumerate(sorted(needed))}
        return Body(
            self.columns,
            [k for i, k in enumerate(self.operands) if i in needed],
            [
                (name, fn, tuple(at[a] for a in args))
                for i, (name, fn, args) in enumerate(self.steps, count)
                if i in needed
            ],
            [k for i, k in enumerate(self.kinds) if i in needed],
            [at[i] for i in self.results],
            [at[i] for i in self.weights if i in needed],
        )

    def add(self, name: str, fn: Callable[..., Array], *args: int) -> None:
        """Append a step if its operands fit it."""
        ins = [
            jax.ShapeDtypeStruct(self.kinds[a].shape, self.kinds[a].dtype) for a in args
        ]
        out = jax.eval_shape(fn, *ins)
        self.steps.append((name, fn, args))
        self.kinds.append(Kind(out.shape, out.dtype.name))


def _matching(body: Body, of: int, *, dtype: str | None = None) -> list[int]:
    """Values that broadcast with value `of`, of its dtype; weights do not count."""
    wanted = dtype or body.kinds[of].dtype
    found: list[int] = []
    for i, k in enumerate(body.kinds):
        if k.dtype != wanted or i in body.weights:
            continue
        if body.broadcast(i, of):
            found.append(i)
    return found


@st.composite
def bodies(draw: st.DrawFn, *, exact: bool = False, steps: int = 7) -> Body:
    """A body over the table.

    Args:
        exact: leave out what rounds.
    """
    columns = draw(st.sampled_from(COLUMNS))
    features = draw(st.sampled_from(FEATURES if columns < 16 else FEATURES[:-1]))
    tile, column = (columns, features), (columns, 1)
    choices = [
        Kind(tile, BF16),
        Kind(tile, F32),
        Kind(tile, I32),
        Kind(column, F32),
        Kind(column, I32),
        Kind((features,), BF16),
        Kind((1, features), F32),
    ]
    if columns * features > 8 * 1024:
        choices = [k for k in choices if k.shape != tile or k.dtype == BF16]
    listed = draw(st.lists(st.sampled_from(choices), max_size=3))
    body = Body(columns, [Kind(tile, BF16), *listed])
    body.kinds = list(body.operands)
    for _ in range(draw(st.integers(1, steps))):
        _step(draw, body, exact)
    made = [i for i in range(len(body.kinds)) if body.storable(i)]
    body.results = draw(st.lists(st.sampled_from(made), min_size=1, max_size=2))
    if len(body.kinds) - 1 in made:
        body.results.append(len(body.kinds) - 1)
    return body.pruned()


def _step(draw: st.DrawFn, body: Body, exact: bool) -> None:
    values = [i for i in range(len(body.kinds)) if i not in body.weights]
    pick = draw(st.sampled_from(values))
    kind = body.kinds[pick]
    groups = ["cast", "where", "compare", "reduce", "constant"]
    groups += ["logical"] if kind.dtype == BOOL else ["binary"]
    if kind.floating:
        groups += ["unary"] if exact else ["unary", "smooth"]
    if kind.dtype == I32:
        groups.append("integer")
    if kind.shape[-1] > 1:
        groups += ["slice", "roll", "dot", "mask", "iota", "rename"]
    group = draw(st.sampled_from(groups))
    _GROUPS[group](draw, body, pick)


def _named(table: dict[str, Callable[..., Array]]) -> Callable[..., None]:
    def unary(draw: st.DrawFn, body: Body, x: int) -> None:
        name = draw(st.sampled_from(sorted(table)))
        body.add(name, table[name], x)

    return unary


def _pair(table: dict[str, Callable[..., Array]]) -> Callable[..., None]:
    def binary(draw: st.DrawFn, body: Body, x: int) -> None:
        name = draw(st.sampled_from(sorted(table)))
        others = _matching(body, x)
        body.add(name, table[name], x, draw(st.sampled_from(others)))

    return binary


def _cast(draw: st.DrawFn, body: Body, x: int) -> None:
    to = draw(st.sampled_from((BF16, F32, I32, BOOL)))

    def cast(v: Array) -> Array:
        return v.astype(to)

    body.add(f"as_{to}", cast, x)


def _where(draw: st.DrawFn, body: Body, x: int) -> None:
    others = _matching(body, x)
    masks = _matching(body, x, dtype=BOOL)
    y = draw(st.sampled_from(others))
    masks = [m for m in masks if body.broadcast(m, x, y)]
    if not masks:
        body.add("compare_self", lambda a, b: a != b, x, y)
        masks = [len(body.kinds) - 1]
    body.add("where", jnp.where, draw(st.sampled_from(masks)), x, y)


def _reduce(draw: st.DrawFn, body: Body, x: int) -> None:
    if body.kinds[x].dtype == BOOL:
        body.add("count", lambda v: jnp.sum(v.astype(jnp.int32), -1, keepdims=True), x)
        return
    name = draw(st.sampled_from(sorted(REDUCE)))
    body.add(name, REDUCE[name], x)


def _constant(draw: st.DrawFn, body: Body, x: int) -> None:
    dtype = body.kinds[x].dtype
    value = draw(st.sampled_from((-1, 0, 1, 2)))
    if dtype == BOOL:
        body.add("xor_constant", lambda v: v ^ bool(value), x)
    elif dtype == I32 and draw(st.booleans()):
        body.add("program_id", lambda v: v + mk.program_id(0), x)
    elif draw(st.booleans()):
        shape = body.kinds[x].shape
        body.add("full", lambda: jnp.full(shape, value, dtype))
    else:
        body.add(f"plus_{value}", lambda v: jnp.clip(v + value, -8, 8), x)


def _slice(draw: st.DrawFn, body: Body, x: int) -> None:
    n = body.kinds[x].shape[-1]
    if n % 64 or n < 128:
        return
    at = 64 * draw(st.integers(1, n // 64 - 1))
    if n <= 256 and draw(st.booleans()):

        def swap(v: Array) -> Array:
            return jnp.concatenate([v[..., at:], v[..., :at]], -1)

        body.add(f"swap_{at}", swap, x)
        return
    if draw(st.booleans()):
        body.add(f"from_{at}", lambda v: v[..., at:], x)
    else:
        body.add(f"split_{at}", lambda v: jnp.split(v, (at,), axis=-1)[0], x)


def _roll(draw: st.DrawFn, body: Body, x: int) -> None:
    if body.kinds[x].shape[-1] > 256 or not body.kinds[x].floating:
        return
    shift = draw(st.integers(-3, 70))
    body.add(f"roll_{shift}", lambda v: mk.roll(v, shift), x)


def _mask(draw: st.DrawFn, body: Body, x: int) -> None:
    n = body.kinds[x].shape[-1]
    if body.operands[0].shape[-1] != n:
        return
    body.add("valid", lambda v: mk.valid(v), 0)


def _iota(draw: st.DrawFn, body: Body, x: int) -> None:
    n = body.kinds[x].shape[-1]
    body.add("iota", lambda: jnp.arange(n, dtype=jnp.int32) % 7)


def _rename(draw: st.DrawFn, body: Body, x: int) -> None:
    shape = (body.columns, body.kinds[x].shape[-1])
    body.add("broadcast", lambda v: jnp.broadcast_to(v, shape), x)


def _dot(draw: st.DrawFn, body: Body, x: int) -> None:
    """The weight is an operand of its own, put before all steps."""
    kind = body.kinds[x]
    if len(body.weights) == 2 or kind.shape[-1] % 8:
        return
    if kind.dtype != BF16:
        body.add("as_lhs", lambda v: v.astype(jnp.bfloat16), x)
        x = len(body.kinds) - 1
    at = len(body.operands)
    rows = draw(st.sampled_from(ROWS))
    body.operands.append(Kind((rows, kind.shape[-1]), BF16))
    body.kinds.insert(at, body.operands[-1])
    moved = lambda i: i + (i >= at)  # noqa: E731
    body.steps = [(n, f, tuple(map(moved, a))) for n, f, a in body.steps]
    body.weights = [*map(moved, body.weights), at]
    body.add("dot", lambda a, b: jnp.clip(mk.dot(a, b), -9, 9), moved(x), at)


_GROUPS: dict[str, Callable[..., None]] = {
    "unary": _named(UNARY),
    "smooth": _named(SMOOTH),
    "integer": _named(INTEGER),
    "binary": _pair(BINARY),
    "compare": _pair(COMPARE),
    "logical": _pair(LOGICAL),
    "cast": _cast,
    "where": _where,
    "reduce": _reduce,
    "constant": _constant,
    "slice": _slice,
    "roll": _roll,
    "mask": _mask,
    "iota": _iota,
    "rename": _rename,
    "dot": _dot,
}


# Programs.


@dataclass(frozen=True)
class Case:
    """A task function and the shapes of its operands."""

    fn: Callable[..., Any]
    operands: tuple[Kind, ...]


def results_of(case: Case) -> list[Any]:
    """Shapes of the results of one instance."""
    ins = [jax.ShapeDtypeStruct(k.shape, k.dtype) for k in case.operands]

    def run(*operands: Array) -> list[Array]:
        return as_list(_placed(case.fn, 0)(*operands))

    return jax.eval_shape(run, *ins)


def _instance(result: Any) -> mk.Spec:
    """Where an instance writes a result."""
    rest = (0,) * len(result.shape)
    return mk.Spec((None, *result.shape), lambda i: (i, *rest))


def as_list(out: Any) -> list[Array]:
    return list(out) if isinstance(out, tuple | list) else [out]


def _placed(fn: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The function as instance `position` runs it: in plain jnp."""

    def run(*operands: Array) -> Any:
        real = mk.program_id
        try:
            mk.program_id = lambda axis: jnp.int32(position)
            return fn(*operands)
        finally:
            mk.program_id = real

    return run


def program_of(cases: Sequence[Case]) -> Program:
    """One call per case, each of INSTANCES instances with whole operands."""
    avals = [jax.ShapeDtypeStruct(k.shape, k.dtype) for c in cases for k in c.operands]

    def program(*arrays: Any) -> list[Any]:
        rest, outs = iter(arrays), []
        for number, case in enumerate(cases):
            shapes = results_of(case)
            specs = tuple(map(_instance, shapes))
            made = mk.call(
                mk.task(case.fn),
                grid=(INSTANCES,),
                in_specs=(mk.whole,) * len(case.operands),
                out_specs=specs,
                out_shape=tuple(
                    mk.Shape((INSTANCES, *s.shape), s.dtype) for s in shapes
                ),
                name=f"body{number}",
            )(*[next(rest) for _ in case.operands])
            outs += made
        return outs

    names = [f"a{i}" for i in range(len(avals))]
    return trace_program(program, avals, "bodies", names)[0]


def plan_of(program: Program, **splits: int) -> KernelPlan:
    """A plan for one SM, with these calls split."""
    options = DecomposeOptions(split=False, splits=tuple(splits.items()))
    return compile_program(program, simulated(1), Options(decompose=options))


def lower(plan: KernelPlan) -> int:
    """Lower for CUDA, without a GPU.

    Returns:
        The bytes of shared memory that Mosaic allots.
    """
    program = plan.schedule.events.graph.program
    buffers = [program.buffer(n) for n in program.inputs]
    avals = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in buffers]
    kernel = build(plan)
    traced = jax.jit(lambda *a: kernel(*a)).trace(*avals)
    sizes: list[int] = []
    measure = mosaic._smem_tree_size

    def measured(buffers: Any) -> int:
        sizes.append(measure(buffers))
        return sizes[-1]

    with mock.patch.object(mosaic, "_smem_tree_size", measured):
        traced.lower(lowering_platforms=("cuda",))
    return max(sizes)


def arguments(program: Program, *, exact: bool = True, seed: int = 0) -> list[Array]:
    """Small integers, exact in every dtype; or normal floats."""
    rng = np.random.default_rng(seed)
    made: list[Array] = []
    for name in program.inputs:
        b = program.buffer(name)
        values: Any = rng.integers(-3, 4, b.shape)
        if not exact and b.dtype != I32:
            # Rows of weights are scaled as in a model, so that dots stay near 1.
            scale = 0.1 if b.shape[0] > 16 and len(b.shape) == 2 else 1.0
            values = rng.standard_normal(b.shape) * scale
        made.append(jnp.asarray(values).astype(b.dtype))
    return made


def interpret(plan: KernelPlan, values: Sequence[Array]) -> list[np.ndarray]:
    """The results of Pallas' GPU interpreter."""
    kernel = build(plan, plgpu.InterpretGPUParams())
    outs = jax.jit(lambda *a: kernel(*a))(*values)
    return [np.asarray(o.astype(jnp.float32)) for o in outs]


def expected(cases: Sequence[Case], values: Sequence[Array]) -> list[np.ndarray]:
    """The results of plain jnp, operation by operation."""
    rest, outs = iter(values), []
    for case in cases:
        operands = [next(rest) for _ in case.operands]
        runs = [as_list(_placed(case.fn, i)(*operands)) for i in range(INSTANCES)]
        outs += [
            np.stack([np.asarray(x.astype(jnp.float32)) for x in same])
            for same in zip(*runs, strict=True)
        ]
    return outs
