"""What a launch leaves behind does not reach the next one, and stamps change nothing.

Counters are used by other plans in between, memory holds NaN before a launch. After an
interrupted launch: test_debug.py.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mkdsl as mk
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.emit.kernel import Launcher
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import H200
from mkdsl.lower.pipeline import Options, compile_program
from models.decode import decode_params
from models.registry import random_params
from tests.gpu.codebook import example, recall
from tests.gpu.decoding import filled_cache, make_step, same_bits
from tests.lower.emit.lowered import Kernel, kernels, ptx
from tests.tiny_llama import TINY

Array = Any
LAUNCHES = 200
# Plans of one program with other tasks, and so other counts, each.
OPTIONS = [
    Options(decompose=DecomposeOptions(split=False, splits=(("read_out", parts),)))
    for parts in (1, 2, 3)
]

pytestmark = pytest.mark.timeout(120, method="thread")
everywhere = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)


def plan_of(options: Options) -> KernelPlan:
    program = mk.megakernel(recall).trace(*jax.eval_shape(example)).program
    return compile_program(program, H200, options)


def test_the_plans_differ() -> None:
    events = [plan_of(o).schedule.events for o in OPTIONS]
    counts = {tuple(len(e.members) for e in graph.events) for graph in events}
    assert len(counts) == len(OPTIONS)


@everywhere
def test_plans_in_turn_give_the_bits_of_each_alone(implementation: Any) -> None:
    args = example()
    steps = [
        mk.megakernel(recall, implementation=implementation, options=o) for o in OPTIONS
    ]
    alone = [jax.jit(step)(*args) for step in steps]

    @jax.jit
    def in_turn(args: Any, alone: Any) -> Array:
        def one(_: Array, right: Array) -> Array:
            for step, want in zip(steps, alone, strict=True):
                right += same_bits(step(*args), want).astype(jnp.int32)
            return right

        return lax.fori_loop(0, LAUNCHES, one, jnp.int32(0))

    assert int(in_turn(args, alone)) == LAUNCHES * len(steps)


@everywhere
def test_results_are_written_whatever_memory_holds(implementation: Any) -> None:
    """Rows of length 0 and a result that a tile writes in part, in memory of NaN."""
    lengths, slots = (0, 64, 0), 128
    params = decode_params(TINY, random_params(TINY, jax.random.key(0)))
    step = make_step(TINY, len(lengths), slots, implementation, logits=True)
    run = jax.jit(step)
    tokens = jnp.array([7, 300, 508], jnp.int32)
    cache = filled_cache(TINY, lengths, slots, jax.random.key(1))
    first = run(params, cache, tokens)
    assert np.isfinite(first[0]).all()
    for value in (np.nan, -1.0):
        # Freed at once: what the next call allocates lies here.
        for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 24):
            block = jnp.full(size, value, jnp.float32)
            block.block_until_ready()
            block.delete()
        assert same_bits(run(params, cache, tokens), first)


def lowered(launcher: Launcher) -> Kernel:
    traced = jax.jit(launcher.run).trace(*jax.tree.leaves(jax.eval_shape(example)))
    (kernel,) = kernels(traced.lower(lowering_platforms=("cuda",)))
    return kernel


@pytest.mark.slow
def test_counters_are_zero_in_every_launch() -> None:
    """They are an operand that XLA fills with zeros before each launch."""
    launcher = launchers()[0]
    count = len(launcher.plan.schedule.events.events)
    traced = jax.jit(launcher.run).trace(*jax.tree.leaves(jax.eval_shape(example)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @mosaic_gpu_v2\((.*?)\)", text)
    zeros = re.findall(
        rf"(%\w+) = stablehlo.broadcast_in_dim (%\w+), .* -> tensor<{count}xi32>", text
    )
    used = [source for name, source in zeros if name in call.split(", ")]
    assert len(used) == 1
    assert re.search(rf"{used[0]} = stablehlo.constant dense<0> : tensor<i32>", text)


@functools.cache
def launchers() -> tuple[Launcher, Launcher]:
    plan = plan_of(Options())
    return Launcher(plan), Launcher(plan, timestamps=True)


@pytest.mark.slow
def test_stamps_are_all_that_a_build_with_stamps_has_more() -> None:
    """One elected thread stores the time: no barrier, signal or poll comes or goes."""
    plain, timed = (ptx(lowered(launcher)) for launcher in launchers())
    assert any("globaltimer" in line for line in timed)
    own = ("globaltimer", "elect.sync", "shfl.sync")
    a, b = (
        [line for line in program if not any(word in line for word in own)]
        for program in (plain, timed)
    )
    assert a == b


@pytest.mark.gpu
def test_stamps_change_no_bit() -> None:
    leaves = jax.tree.leaves(example())
    plain, timed = (jax.jit(launcher.run) for launcher in launchers())
    want = plain(*leaves).outputs
    for _ in range(20):
        found = timed(*leaves)
        assert np.asarray(found.stamps).any()
        assert same_bits(found.outputs, want)
