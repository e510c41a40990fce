"""Awkward sizes through the kernel, against XLA on the same card and float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decode import decode_params
from tests.gpu.awkward import ALLOWED, GPU_CASES, SLOTS, Case
from tests.gpu.decoding import (
    advance,
    logit_gap,
    make_step,
    new_rows,
    oracle_loop,
    relative_error,
    same_outside,
)

Array = Any

pytestmark = pytest.mark.timeout(150, method="thread")
everywhere = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
each = pytest.mark.parametrize("case", GPU_CASES, ids=str)
BF16 = jnp.bfloat16


def run(case: Case, implementation: Any, **options: Any) -> tuple[Any, Any]:
    """One step in bfloat16: the result and the cache."""
    params, cache, tokens = case.arguments(BF16)
    step = make_step(case.config, len(case.lengths), SLOTS, implementation, **options)
    out, new = jax.jit(step)(decode_params(case.config, params), cache, tokens)
    return out, advance(new)


@functools.cache
def plain(case: Case, dtype: Any) -> tuple[Any, Any]:
    """The plain forward pass: logits [B, V] and the cache."""
    params, cache, tokens = case.arguments(BF16)
    logits, new = oracle_loop(case.config, params, cache, tokens[None], dtype)
    return logits[0], new


@each
@everywhere
def test_a_step_is_as_exact_as_plain_jax(
    case: Case, implementation: Any, record_property: Any
) -> None:
    out, new = run(case, implementation, logits=True)
    (exact, sure), (rounded, other) = plain(case, jnp.float32), plain(case, BF16)
    assert np.isfinite(out).all()
    ratio = relative_error(out, exact) / relative_error(rounded, exact)
    record_property("error / plain JAX's", round(float(ratio), 3))
    assert ratio <= ALLOWED
    _, cache, _ = case.arguments(BF16)
    assert same_outside(new, cache)
    mine, theirs, known = (new_rows(c, cache.lengths)[1:] for c in (new, other, sure))
    assert relative_error(mine, known) <= ALLOWED * relative_error(theirs, known)


@each
@pytest.mark.gpu
def test_a_step_is_near_that_of_xla(case: Case) -> None:
    out, _ = run(case, "mosaic_gpu", logits=True)
    other, _ = run(case, "xla", logits=True)
    exact, _ = plain(case, jnp.float32)
    # Each is off by about as much as plain JAX, in ways of its own.
    limit = 2 * ALLOWED * relative_error(plain(case, BF16)[0], exact)
    assert relative_error(out, other) <= limit


@each
@everywhere
def test_the_token_is_that_of_the_largest_logit(
    case: Case, implementation: Any
) -> None:
    logits, _ = run(case, implementation, logits=True)
    (token, score), _ = run(case, implementation, scores=True)
    # In float32, of the same products, summed in any order.
    np.testing.assert_allclose(score, logits.max(-1), atol=1e-4, rtol=0)
    assert float(logit_gap(logits, token).max()) <= 1e-4


@pytest.mark.slow
@each
def test_they_lower_for_cuda(case: Case) -> None:
    from mkdsl.lower.machine import H200
    from tests.lower.emit.lowered import kernels

    params, cache, tokens = jax.eval_shape(lambda: case.arguments(BF16))
    params = jax.eval_shape(lambda p: decode_params(case.config, p), params)
    batch = len(case.lengths)
    for options in ({"logits": True}, {"scores": True}):
        step = make_step(case.config, batch, SLOTS, "mosaic_gpu", H200, **options)
        traced = jax.jit(step, donate_argnums=1).trace(params, cache, tokens)
        assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1
