"""Whole kernels in Pallas' GPU interpreter, on a CPU.

It has no counters and one SM: every task waits until the one before it has been stored.
Bodies, layouts, copies, the page ring and all barriers of an SM are those of the GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import mkdsl as mk
from mkdsl.lower.emit.kernel import build
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import compile_program
from models.llama import decode_params, decode_program
from models.registry import random_params
from tests.gpu import codebook, decoding
from tests.lower.emit.models import TINY

Array = Any

# A barrier that nobody arrives at would wait for ever.
pytestmark = [pytest.mark.interpret, pytest.mark.timeout(240, method="thread")]


def interpret(program: Any, *args: Any) -> Any:
    """The outputs of a program function on one interpreted SM."""
    traced = mk.megakernel(program).trace(*args)
    plan = compile_program(traced.program, simulated(1))
    kernel = build(plan, plgpu.InterpretGPUParams())
    outs = jax.jit(lambda *leaves: kernel(*leaves))(*jax.tree.leaves(args))
    return jax.tree.unflatten(traced.out_tree, outs)


@pytest.mark.parametrize("logits", [False, True])
def test_a_llama_step_with_nan_in_unused_slots(logits: bool) -> None:
    slots, lengths = 256, [5, 100, 128]
    params = random_params(TINY, jax.random.key(0))
    cache = decoding.filled_cache(TINY, lengths, slots, jax.random.key(1))
    tokens = jnp.asarray([7, 300, 508], jnp.int32)
    program = decode_program(TINY, len(lengths), slots, logits=logits)
    out, new = interpret(program, decode_params(TINY, params), cache, tokens)
    exact, exact_cache = decoding.oracle_loop(
        TINY, params, cache, tokens[None], jnp.float32
    )
    # Errors of bf16: 3e-3 of a row, and 0.02 of logits that are about 1.
    tolerance = 0.03 * float(exact.std())
    if logits:
        np.testing.assert_allclose(out, exact[0], atol=tolerance)
    else:
        assert float(decoding.logit_gap(exact, out[None]).max()) <= 2 * tolerance
    new = decoding.advance(new)
    assert decoding.same_outside(new, cache)
    _, *rows = decoding.new_rows(new, cache.lengths)
    _, *exact_rows = decoding.new_rows(exact_cache, cache.lengths)
    assert decoding.relative_error(rows, exact_rows) < 0.01


def test_a_program_that_is_no_language_model() -> None:
    args = codebook.example()
    nearest, r, trace = interpret(codebook.recall, *args)
    codes, exact_r, exact_trace = codebook.plain_recall(*args)
    assert nearest.tolist() == codes.tolist()
    np.testing.assert_allclose(r.astype(jnp.float32), exact_r, atol=0.02)
    np.testing.assert_allclose(trace.astype(jnp.float32), exact_trace, atol=0.02)
