"""Blocks of arrays in plain JAX, read for all instances of a call.

A read is split in two, so that the arrays of a call are neither gathered nor copied:
`prepare_read` runs once for the whole call; what it returns is mapped over the grid
axes (a dimension cut in blocks is reshaped to [blocks, size] and vmapped) and `finish`
turns one instance's share into its Operand. Blocks at positions known only at run
time, or in no regular order, are gathered in `finish`.

Reads beyond an array or a run-time range are zero.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mkdsl.lang.expr import Expr, Ops, Var
from mkdsl.lang.program import Access, Axis
from mkdsl.runtime.evaluate import Operand

Array = Any
Position = Any
RUN_OPS = Ops(operator.floordiv, operator.mod, jnp.minimum, jnp.maximum)
# Above so many grid points the range of an expression is not computed but unknown.
MOST_POINTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Context:
    """Where a call runs.

    Attributes:
        grid: sizes of its grid axes.
        layers: number of layers of the scan around it, 1 outside.
        layer: position in the scan.
        scalars: program inputs that index expressions read.
    """

    grid: tuple[int, ...]
    layers: int
    layer: Position
    scalars: Mapping[str, Array]

    def value(self, e: Expr, point: Sequence[Position]) -> Position:
        """An index expression at a grid point; positions may be arrays."""
        env = {f"g{i}": at for i, at in enumerate(point)} | {"layer": self.layer}
        return e.evaluate(env, self._read, RUN_OPS)

    def _read(self, buffer: str, index: tuple[Position, ...]) -> Position:
        return self.scalars[buffer].at[index].get(mode="clip")

    def range(self, e: Expr) -> tuple[int, int] | None:
        """Smallest and largest value over grid and layers, None if not known."""
        if e.reads:
            return None
        sizes = {n: self.layers for n in ("layer",) if n in e.variables}
        sizes |= {f"g{i}": n for i, n in enumerate(self.grid) if f"g{i}" in e.variables}
        linear = all(isinstance(atom, Var) for atom, _ in e.terms)
        ends = [
            np.array([0, n - 1]) if linear else np.arange(n) for n in sizes.values()
        ]
        if math.prod(map(len, ends)) > MOST_POINTS:
            return None
        mesh = np.meshgrid(*ends, indexing="ij", sparse=True)
        ops = Ops(operator.floordiv, operator.mod, np.minimum, np.maximum)
        values = np.asarray(e.evaluate(dict(zip(sizes, mesh, strict=True)), ops=ops))
        return int(values.min()), int(values.max())

    def inside(self, axis: Axis, size: int) -> bool:
        """True if every block of the axis is known to lie within the array."""
        known = self.range(axis.start)
        return (
            axis.extent is None
            and known is not None
            and known[0] >= 0
            and known[1] + axis.size <= size
        )

    def points(self) -> tuple[Array, ...]:
        """All grid points, one array per axis that broadcasts to the grid."""
        mesh = np.meshgrid(*map(np.arange, self.grid), indexing="ij", sparse=True)
        return tuple(jnp.asarray(m, jnp.int32) for m in mesh)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A dimension cut in blocks: block (g_a, g_b, ..) starts at `first`, row-major."""

    first: int
    axes: tuple[int, ...]


def tiling_of(axis: Axis, context: Context) -> Tiling | None:
    """How grid axes cut a dimension, None if not in regular order.

    A start that no grid axis moves is a tiling with no axes.
    """
    if axis.extent is not None or axis.start.constant < 0:
        return None
    step, axes = axis.size, list[int]()
    for atom, k in sorted(axis.start.terms, key=lambda term: term[1]):
        if not isinstance(atom, Var) or atom.name == "layer" or k != step:
            return None
        axes.insert(0, int(atom.name[1:]))
        step *= context.grid[axes[0]]
    return Tiling(axis.start.constant, tuple(axes))


def moves(e: Expr) -> bool:
    """True if the value differs between instances of a call."""
    return any(name != "layer" for name in e.variables)


def _moves(axis: Axis) -> bool:
    return moves(axis.start) or (axis.extent is not None and moves(axis.extent))


def take(
    value: Array, dim: int, start: Position, size: int, extent: Position | None
) -> Array:
    """Elements [start, start + size) of a dimension; zero beyond array and extent."""
    at = start + jnp.arange(size, dtype=jnp.int32)
    exists = (at >= 0) & (at < value.shape[dim])
    if extent is not None:
        exists &= jnp.arange(size) < extent
    if size == 1:
        block = lax.dynamic_slice_in_dim(value, start, 1, dim)
    else:
        block = jnp.take(value, at, axis=dim, mode="clip")
    shape = [1] * value.ndim
    shape[dim] = size
    return jnp.where(exists.reshape(shape), block, jnp.zeros((), value.dtype))


def fixed(value: Array, dim: int, axis: Axis, context: Context) -> Array:
    """The block of an axis that is the same for all instances of a call."""
    size = value.shape[dim]
    if context.inside(axis, size):
        if axis.start.is_constant:
            first = int(axis.start)
            return lax.slice_in_dim(value, first, first + axis.size, axis=dim)
        start = context.value(axis.start, ())
        return lax.dynamic_slice_in_dim(value, start, axis.size, dim)
    if axis.start.is_constant and axis.extent is None:
        first = int(axis.start)
        have = lax.slice_in_dim(value, first, min(size, first + axis.size), axis=dim)
        return _padded(have, dim, axis.size)
    extent = None if axis.extent is None else context.value(axis.extent, ())
    return take(value, dim, context.value(axis.start, ()), axis.size, extent)


def _padded(value: Array, dim: int, size: int) -> Array:
    missing = size - value.shape[dim]
    if missing <= 0:
        return value
    widths = [(0, missing) if d == dim else (0, 0) for d in range(value.ndim)]
    return jnp.pad(value, widths)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An operand of a call, before the map over its grid.

    Attributes:
        value: the array, its mapped dimensions first, in the order of grid axes.
        mapped: grid axes of those dimensions.
        finish: from an instance's share of `value` and its grid point to the Operand.
    """

    value: Array
    mapped: tuple[int, ...]
    finish: Callable[[Array, Sequence[Position]], Operand]


def prepare_read(
    value: Array, access: Access, shape: tuple[int, ...], folded: bool, context: Context
) -> Prepared:
    """Prepare an operand.

    Args:
        value: the buffer, of any shape with the elements of `access.view`.
        shape: of the block as the task sees it.
        folded: True if the operand is only a stream of a fold.
    """
    value = jnp.reshape(value, access.view)
    extents = _extents(access, context)
    if folded and _is_rows(access):
        return _rows(value, access, context)
    dims = range(len(access.axes))
    still = [d for d in dims if not _moves(access.axes[d])]
    moving = [d for d in dims if d not in still]
    # Single elements first: what follows them reads less.
    for d in sorted(still, key=lambda d: access.axes[d].size):
        value = fixed(value, d, access.axes[d], context)
    tilings = {d: tiling_of(access.axes[d], context) for d in moving}
    used = [g for t in tilings.values() if t is not None for g in t.axes]
    if None in tilings.values() or len(used) != len(set(used)):
        order = sorted(moving, key=lambda d: access.axes[d].size)
        return _gathered(value, access, order, shape, extents, context)
    regular = {d: t for d, t in tilings.items() if t is not None}
    value, mapped = _tiled(value, access, regular, context)

    def finish(share: Array, point: Sequence[Position]) -> Operand:
        return Operand(jnp.reshape(share, shape), extents(point))

    return Prepared(value, mapped, finish)


def _extents(
    access: Access, context: Context
) -> Callable[[Sequence[Position]], tuple[Position | None, ...]]:
    axes = [
        (axis, size)
        for axis, size in zip(access.axes, access.view, strict=True)
        if not axis.squeezed
    ]

    def extents(point: Sequence[Position]) -> tuple[Position | None, ...]:
        return tuple(
            None
            if context.inside(axis, size)
            else extent_of(axis, size, context, point)
            for axis, size in axes
        )

    return extents


def extent_of(
    axis: Axis, size: int, context: Context, point: Sequence[Position]
) -> Position:
    """Number of elements of the block that exist."""
    start = context.value(axis.start, point)
    extent = jnp.minimum(size - start, axis.size)
    if axis.extent is not None:
        extent = jnp.minimum(extent, context.value(axis.extent, point))
    return jnp.where(start < 0, 0, jnp.maximum(extent, 0))


def _gathered(
    value: Array,
    access: Access,
    order: Sequence[int],
    shape: tuple[int, ...],
    extents: Callable[[Sequence[Position]], tuple[Position | None, ...]],
    context: Context,
) -> Prepared:
    def finish(share: Array, point: Sequence[Position]) -> Operand:
        for d in order:
            axis = access.axes[d]
            extent = None if axis.extent is None else context.value(axis.extent, point)
            start = context.value(axis.start, point)
            share = take(share, d, start, axis.size, extent)
        # XLA on CPU (jax 0.11.2) has no bfloat16 product of two gathered arrays:
        # "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
        share = lax.optimization_barrier(share)
        return Operand(jnp.reshape(share, shape), extents(point))

    return Prepared(value, (), finish)


def _tiled(
    value: Array, access: Access, tilings: Mapping[int, Tiling], context: Context
) -> tuple[Array, tuple[int, ...]]:
    """Dimensions cut in blocks, the grid axes moved to the front."""
    shape: list[int] = []
    where: dict[int, int] = {}
    for d, axis in enumerate(access.axes):
        tiling = tilings.get(d)
        if tiling is None:
            shape.append(axis.size)
            continue
        blocks = [context.grid[g] for g in tiling.axes]
        stop = tiling.first + math.prod(blocks) * axis.size
        end = min(stop, value.shape[d])
        value = lax.slice_in_dim(value, tiling.first, end, axis=d)
        value = _padded(value, d, stop - tiling.first)
        where |= {g: len(shape) + i for i, g in enumerate(tiling.axes)}
        shape += [*blocks, axis.size]
    value = jnp.reshape(value, shape)
    mapped = tuple(sorted(where))
    return jnp.moveaxis(value, [where[g] for g in mapped], range(len(mapped))), mapped


def _is_rows(access: Access) -> bool:
    """True if the block is whole rows of the array seen as a matrix."""
    *lead, _, features = access.axes
    whole = features.start == Expr() and features.size == access.view[-1]
    return whole and features.extent is None and all(a.squeezed for a in lead)


def _rows(value: Array, access: Access, context: Context) -> Prepared:
    """A stream of a fold: all rows, and where an instance's begin."""
    *lead, rows, _ = access.axes
    rows_of = access.view[:-1]

    def finish(share: Array, point: Sequence[Position]) -> Operand:
        first, exists = jnp.int32(0), jnp.bool_(True)
        for axis, size in zip(lead, rows_of[:-1], strict=True):
            at = context.value(axis.start, point)
            exists &= (at >= 0) & (at < size)
            first = first * size + at
        extent = extent_of(rows, rows_of[-1], context, point)
        first = first * rows_of[-1] + context.value(rows.start, point)
        return Operand(share, (jnp.where(exists, extent, 0), None), first)

    return Prepared(jnp.reshape(value, (-1, access.view[-1])), (), finish)
