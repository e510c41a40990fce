"""Dots: pages of a stream as operand A of wgmma, what is resident as operand B.

product          what is read                      what counts
dot              64 rows x columns                 all
stacked_dot      pieces of the depth as rows       equal pieces (pages.stacks)
long_dot         one column, pieces as columns     equal pieces (lower/pieces.py)
block_dot        a block of a fold                 all
"""

# pyright: reportPrivateImportUsage=false
# (Pallas is typed in part.)

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower.emit.tiles import TileOps
from mkdsl.lower.emit.values import (
    F32,
    I32,
    WG,
    Long,
    PageBlock,
    Pages,
    Streams,
    Tile,
    position,
)
from mkdsl.lower.pages import PIECE, round_up, stacks

Value = Any
Ref = Any


class DotOps(TileOps):
    """Dots of a body.

    Args:
        columns: columns of the task, a multiple of 8.
        scratch: shared memory for computed operands and rolls, in order of use.
        sums: shared memory for stacked products, in order of use.
        streams: where pages come from.
    """

    def __init__(
        self,
        columns: int,
        scratch: Sequence[Ref],
        sums: Sequence[Ref],
        streams: Streams,
    ) -> None:
        super().__init__(columns)
        self.scratch: Iterator[Ref] = iter(scratch)
        self.sums: Iterator[Ref] = iter(sums)
        self.streams = streams
        self.stored: dict[int, Ref] = {}
        self.in_place: dict[int, Ref] = {}
        self.pieces: dict[int, Ref] = {}

    def operand(self, v: Any, x: Value) -> Ref:
        """A value as operand B: its block, or stored to shared memory, once."""
        if isinstance(x, Tile | Long) and x.ref is not None:
            return x.ref
        if id(v) in self.stored:
            return self.stored[id(v)]
        place = self.in_place.get(id(v))
        ref = self.stored[id(v)] = next(self.scratch) if place is None else place
        if isinstance(x, Long):
            ref.transpose((1, 0))[...] = x.value.astype(ref.dtype)
            plgpu.commit_smem()
            return ref
        features = v.aval.shape[-1]
        padded = round_up(features, 64)

        def put(start: Any, rows: int, carry: Value) -> Value:
            part = ref if rows == padded else ref.at[:, pl.ds(start, rows)]
            value = self.masked(self.rows(x, start, rows, {}), start, features, 0)
            part.transpose((1, 0))[...] = value.astype(ref.dtype)
            return carry

        self.loop(features, put, 0)
        plgpu.commit_smem()
        return ref

    def dot(self, e: Any, x: Value, w: Value) -> list[Value]:
        b = self.operand(e.invars[0], x)
        if isinstance(w, PageBlock):
            return [self.block_dot(b, w)]

        if isinstance(x, Long):
            return [self.long_dot(b, w)]
        if w.rows < 64:
            return [self.stacked_dot(b, w)]

        def pages(acc: Ref) -> Value:
            def step(chunks: Sequence[Ref], first: Any, none: Value) -> Value:
                at = first
                for ref in chunks:
                    # Pallas cannot slice a tiled array at a constant that is traced.
                    start = at if isinstance(at, int) else pl.multiple_of(at, 64)
                    k = pl.ds(start, ref.shape[1])
                    plgpu.wgmma(acc, ref, b.at[:, k].transpose((1, 0)))
                    at = at + ref.shape[1]
                plgpu.wgmma_wait(0)
                return none

            self.streams.dot(w, step, 0)
            return acc[...]

        out = pl.run_scoped(pages, plgpu.ACC((w.rows, self.columns), F32))
        self.streams.advance(w)
        return [out]

    def stacked_dot(self, b: Ref, w: Pages) -> Value:
        """A dot of fewer than 64 rows: pieces of the depth as rows (pages.stacks).

        Row c * rows + r of a product has piece c of row r. Of its 8 columns for each
        piece of b, those of piece c count. Eight columns of the task at a time.
        """
        n, groups = stacks(w.rows), self.columns // 8
        view = self.pieces.get(id(b))

        def multiply(acc: Ref, group: int, ref: Ref, first: Any, at: int) -> None:
            """Add the product with features [at, at + n) of every piece."""
            width = ref.shape[1]
            if view is not None:
                row = group * (view.shape[0] // groups) + lax.div(first, w.width) * 8
                rows = pl.ds(pl.multiple_of(row, 8), 8 * n)
                part = view.at[rows, pl.ds(at, width)]
                plgpu.wgmma(acc, ref, part.transpose((1, 0)))
                return
            for c in range(n):
                start = pl.multiple_of(first + c * w.width + at, 64)
                part = b.at[pl.ds(8 * group, 8), pl.ds(start, width)]
                plgpu.wgmma(acc.at[:, pl.ds(8 * c, 8)], ref, part.transpose((1, 0)))

        def pages(*accs: Ref) -> Value:
            def step(chunks: Sequence[Ref], first: Any, none: Value) -> Value:
                at = 0
                for ref in chunks:
                    for group, acc in enumerate(accs):
                        multiply(acc, group, ref, jnp.int32(first), at)
                    at += ref.shape[1]
                plgpu.wgmma_wait(0)
                return none

            self.streams.dot(w, step, 0)
            return [acc[...] for acc in accs]

        shape = plgpu.ACC((64, 8 * n), F32)
        products = pl.run_scoped(pages, *[shape] * groups)
        self.streams.advance(w)
        row, owns = position(0, 64, 8), list[Value]()
        for product in products:
            own = product[:, :8]
            for c in range(1, n):
                own = jnp.where(row < c * w.rows, own, product[:, 8 * c : 8 * c + 8])
            owns.append(own)
        return self.sum_of_pieces(owns, w.rows)

    def long_dot(self, b: Ref, w: Pages) -> Value:
        """A dot of one column whose left side lies in pieces, one of which is a column.

        Of the products of a page with eight pieces of b, that with its own counts; in a
        stacked page (pages.stacks) each piece of the depth has its own.
        """
        n = stacks(w.rows)
        rows = w.rows * n
        column = plgpu.broadcasted_iota(I32, (rows, 8), 1, layout=WG)
        below = lax.div(position(0, rows, 8), jnp.int32(w.rows)) if n > 1 else 0

        def step(chunks: Sequence[Ref], first: Any, total: Value) -> Value:
            piece, inside = lax.div(first, PIECE), lax.rem(first, PIECE)
            group = pl.ds(pl.multiple_of(lax.div(piece, 8) * 8, 8), 8)

            def product(acc: Ref) -> Value:
                at = 0
                for ref in chunks:
                    start = pl.multiple_of(inside + at, 64)
                    part = b.at[group, pl.ds(start, ref.shape[1])]
                    plgpu.wgmma(acc, ref, part.transpose((1, 0)))
                    at += ref.shape[1]
                plgpu.wgmma_wait(0)
                return acc[...]

            own = pl.run_scoped(product, plgpu.ACC((rows, 8), F32))
            zero = plgpu.layout_cast(jnp.zeros((rows, 8), F32), WG)
            mine = column == below + lax.rem(piece, 8)
            return plgpu.layout_cast(total + jnp.where(mine, own, zero), WG)

        zero = plgpu.layout_cast(jnp.zeros((rows, 8), F32), WG)
        total = jnp.sum(self.streams.dot(w, step, zero), axis=1)
        self.streams.advance(w)
        every = lax.broadcast_in_dim(total, (rows, 8), (0,))
        every = plgpu.layout_cast(every, WG)
        return every if n == 1 else self.sum_of_pieces([every], w.rows)

    def sum_of_pieces(self, owns: Sequence[Value], rows: int) -> Value:
        """The sum over pieces of [pieces * rows, 8], for every 8 columns of the task:
        [64, columns], of which the first `rows` rows count."""
        sums = next(self.sums)
        for group, own in enumerate(owns):
            for start in (0, 64):
                sums.at[pl.ds(start, 64), pl.ds(8 * group, 8)][...] = own
        plgpu.commit_smem()
        # Row r of piece 0 meets row r of the others; rows from `rows` on are padding.
        shifted = [
            plgpu.load(sums.at[pl.ds(c * rows, 64)], layout=WG, optimized=False)
            for c in range(stacks(rows))
        ]
        return functools.reduce(lax.add, shifted)

    def block_dot(self, b: Ref, w: PageBlock) -> Value:
        """A dot with a block of a fold, as it stands or transposed."""

        def accumulate(pairs: Sequence[tuple[Ref, Ref]], rows: int) -> Value:
            def body(acc: Ref) -> Value:
                for left, right in pairs:
                    plgpu.wgmma(acc, left, right.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return acc[...]

            return pl.run_scoped(body, plgpu.ACC((rows, self.columns), F32))

        if w.transposed:
            parts = [accumulate([(c.transpose((1, 0)), b)], 64) for c in w.chunks]
            return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)
        many = len(w.chunks) > 1
        pairs = [
            (c, b.at[:, pl.ds(64 * j, 64)] if many else b)
            for j, c in enumerate(w.chunks)
        ]
        return accumulate(pairs, w.rows)
