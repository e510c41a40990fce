"""Sizes that no tile divides, odd numbers of heads, lengths around every block.

One decode step behind a cache with NaN in its unused slots, against the plain forward
pass: on the host, lowered for CUDA, and as a kernel on one interpreted SM.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mkdsl.lower.machine import H200
from models.cache import KVCache
from models.decode import DecodeStep, argument_shapes, decode_params
from models.registry import family_of
from tests.gpu.awkward import ALLOWED, CASES, SLOTS, Case
from tests.gpu.decoding import new_rows, oracle_loop, relative_error, same_outside
from tests.lower.emit.lowered import kernels
from tests.lower.emit.test_interpret import interpret

TOLERANCE = 1e-3
each = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.slow
@each
@pytest.mark.parametrize("implementation", ["xla", "simulate"])
def test_a_step_in_float32(case: Case, implementation: str) -> None:
    config = case.config
    params, cache, tokens = case.arguments(jnp.float32)
    exact, longer = oracle_loop(config, params, cache, tokens[None], jnp.float32)
    for logits in (True, False):
        step = DecodeStep(
            config,
            len(case.lengths),
            SLOTS,
            logits=logits,
            implementation=implementation,
        )
        # The cache is donated.
        _, cache, _ = case.arguments(jnp.float32)
        out, new = step(decode_params(config, params), cache, tokens)
        if logits:
            np.testing.assert_allclose(out, exact[0], atol=TOLERANCE, rtol=0)
        else:
            assert out.tolist() == jnp.argmax(exact[0], -1).tolist()
        np.testing.assert_allclose(new.k, longer.k, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(new.v, longer.v, atol=TOLERANCE, rtol=0)
        assert new.lengths.tolist() == [n + 1 for n in case.lengths]


@pytest.mark.slow
@each
def test_a_step_lowers_to_one_kernel(case: Case) -> None:
    batch = len(case.lengths)
    step = DecodeStep(case.config, batch, SLOTS, machine=H200)
    args = argument_shapes(case.config, batch, SLOTS)
    traced = jax.jit(step, donate_argnums=1).trace(*args)
    assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1


@pytest.mark.interpret
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("case", [CASES[i] for i in (1, 2, 4, 6)], ids=str)
def test_a_layer_as_a_kernel(case: Case) -> None:
    case = replace(case, layers=1)
    config = case.config
    params, cache, tokens = case.arguments(jnp.bfloat16)
    exact, plain = (
        oracle_loop(config, params, cache, tokens[None], dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    program = family_of(config).decode_program(
        config, len(case.lengths), SLOTS, logits=True
    )
    out, new = interpret(program, decode_params(config, params), cache, tokens)
    new = KVCache(new.k, new.v, cache.lengths + 1)
    assert same_outside(new, cache)
    error = relative_error(out, exact[0][0])
    assert error <= ALLOWED * relative_error(plain[0][0], exact[0][0])
    found, rounded, sure = (
        new_rows(c, cache.lengths)[1:] for c in (new, plain[1], exact[1])
    )
    assert relative_error(found, sure) <= ALLOWED * relative_error(rounded, sure)
