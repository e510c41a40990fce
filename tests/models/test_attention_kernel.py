"""Attention as a kernel on one interpreted SM, where its numbers are at their edge."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.attending import Inputs, exact, inputs, low_scores, program
from tests.lower.emit.test_interpret import interpret

BF16 = jnp.bfloat16
# Of results around 1: weights and results are rounded to bf16, 2^-9 of each.
TOLERANCE = 0.02

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(240, method="thread")]


def agrees(x: Inputs, window: int | None = None) -> None:
    out, _ = interpret(program(x.sizes, window), x.q, x.k, x.v, x.cache)
    found = np.asarray(out).astype(np.float64).reshape(x.q.shape)
    np.testing.assert_allclose(found, exact(x, window=window), atol=TOLERANCE)


@pytest.mark.parametrize("far", [1.0, 2.0], ids=["equal", "apart"])
@pytest.mark.parametrize("size", [1e3, 1e9, 1e31])
def test_a_fused_multiply_subtract_does_not_show(size: float, far: float) -> None:
    """A score that is scaled first and then subtracted may be 2^500 too large."""
    agrees(low_scores(size, far, BF16))


@pytest.mark.parametrize("window", [None, 1, 64, 65])
def test_lengths_around_every_block(window: int | None) -> None:
    agrees(inputs(3, 1, 64, (0, 1, 63, 64, 65, 128, 129), 192, BF16), window)
