"""The meaning of a task on values: whole, or in the parts of a split.

    full    = after(cut(before(operands)))
    partial = cut(before(operands)) over one part of the depth or of the rows
    combine = after(parts in order, joined)

`run_full(task, operands, pids)` gives the results, one per body result;
`run_partial(task, operands, pids, part)` the accumulators (dots) or carries (fold) of
one part; `run_combine(task, operands, pids, cuts)` the results, given those of all
parts. All of them work on numpy and jax values, eagerly and under jit and vmap.

Source: the three modes of lower/ir.py, Kind; mk.dot and mk.fold of lang/primitives.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from mkdsl.lang.body import Body, evaluate
from mkdsl.lang.primitives import (
    dot_p,
    extent_p,
    fold_loop,
    fold_p,
    program_id_p,
    split_fold,
)
from mkdsl.lang.program import TaskDef

Array = Any
Count = Any


@dataclass(frozen=True, slots=True)
class Operand:
    """What an instance sees of one operand.

    Attributes:
        value: the block, zero beyond its extents. A stream of a fold may be any array
            of rows: its rows from `first` on are folded, and what lies outside of them
            is not looked at. None where only the extents are needed.
        extents: valid elements per axis of the block, None where all are. A part of a
            fold has only the rows of that part.
        first: first row of a stream of a fold; in a part, the first element of the
            depth that a streamed operand of a dot holds.
    """

    value: Array
    extents: tuple[Count | None, ...] = ()
    first: Count = 0

    def extent(self, axis: int, size: int) -> Count:
        """Number of valid elements of an axis whose block has `size`."""
        known = self.extents[axis] if self.extents else None
        return size if known is None else known


Operands = Mapping[int, Operand]


def zero_beyond(value: Array, extents: Sequence[Count | None]) -> Array:
    """The block with zeros in place of elements beyond its extents."""
    for axis, extent in enumerate(extents):
        if extent is None:
            continue
        shape = [1] * value.ndim
        shape[axis] = value.shape[axis]
        exists = jnp.reshape(jnp.arange(value.shape[axis]) < extent, shape)
        value = jnp.where(exists, value, jnp.zeros((), value.dtype))
    return value


def run_full(task: TaskDef, operands: Operands, pids: Sequence[Any]) -> list[Array]:
    """Results of one instance of a task.

    Args:
        operands: by index among the parameters of the task.
        pids: position on each axis of the grid.
    """
    body: Body = task.body
    special = _special(body, operands, pids, 0)
    return evaluate(body.equations, _known(body, operands), body.outvars, special)


def run_partial(
    task: TaskDef, operands: Operands, pids: Sequence[Any], part: int
) -> list[Array]:
    """Accumulators of the dots, or carries of the fold, of one part of an instance.

    Args:
        operands: those that stand before the cut. Streamed operands hold the part:
            for dots a range of the depth that starts at `first` (so does the left side
            where it is an operand as it stands), for a fold the rows of the part.
        part: number of the part; only part 0 starts a fold from its init.
    """
    body: Body = task.body
    equations = (*body.before, *body.cut_equations)
    special = _special(body, operands, pids, part)
    return evaluate(equations, _known(body, operands), body.cut_vars, special)


def run_combine(
    task: TaskDef,
    operands: Operands,
    pids: Sequence[Any],
    cuts: Sequence[Array],
) -> list[Array]:
    """Results of an instance from its parts.

    Args:
        operands: those that stand after the cut.
        cuts: one array [parts, ...] per accumulator or carry.
    """
    body: Body = task.body
    known = _known(body, operands)
    special = _special(body, operands, pids, 0)
    parts = [list(values) for values in zip(*cuts, strict=True)]
    joined = parts[0]
    for values in parts[1:]:
        joined = _join(body, joined, values)
    known.update(zip(body.cut_vars, joined, strict=True))
    return evaluate(body.after, known, body.outvars, special)


def _join(body: Body, left: list[Array], right: list[Array]) -> list[Array]:
    if body.cut == "dot":
        return [a + b for a, b in zip(left, right, strict=True)]
    merge = body.cut_equations[0].params["merge"]
    known = dict(zip(merge.invars, (*left, *right), strict=True))
    return evaluate(merge.eqns, known, merge.outvars, {})


def _known(body: Body, operands: Operands) -> dict[Any, Array]:
    return {body.invars[i]: o.value for i, o in operands.items()}


def _special(
    body: Body, operands: Operands, pids: Sequence[Any], part: int
) -> dict[Any, Callable[..., list[Array]]]:
    """The primitives whose meaning depends on where their operands come from."""
    given = {body.invars[i]: o for i, o in operands.items()}

    def extent(e: Any, _: Array) -> list[Array]:
        axis, v = e.params["axis"], e.invars[0]
        return [jnp.asarray(given[v].extent(axis, v.aval.shape[axis]), jnp.int32)]

    def program_id(e: Any) -> list[Array]:
        return [jnp.asarray(pids[e.params["axis"]], jnp.int32)]

    def dot(e: Any, x: Array, w: Array) -> list[Array]:
        depth = w.shape[1]
        if x.shape[-1] != depth:
            at = given[e.invars[1]].first + jnp.arange(depth)
            x = jnp.take(x, at, axis=-1, mode="fill", fill_value=0)
            # XLA's CPU backend (jax 0.11.2) has no bf16 product of a gather's result:
            # "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
            x = lax.optimization_barrier(x)
        return dot_p.bind(x, w)

    def inner(jaxpr: Any, values: Sequence[Array]) -> list[Array]:
        known = dict(zip(jaxpr.invars, values, strict=True))
        return evaluate(jaxpr.eqns, known, jaxpr.outvars, {program_id_p: program_id})

    def fold(e: Any, count: Array, *args: Array) -> list[Array]:
        p = e.params
        consts, _, init, identity = split_fold(args, p)
        first = 1 + p["consts"]
        streams = [given[v] for v in e.invars[first : first + p["streams"]]]
        pairs = [(s.value, jnp.asarray(s.first, jnp.int32)) for s in streams]
        start = init if part == 0 else identity
        return fold_loop(p["jaxpr"], consts, pairs, count, start, p["block"], inner)

    return {extent_p: extent, program_id_p: program_id, dot_p: dot, fold_p: fold}
