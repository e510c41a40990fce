"""The storer: writes results to device memory, then signals."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower import encode
from mkdsl.lower import stamps as ts
from mkdsl.lower.emit.blocks import Copy
from mkdsl.lower.emit.code import Code
from mkdsl.lower.emit.stores import stores
from mkdsl.lower.emit.sync import Counters
from mkdsl.lower.emit.walk import (
    Instruction,
    Kernel,
    part_of,
    walk,
)

Ref = Any
Value = Any


def storer(kernel: Kernel) -> None:
    """Write results to device memory, then signal."""
    mem = kernel.memory

    def branch(code: Code) -> Callable[[Value, Value], Value]:
        def run(i: Value, state: Value) -> Value:
            at = Instruction(kernel, i)
            plgpu.barrier_wait(mem.ready)
            kernel.stamp(i, ts.BEGAN)
            for k, block in enumerate(code.results):
                layout = code.layouts[block.operand.access.buffer]
                flat = kernel.counters is not None
                for copy in stores(block, layout, at, flat=flat):
                    refs = mem.raw_staging if copy.raw else mem.staging
                    source = part_of(refs[code.index][k], copy.shared)
                    _copy_out(kernel, at, copy, source)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)
            kernel.stamp(i, ts.STORED)
            plgpu.barrier_arrive(mem.drained)
            if kernel.counters is not None:
                _signal(kernel.counters, at.word(encode.SIGNAL))
            else:
                plgpu.barrier_arrive(mem.done)
            kernel.stamp(i, ts.SIGNALLED)
            return state

        return run

    walk(kernel, [branch(c) for c in kernel.codes])


def _signal(counters: Counters, event: Value) -> None:
    @pl.when(event >= 0)
    def _() -> None:
        counters.signal(event)


def _copy_out(kernel: Kernel, at: Instruction, copy: Copy, source: Ref) -> None:
    target = kernel.memory.arrays[copy.array].at[copy.place]
    inside: Value = None
    for start, n in copy.guard:
        one = at(start) < n
        inside = one if inside is None else jnp.logical_and(inside, one)
    if inside is None:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
        return

    @pl.when(inside)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
