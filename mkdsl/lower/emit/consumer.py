"""The consumer: runs task bodies on pages and resident operands."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lang.expr import read
from mkdsl.lower import encode
from mkdsl.lower import stamps as ts
from mkdsl.lower.emit.body import Emitter
from mkdsl.lower.emit.code import Code, Stream
from mkdsl.lower.emit.values import WG, PageBlock, Pages, Tile, first_column, resident
from mkdsl.lower.emit.walk import (
    Instruction,
    Kernel,
    fold_blocks,
    observe_last,
    slot_rows,
    walk,
)

Ref = Any
Value = Any


class _Consumer:
    """Runs one instruction; counts the pages that it uses."""

    def __init__(self, kernel: Kernel, code: Code, i: Value, g: Value) -> None:
        self.kernel, self.code, self.g = kernel, code, g
        self.at = Instruction(kernel, i)
        self.i = i
        self.began = False

    def chunks(self, g: Value, s: Stream, features: int) -> list[Ref]:
        """The [rows, features] or [rows, 64] blocks of the page that is number g."""
        ref = self.kernel.memory.pages[slot_rows(s.page[0]), s.tiled]
        slot = lax.rem(g, self.kernel.ring)
        if s.tiled:
            return [ref.at[slot]]
        whole = s.page[0] == ref.shape[2] or s.stacks > 1
        rows = () if whole else (pl.ds(0, s.page[0]),)
        return [ref.at[(slot, j, *rows)] for j in range(features // 64)]

    def take(self, g: Value) -> None:
        plgpu.barrier_wait(self.kernel.memory.full.at[lax.rem(g, self.kernel.ring)])

    def give(self, g: Value) -> None:
        plgpu.barrier_arrive(self.kernel.memory.empty.at[lax.rem(g, self.kernel.ring)])

    def dot(self, pages: Pages, step: Callable[..., Value], carry: Value) -> Value:
        """See values.Streams."""
        s, base = self.code.stream_of(pages.parameter), self.g
        first = self.at(s.first)
        blocks = self.code.kind.blocks
        self.begin_pages()

        def page(p: Value, features: int, carry: Value) -> Value:
            if blocks > 1:
                self.await_block(p, s.full_pages // blocks)
            self.take(base + p)
            chunks = self.chunks(base + p, s, features // s.stacks)
            carry = step(chunks, first + p * s.page[1], carry)
            self.give(base + p)
            return carry

        carry = lax.fori_loop(
            0, s.full_pages, lambda p, c: page(p, s.page[1], c), carry
        )
        carry = page(s.full_pages, s.rest, carry) if s.rest else carry
        self.kernel.stamp(self.i, ts.ENDED_PAGES)
        return carry

    def begin_pages(self) -> None:
        """Note when the first page of the instruction is asked for."""
        if not self.began:
            self.kernel.stamp(self.i, ts.BEGAN_PAGES)
        self.began = True

    def await_block(self, page: Value, pages: int) -> None:
        """Before the first page of a block of so many pages: wait for the block."""

        @pl.when((page > 0) & (lax.rem(page, pages) == 0))
        def _() -> None:
            there = self.kernel.memory.blocks[self.code.block_arrivals]
            plgpu.barrier_wait(there.at[lax.div(page, pages) - 1])

    def advance(self, pages: Pages) -> None:
        """See values.Streams."""
        s = self.code.stream_of(pages.parameter)
        self.g = self.g + s.full_pages + (1 if s.rest else 0)

    def fold(
        self,
        streams: Sequence[Pages],
        count: Value,
        step: Callable[..., list[Value]],
        carry: list[Value],
    ) -> list[Value]:
        """See values.Streams."""
        s, base, n = self.code.stream_of(streams[0].parameter), self.g, len(streams)
        rows = s.page[0]

        def one(i: Value, carry: list[Value]) -> list[Value]:
            first = base + i * n
            blocks: list[PageBlock] = []
            for j in range(n):
                self.take(first + j)
                chunks = tuple(self.chunks(first + j, s, s.page[1]))
                blocks.append(PageBlock(chunks, rows))

            @pl.when((i + 1) * rows > count)
            def _() -> None:
                for b in blocks:
                    _clear(b, i * rows, count)
                plgpu.commit_smem()

            out = step(i, blocks, carry)
            for j in range(n):
                self.give(first + j)
            return out

        total = fold_blocks(s, self.at)
        self.g = base + total * n
        self.begin_pages()
        carry = list(lax.fori_loop(0, total, one, carry))
        self.kernel.stamp(self.i, ts.ENDED_PAGES)
        return carry

    def extent(self, parameter: int, axis: int) -> Value:
        """Elements of an operand's axis that exist."""
        return self.at(self.code.extents[parameter, axis])

    def run(self) -> Value:
        """Emit the instruction; returns the number of pages used so far."""
        code, mem, at = self.code, self.kernel.memory, self.at
        plgpu.barrier_wait(mem.landed[code.arrivals])
        self.kernel.stamp(self.i, ts.LANDED)
        refs = iter(mem.arena[code.index])
        blocks = [None if b is None else next(refs) for b in code.blocks]
        values = [self.value(i, ref) for i, ref in enumerate(blocks)]
        first = None
        if code.kind.mode == "partial" and code.kind.parts > 1:
            first = at.word(encode.PART) == 0
        scratch = mem.scratch[code.index]
        emitter = Emitter(
            code.columns,
            scratch[: len(code.scratch)],
            scratch[len(code.scratch) :],
            self,
            self.extent,
            at.grid(len(code.kind.grid)),
            first,
        )
        known = dict(zip(code.invars, values, strict=False))
        emitter.parameters = {
            id(v): p for v, p in zip(code.invars, code.kind.operands, strict=True)
        }
        emitter.in_place = {
            v: blocks[code.kind.operands.index(p)] for v, p in code.in_place.items()
        }
        if code.stacked and self.kernel.counters is not None:
            # The interpreter gives the two views of a block memory of their own.
            emitter.pieces = {
                id(ref): view
                for whole, views in (
                    (mem.arena, mem.arena_pieces),
                    (mem.scratch, mem.scratch_pieces),
                )
                for ref, view in zip(whole[code.index], views[code.index], strict=True)
            }
        if code.kind.mode == "combine":
            known.update(self.joined(emitter, values[len(code.invars) :]))
        env = emitter.run(code.equations, known)

        @pl.when(self.i > 0)
        def _() -> None:
            plgpu.barrier_wait(mem.drained)

        for k, v in enumerate(code.outvars):
            out = env[v] if not code.is_constant(v) else jnp.asarray(v.val)
            self.put(emitter, k, out)
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.ready)
        self.kernel.stamp(self.i, ts.COMPUTED)
        plgpu.barrier_arrive(mem.free)
        return self.g

    def value(self, i: int, ref: Ref) -> Value:
        """Operand i of the kind as a value; parts of a combine as a reference."""
        o, code = self.code.operands[i], self.code
        if o.param.use == "scalar":
            a = o.access
            return self.at(read(a.buffer, *[x.start for x in a.axes]))
        if o.param.use == "stream":
            index = code.kind.operands[i]
            # After the cut only the extents of a stream are left to use.
            combine = code.kind.mode == "combine"
            if combine:
                return Pages(index, 0)
            s = code.stream_of(index)
            return Pages(index, s.page[0], s.width)
        return ref if o.parts else resident(code.blocks[i], ref)

    def joined(self, emitter: Emitter, refs: Sequence[Ref]) -> dict[Any, Value]:
        """Accumulators or carries of all parts, joined in order."""
        code, parts = self.code, self.code.kind.parts
        blocks = code.blocks[len(code.invars) :]
        if code.kind.task.cut == "fold":

            def part(i: Any) -> list[Value]:
                whole = [
                    resident(b, r.at[i]) for b, r in zip(blocks, refs, strict=True)
                ]
                return [
                    emitter.whole(x, b.features) if isinstance(x, Tile) else x
                    for x, b in zip(whole, blocks, strict=True)
                ]

            outs = emitter.merge(code.cut_equations[0], parts, part)
            return dict(zip(code.cut_vars, outs, strict=True))

        def total(ref: Ref) -> Callable[..., Value]:
            def at(start: Any, rows: int, _: Any) -> Value:
                loaded = [
                    plgpu.load(
                        ref.at[p, pl.ds(start, rows)], layout=WG, optimized=False
                    )
                    for p in range(parts)
                ]
                value = loaded[0]
                for x in loaded[1:]:
                    value = value + x
                return value

            return at

        return {
            v: emitter.tile(b.features, total(r))
            for v, b, r in zip(code.cut_vars, blocks, refs, strict=True)
        }

    def put(self, emitter: Emitter, k: int, value: Value) -> None:
        """Result k into its staging slot."""
        code, block = self.code, self.code.results[k]
        ref = self.kernel.memory.staging[code.index][k]
        if block.column:
            value = value if jnp.ndim(value) else emitter.as_column(value)
            ref[...] = value.astype(block.dtype)
            return
        tiled = len(ref.shape) == 3

        def step(start: Any, rows: int, carry: Value) -> Value:
            memo: dict[int, Value] = {}
            v = emitter.rows(value, start, rows, memo).astype(block.dtype)
            if block.wide and block.vector:
                ref.at[pl.ds(start, rows)][...] = first_column(v)
            elif block.wide:
                ref.at[pl.ds(start, rows)][...] = v
            elif not tiled:
                ref.at[:, pl.ds(start, rows)].transpose((1, 0))[...] = v
            else:
                for j in range(rows // 64):
                    part = v if rows == 64 else v[64 * j : 64 * j + 64]
                    at = (
                        j
                        if isinstance(start, int) and start == 0
                        else (lax.div(start, 64) + j)
                    )
                    ref.at[at].transpose((1, 0))[...] = part
            return carry

        emitter.loop(block.features, step, 0)


def _clear(block: PageBlock, first: Value, count: Value) -> None:
    """Zero the rows of a block that do not exist: they may hold NaN."""
    for chunk in block.chunks:
        for r in range(0, block.rows, 64):
            part = chunk if block.rows == 64 else chunk.at[pl.ds(r, 64)]
            v = plgpu.load(part, layout=WG, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WG) + first + r
            zero = plgpu.layout_cast(jnp.zeros(v.shape, v.dtype), WG)
            part[...] = jnp.where(row < count, v, zero)


def consumer(kernel: Kernel) -> None:
    """Run the bodies."""

    def branch(code: Code) -> Callable[[Value, Value], Value]:
        return lambda i, g: _Consumer(kernel, code, i, g).run()

    count, _ = walk(kernel, [branch(c) for c in kernel.codes])
    observe_last(kernel.memory.drained, count)
