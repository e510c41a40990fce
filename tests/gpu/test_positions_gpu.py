"""Tables of rotary embeddings at positions up to 32767, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from models import rope
from models.config import Rope
from models.programs import Step, twice
from models.registry import SHAPES

POSITIONS = (0, 1, 255, 256, 257, 4095, 4096, 8192, 32767)
# Of a cosine of an exact angle, in float32.
TOLERANCE = 2e-6

pytestmark = pytest.mark.timeout(90, method="thread")
everywhere = pytest.mark.parametrize(
    "implementation",
    ["xla", "simulate", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
each = pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama-3.2-1b", "rope"),
        ("llama-3.1-8b", "rope"),
        ("qwen3-0.6b", "rope"),
        ("gemma-3-270m", "local_rope"),
        ("gemma-3-270m", "rope"),
    ],
)


def check(cos: Any, sin: Any, kind: Rope, dim: int) -> None:
    """Both [positions, dim / 2]; angles are products of float32, as they should be."""
    inverse, at = rope.frequencies(kind, dim), np.array(POSITIONS)[:, None]
    angle = (at.astype(np.float32) * inverse).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angle), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(sin, np.sin(angle), atol=TOLERANCE, rtol=0)
    # Against exact frequencies: each of both factors is off by 2^-24 of itself, and
    # the product is rounded.
    plain = kind.theta ** -(np.arange(0, dim, 2) / dim)
    if kind.kind == "default":
        error = np.abs(cos - np.cos(at * plain))
        assert (error <= 2**-23 * at * plain + TOLERANCE).all()


@each
@everywhere
def test_tables_of_a_program(name: str, kind: str, implementation: Any) -> None:
    config = SHAPES[name]
    described, dim = getattr(config, kind), config.head_dim
    step = Step(config, len(POSITIONS), 64, jnp.bfloat16)
    run = mk.megakernel(step.tables, implementation=implementation)
    cos, sin = run(jnp.array(POSITIONS, jnp.int32), twice(described, dim))
    low, high = np.split(np.asarray(sin), 2, axis=-1)
    np.testing.assert_array_equal(low, -high)
    first, second = np.split(np.asarray(cos), 2, axis=-1)
    np.testing.assert_array_equal(first, second)
    check(first, high, described, dim)


@each
def test_tables_of_the_plain_forward_pass(name: str, kind: str) -> None:
    config = SHAPES[name]
    described, dim = getattr(config, kind), config.head_dim
    positions = jnp.array(POSITIONS)[:, None]
    inverse = rope.frequencies(described, dim)
    cos, sin = rope.tables(positions, inverse, jnp.float32)
    check(np.asarray(cos)[:, 0], np.asarray(sin)[:, 0], described, dim)


@each
def test_they_lower_for_cuda(name: str, kind: str) -> None:
    from mkdsl.lower.machine import H200
    from tests.lower.emit.lowered import kernels

    config = SHAPES[name]
    step = Step(config, len(POSITIONS), 64, jnp.bfloat16)
    run = mk.megakernel(step.tables, implementation="mosaic_gpu", machine=H200)
    args = (
        jnp.array(POSITIONS, jnp.int32),
        twice(getattr(config, kind), config.head_dim),
    )
    traced = jax.jit(run).trace(*args)
    assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1
