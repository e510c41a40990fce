"""Blocks of arrays in plain JAX, written by all instances of a call.

Blocks that tile an array are put together by a transposition and a reshape, blocks at
positions known only at run time by a scatter. Writes beyond an array or a run-time
range are dropped.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from mkdsl.lang.expr import Expr
from mkdsl.lang.program import Access, Axis
from mkdsl.runtime.blocks import Context, Tiling, moves, tiling_of

Array = Any
Position = Any


def write(
    base: Array | None, access: Access, blocks: Array, shape: Any, context: Context
) -> Array:
    """The buffer after all instances of a call have written their blocks.

    Args:
        base: the buffer before; None if it was never written.
        blocks: [grid.., elements of the block..].
        shape: shape and dtype of the buffer.
    """
    blocks = jnp.reshape(blocks, (*context.grid, *(a.size for a in access.axes)))
    tilings = [
        Tiling(0, ()) if not moves(a.start) else tiling_of(a, context)
        for a in access.axes
    ]
    regular = [t for t in tilings if t is not None]
    used = sorted(g for t in regular for g in t.axes)
    missing = [g for g in range(len(context.grid)) if g not in used]
    in_order = (
        len(regular) == len(tilings)
        and len(used) == len(set(used))
        and all(context.grid[g] == 1 for g in missing)
        and all(
            _writable(a, n, context)
            for a, n in zip(access.axes, access.view, strict=True)
        )
    )
    if in_order:
        return _write_regular(base, access, blocks, regular, shape, context)
    view = empty(shape) if base is None else base
    return jnp.reshape(
        _scatter(jnp.reshape(view, access.view), access, blocks, context), shape.shape
    )


def empty(shape: Any) -> Array:
    """Memory that nothing has written: NaN, so that a read of it shows."""
    floating = jnp.issubdtype(shape.dtype, jnp.floating)
    return jnp.full(shape.shape, jnp.nan if floating else 0, shape.dtype)


def _writable(axis: Axis, size: int, context: Context) -> bool:
    """True if the blocks, cut at the end of the array, need no run-time check."""
    if moves(axis.start):
        return axis.extent is None
    known = context.range(axis.start)
    constant = axis.start.is_constant and axis.extent is None
    return constant or (known is not None and context.inside(axis, size))


def _write_regular(
    base: Array | None,
    access: Access,
    blocks: Array,
    tilings: Sequence[Tiling],
    shape: Any,
    context: Context,
) -> Array:
    rank = len(context.grid)
    order: list[int] = []
    sizes: list[int] = []
    for d, (axis, tiling) in enumerate(zip(access.axes, tilings, strict=True)):
        order += [*tiling.axes, rank + d]
        sizes.append(math.prod(context.grid[g] for g in tiling.axes) * axis.size)
    single = [g for g in range(rank) if g not in order]
    value = jnp.reshape(jnp.transpose(blocks, (*single, *order)), sizes)
    starts = [
        t.first if t.axes else context.value(a.start, ())
        for a, t in zip(access.axes, tilings, strict=True)
    ]
    kept = [
        min(n, size - first) if isinstance(first, int) else n
        for n, size, first in zip(sizes, access.view, starts, strict=True)
    ]
    value = value[tuple(slice(0, n) for n in kept)]
    if tuple(kept) == access.view:
        return jnp.reshape(value, shape.shape)
    view = jnp.reshape(empty(shape) if base is None else base, access.view)
    at = [jnp.asarray(s, jnp.int32) for s in starts]
    return jnp.reshape(lax.dynamic_update_slice(view, value, at), shape.shape)


def _scatter(view: Array, access: Access, blocks: Array, context: Context) -> Array:
    """Write blocks at run-time positions, element by element where they may be cut."""
    rank, count = len(context.grid), len(access.axes)
    whole = count
    while whole and _covers(access.axes[whole - 1], access.view[whole - 1]):
        whole -= 1
    points = context.points()
    index: list[Array] = []
    for d, axis in enumerate(access.axes[:whole]):
        inner = jnp.arange(axis.size, dtype=jnp.int32)
        at = _spread(context.value(axis.start, points), whole) + inner.reshape(
            [-1 if i == d else 1 for i in range(whole)]
        )
        dropped = at < 0  # A negative index would count from the end.
        if axis.extent is not None:
            stop = _spread(context.value(axis.extent, points), whole)
            dropped |= (
                inner.reshape([-1 if i == d else 1 for i in range(whole)]) >= stop
            )
        index.append(jnp.where(dropped, access.view[d], at))
    shape = blocks.shape[: rank + whole]
    places = tuple(jnp.broadcast_to(i, shape) for i in index)
    return view.at[places].set(blocks, mode="drop")


def _covers(axis: Axis, size: int) -> bool:
    return axis.start == Expr() and axis.size == size and axis.extent is None


def _spread(value: Position, dims: int) -> Array:
    """A value per grid point, with room for the dimensions of a block."""
    value = jnp.asarray(value, jnp.int32)
    return value.reshape(*value.shape, *(1,) * dims) if value.ndim else value


def dropped_writes(
    access: Access, context: Context, points: Sequence[Position]
) -> Array | None:
    """At which grid points a run-time position is outside of the array.

    Returns:
        bool, or None if no position depends on a run-time scalar. The cut of a last
        block of a ragged array is not a dropped write.
    """
    found: Array | None = None
    for axis, size in zip(access.axes, access.view, strict=True):
        if not axis.start.reads:
            continue
        start = context.value(axis.start, points)
        steps = (axis.start.constant, *(k for _, k in axis.start.terms))
        aligned = all(k % axis.size == 0 for k in steps)
        bad = (start < 0) | (start + (1 if aligned else axis.size) > size)
        found = bad if found is None else found | bad
    return found
