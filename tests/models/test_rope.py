"""RoPE frequencies of published models, and the rotation."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import gemma3, llama, rope
from models.config import Rope
from models.gemma3 import Gemma3Config
from models.llama import LlamaConfig
from models.registry import SHAPES


def published(name: str) -> np.ndarray:
    config = SHAPES[name]
    assert isinstance(config, LlamaConfig)
    return llama.rope_frequencies(config)


def test_llama_3_2_1b() -> None:
    scaled = published("llama-3.2-1b")
    plain = rope.frequencies(Rope(500_000.0), 64)
    assert scaled.shape == (32,)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled[:15], plain[:15])
    np.testing.assert_allclose(
        scaled[[15, 16, 17, 31]],
        [1.2905479e-3, 4.2955680e-4, 9.7082878e-5, 9.4183067e-8],
        rtol=1e-6,
    )
    np.testing.assert_allclose(scaled[18:], plain[18:] / 32, rtol=1e-6)


def test_llama_3_1_8b() -> None:
    np.testing.assert_allclose(
        published("llama-3.1-8b")[[29, 34, 63]],
        [2.1665708e-3, 1.7850781e-4, 3.0689260e-7],
        rtol=1e-6,
    )


def test_linear_scaling_divides() -> None:
    plain = rope.frequencies(Rope(10_000.0), 8)
    scaled = rope.frequencies(Rope(10_000.0, "linear", 8.0), 8)
    np.testing.assert_allclose(plain, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    np.testing.assert_allclose(scaled, plain / 8, rtol=1e-6)


def test_gemma_layers_have_two() -> None:
    config = SHAPES["gemma-3-270m"]
    assert isinstance(config, Gemma3Config)
    for is_global, theta in ((True, 1e6), (False, 1e4)):
        last = gemma3.rope_frequencies(config, is_global)[-1]
        assert last == pytest.approx(theta ** -(254 / 256), rel=1e-6)


def test_rotation_pairs_the_halves() -> None:
    x = jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    inverse = np.array([0.5, 0.25], np.float32)
    cos, sin = rope.tables(jnp.array([[2]]), inverse, jnp.float32)
    turned = rope.rotate(x, cos, sin)[0, 0, 0]
    np.testing.assert_allclose(turned, [np.cos(1), 0, np.sin(1), 0], atol=1e-6)


def test_positions_are_not_rounded_to_the_activation_dtype() -> None:
    one = np.ones(1, np.float32)
    cos, _ = rope.tables(jnp.array([[256, 257]]), one, jnp.bfloat16)
    expected = np.cos(np.array([256.0, 257.0]))
    np.testing.assert_allclose(cos[0, :, 0].astype(np.float32), expected, atol=4e-3)
