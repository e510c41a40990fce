"""Values of a body in the kernel: tiles on demand, pages, resident operands."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower.emit.blocks import Block

Value = Any
Ref = Any

WG = plgpu.Layout.WGMMA
COLUMN = WG.reduce(0)
ROW = WG.reduce(1)
F32, I32 = jnp.float32, jnp.int32

# Operations without a rule in Mosaic, by others; reductions: (across warps, joining).
EXPANDED: dict[str, Callable[..., Value]] = {
    "log1p": lambda x: jnp.log(1 + x),
    "expm1": lambda x: jnp.exp(x) - 1,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "pow": lambda x, y: jnp.exp2(y * jnp.log2(x)),
    # In the tail the error is that of 1 - erf(x): 1e-7, not relative.
    "erfc": lambda x: 1 - lax.erf(x),
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
    "floor": lambda x: (r := jnp.round(x)) - jnp.where(r > x, 1.0, 0.0).astype(x.dtype),
    "ceil": lambda x: (r := jnp.round(x)) + jnp.where(r < x, 1.0, 0.0).astype(x.dtype),
}
REDUCE: dict[str, tuple[Callable[..., Value], Callable[..., Value]]] = {
    "reduce_sum": (jnp.sum, lax.add),
    "reduce_max": (jnp.max, lax.max),
    "reduce_min": (jnp.min, lax.min),
}


class Tile(NamedTuple):
    """A tile made on demand: at(start, rows, memo) gives [rows, columns].

    Attributes:
        features: features, before padding to a multiple of 64.
        ref: the block in shared memory if it is an operand B of wgmma as it stands.
    """

    features: int
    at: Callable[[Any, int, dict[int, Value]], Value]
    ref: Ref = None


class Long:
    """A row of one column in pieces: made on demand, once, as [PIECE, pieces].

    Attributes:
        ref: the block in shared memory if it is an operand B of wgmma as it stands.
    """

    def __init__(self, make: Callable[[], Value], ref: Ref = None) -> None:
        self._make, self.ref, self._value = make, ref, None

    @property
    def value(self) -> Value:
        """The row in registers, in WGMMA layout."""
        if self._value is None:
            self._value = self._make()
        return self._value


class Pages(NamedTuple):
    """A streamed operand that still is to come.

    Attributes:
        rows: rows of a page of its dot.
        width: features of a page, or of each of its pieces (pages.stacks).
    """

    parameter: int
    rows: int
    width: int = 0


class PageBlock(NamedTuple):
    """A block of a fold in shared memory: [rows, 64] for every 64 features."""

    chunks: tuple[Ref, ...]
    rows: int
    transposed: bool = False


class Streams(Protocol):
    """How a body gets its pages; the consumer role is one."""

    def dot(
        self,
        pages: Pages,
        step: Callable[[Sequence[Ref], Any, Value], Value],
        carry: Value,
    ) -> Value:
        """carry = step(chunks, first feature of operand B, carry) for every page.

        chunks: the page as [max(64, rows), n] blocks of features.
        """
        ...

    def fold(
        self,
        streams: Sequence[Pages],
        count: Value,
        step: Callable[..., list[Value]],
        carry: list[Value],
    ) -> list[Value]:
        """carry = step(i, blocks, carry) for every block of rows in order."""
        ...

    def advance(self, pages: Pages) -> None:
        """Count the pages of a dot as used."""
        ...


def is_tile(x: Value) -> bool:
    """True for tiles and vectors."""
    return isinstance(x, Tile) or jnp.ndim(x) == 2


def position(start: Any, rows: int, columns: int) -> Value:
    """Feature number of each element of [rows, columns]."""
    return plgpu.broadcasted_iota(I32, (rows, columns), 0, layout=WG) + start


def first_column(v: Value) -> Value:
    """Column 0 of [rows, columns]: that of a vector, or of a tile of one column."""
    exact = jnp.issubdtype(v.dtype, jnp.integer)
    low = jnp.asarray(jnp.iinfo(v.dtype).min if exact else -jnp.inf, v.dtype)
    column = plgpu.broadcasted_iota(I32, v.shape, 1, layout=WG)
    other = plgpu.layout_cast(jnp.broadcast_to(low, v.shape), WG)
    return jnp.max(jnp.where(column == 0, v, other), axis=1)


def resident(block: Block, ref: Ref) -> Value:
    """A resident operand as a value."""
    n = block.columns
    if block.long:
        pieces = ref.transpose((1, 0))
        load = functools.partial(plgpu.load, pieces, layout=WG, optimized=False)
        return Long(load, None if block.vector else ref)
    if block.column:
        return plgpu.load(ref.at[pl.ds(0, n)], layout=COLUMN, optimized=False)

    def vector(start: Any, rows: int, _: Any) -> Value:
        v = plgpu.load(ref.at[pl.ds(start, rows)], layout=ROW, optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(v, (rows, n), (0,)), WG)

    def wide(start: Any, rows: int, _: Any) -> Value:
        return plgpu.load(ref.at[pl.ds(start, rows)], layout=WG, optimized=False)

    def tile(start: Any, rows: int, _: Any) -> Value:
        part = ref if rows == block.padded else ref.at[:, pl.ds(start, rows)]
        return plgpu.load(part.transpose((1, 0)), layout=WG, optimized=False)

    if block.vector:
        return Tile(block.features, vector)
    return Tile(block.features, wide) if block.wide else Tile(block.features, tile, ref)
