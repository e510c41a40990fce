"""The fetcher: waits for producers, then brings resident operands in."""

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower import encode
from mkdsl.lower import stamps as ts
from mkdsl.lower.emit.blocks import Copy, loads
from mkdsl.lower.emit.code import Code
from mkdsl.lower.emit.walk import (
    Instruction,
    Kernel,
    after_previous,
    observe_last,
    observe_previous,
    part_of,
    wait_for,
    walk,
)

Ref = Any
Value = Any


def _arena_target(kernel: Kernel, code: Code, k: int, copy: Copy) -> Ref:
    """Where a copy of resident operand k goes."""
    mem = kernel.memory
    if copy.raw and kernel.counters is None:
        # The interpreter gives the two views of a block memory of their own.
        (j,) = copy.shared
        return mem.arena[code.index][k].at[:, pl.ds(64 * j, 64)]
    refs = mem.raw_arena if copy.raw else mem.arena
    return part_of(refs[code.index][k], copy.shared)


def _fetch(
    kernel: Kernel, code: Code, at: Instruction, k: int, part: int, landed: Ref
) -> int:
    """Bring resident operand k, or one block of it; returns the number of copies."""
    block = code.residents[k]
    layout = code.layouts[block.operand.access.buffer]
    parts = code.kind.blocks if k == code.blocked else 1
    copies = loads(block, layout, at, part, parts)
    for copy in copies:
        target = _arena_target(kernel, code, k, copy)
        source = kernel.memory.arrays[copy.array].at[copy.place]
        plgpu.copy_gmem_to_smem(source, target, landed)
    return len(copies)


def fetcher(kernel: Kernel) -> None:
    """Bring resident operands in, once their producers have signalled."""
    mem = kernel.memory

    def branch(code: Code) -> Callable[[Value, Value], Value]:
        def run(i: Value, state: Value) -> Value:
            at = Instruction(kernel, i)

            @pl.when(i > 0)
            def _() -> None:
                plgpu.barrier_wait(mem.free)

            after_previous(kernel, i)
            wait_for(kernel, at, encode.RESIDENT_WAITS)
            kernel.stamp(i, ts.WAITED)
            landed, made = mem.landed[code.arrivals], 0
            for k in range(len(code.residents)):
                made += _fetch(kernel, code, at, k, 0, landed)
            if made == 0:
                plgpu.barrier_arrive(landed)
            for block in range(1, code.kind.blocks):
                wait_for(kernel, at, kernel.blocks_at + 2 * (block - 1))
                there = mem.blocks[code.block_arrivals].at[block - 1]
                _fetch(kernel, code, at, code.blocked, block, there)
            kernel.stamp(i, ts.FETCHED)
            return state

        return run

    count, _ = walk(kernel, [branch(c) for c in kernel.codes])
    observe_last(mem.free, count)
    observe_previous(kernel, count)
