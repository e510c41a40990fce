"""A decode step of Gemma 3 270M's shape around its window, against float32.

Random weights: those of the real model are in tests/models/test_gemma3_270m.py, where
their package is needed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decode import decode_params
from models.registry import SHAPES, random_params
from tests.gpu.decoding import (
    advance,
    filled_cache,
    make_step,
    new_rows,
    oracle_loop,
    relative_error,
    same_outside,
)

CONFIG = SHAPES["gemma-3-270m"]
# Of the error of the plain forward pass in bfloat16, both against float32.
ALLOWED = 1.25
# The window has 512 tokens, the current one included.
LENGTHS, SLOTS = (511, 512, 513, 1023), 1024

pytestmark = pytest.mark.timeout(200, method="thread")


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
def test_a_step_is_as_exact_as_plain_jax(
    implementation: Any, record_property: Any
) -> None:
    params = random_params(CONFIG, jax.random.key(0))
    cache = filled_cache(CONFIG, LENGTHS, SLOTS, jax.random.key(1))
    tokens = jnp.array([2, 1000, 262143, 77], jnp.int32)
    step = make_step(CONFIG, len(LENGTHS), SLOTS, implementation, logits=True)
    out, new = jax.jit(step)(decode_params(CONFIG, params), cache, tokens)
    new = advance(new)
    (exact, sure), (rounded, other) = (
        oracle_loop(CONFIG, params, cache, tokens[None], dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert np.isfinite(out).all()
    ratio = relative_error(out, exact[0]) / relative_error(rounded[0], exact[0])
    record_property("error / plain JAX's", round(float(ratio), 3))
    assert ratio <= ALLOWED
    assert same_outside(new, cache)
    mine, theirs, known = (new_rows(c, cache.lengths)[1:] for c in (new, other, sure))
    assert relative_error(mine, known) <= ALLOWED * relative_error(theirs, known)
