"""The loader: streams pages of weights and caches into the ring."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower import encode
from mkdsl.lower import stamps as ts
from mkdsl.lower.emit.blocks import Copy, page_copies
from mkdsl.lower.emit.code import Code, Stream
from mkdsl.lower.emit.walk import (
    Instruction,
    Kernel,
    after_previous,
    drain,
    fold_blocks,
    observe_previous,
    slot_rows,
    wait_for,
    walk,
)

Ref = Any
Value = Any


class _Loader:
    """Issues pages: at most `in_flight` on their way, the rest of the ring landed."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.memory = kernel, kernel.memory

    def issue(self, g: Value, s: Stream, copies: Sequence[Copy]) -> Value:
        """Load page number g, once its slot is empty and earlier pages have landed."""
        mem, ring, flying = self.memory, self.kernel.ring, self.kernel.in_flight
        slot = lax.rem(g, ring)

        @pl.when(g >= ring)
        def _() -> None:
            plgpu.barrier_wait(mem.empty.at[slot])

        @pl.when(g >= flying)
        def _() -> None:
            plgpu.barrier_wait(mem.full.at[lax.rem(g - flying, ring)])

        for copy in copies:
            target = _page_target(self.kernel, s, slot, copy)
            source = mem.arrays[copy.array].at[copy.place]
            plgpu.copy_gmem_to_smem(source, target, mem.full.at[slot])
        for _extra in range(self.kernel.page_arrivals - len(copies)):
            plgpu.barrier_arrive(mem.full.at[slot])
        return g + 1

    def dot(self, code: Code, s: Stream, at: Instruction, g: Value) -> Value:
        """All pages of a dot, along its depth."""
        (operand,) = s.operands
        layout = code.layouts[operand.access.buffer]

        def page(p: Value, features: int, g: Value) -> Value:
            shape = s.page[0], features // s.stacks
            copies = page_copies(
                operand,
                layout,
                shape,
                0,
                p * s.page[1],
                at,
                tiled=s.tiled,
                pieces=s.stacks,
            )
            return self.issue(g, s, copies)

        g = lax.fori_loop(0, s.full_pages, lambda p, g: page(p, s.page[1], g), g)
        return page(s.full_pages, s.rest, g) if s.rest else g

    def fold(self, code: Code, s: Stream, at: Instruction, g: Value) -> Value:
        """All blocks of a fold, one page of each operand in turn."""

        def block(i: Value, g: Value) -> Value:
            row = i * s.page[0]
            for operand in s.operands:
                layout = code.layouts[operand.access.buffer]
                copies = page_copies(operand, layout, s.page, row, 0, at, tiled=False)
                g = self.issue(g, s, copies)
            return g

        return lax.fori_loop(0, fold_blocks(s, at), block, g)

    def branch(self, code: Code) -> Callable[[Value, Value], Value]:
        """What the loader does for an instruction of one kind."""

        def run(i: Value, g: Value) -> Value:
            at = Instruction(self.kernel, i)
            after_previous(self.kernel, i)
            if self.kernel.counters is None:
                # Without pages the loader could fall two tasks behind the storer, and
                # a barrier has only two phases.
                plgpu.barrier_arrive(self.kernel.memory.done)
            if code.streams:
                wait_for(self.kernel, at, encode.STREAM_WAITS)
                self.kernel.stamp(i, ts.FIRST_PAGE)
            for s in code.streams:
                g = (self.fold if s.is_fold else self.dot)(code, s, at, g)
            return g

        return run


def loader(kernel: Kernel) -> None:
    """Stream the pages of all instructions."""
    mem, ring = kernel.memory, kernel.ring
    count, total = walk(kernel, [_Loader(kernel).branch(c) for c in kernel.codes])
    drain(mem.empty, ring, total, unseen=ring)
    drain(mem.full, ring, total, unseen=kernel.in_flight)
    observe_previous(kernel, count)


def _page_target(kernel: Kernel, s: Stream, slot: Value, copy: Copy) -> Ref:
    """Where a copy of a page goes."""
    mem, rows = kernel.memory, s.page[0]
    if s.tiled:
        return mem.pages[slot_rows(rows), True].at[(slot, *copy.shared)]
    ref = mem.raw_pages[slot_rows(rows)]
    whole = rows == ref.shape[2] or s.stacks > 1
    return ref.at[(slot, *copy.shared, *(() if whole else (pl.ds(0, rows),)))]
