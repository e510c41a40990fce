"""Named shapes and random parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.registry import SHAPES, family_of, random_params, read_config
from models.weights import load


def weight_bytes(name: str) -> int:
    """Bytes of bf16 weights that one decode step reads."""
    config = SHAPES[name]
    leaves = family_of(config).leaves(config)
    # Of an untied embedding a step reads a row, not the table.
    read = [leaf for leaf in leaves if config.tied or leaf.path != ("embed",)]
    return sum(2 * int(np.prod(leaf.shape)) for leaf in read)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("llama-3.2-1b", 2.47),
        ("llama-3.1-8b", 15.0),
        ("gemma-3-270m", 0.54),
        ("qwen3-0.6b", 1.19),
        ("qwen3-8b", 15.1),
    ],
)
def test_published_sizes(name: str, gigabytes: float) -> None:
    assert weight_bytes(name) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize("name", SHAPES)
def test_kv_bytes_per_token(name: str) -> None:
    config = SHAPES[name]
    size = 4 * config.num_layers * config.num_kv_heads * config.head_dim
    known = {
        "llama-3.2-1b": 32768,
        "llama-3.1-8b": 131072,
        "gemma-3-270m": 18432,
        "llama-3.2-3b": 114688,
        "gemma-3-1b": 26624,
        "qwen3-0.6b": 114688,
        "qwen3-1.7b": 114688,
        "qwen3-4b": 147456,
        "qwen3-8b": 147456,
        "qwen3-14b": 163840,
        "qwen3-32b": 262144,
    }
    assert size == known[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama_untied_nohd", jnp.float32),
        ("gemma3_window16", jnp.bfloat16),
        ("qwen3_untied", jnp.bfloat16),
    ],
)
def test_random_parameters(fixtures, name: str, dtype) -> None:
    config = read_config(fixtures / name)
    params = random_params(config, jax.random.key(0), dtype)
    loaded = jax.eval_shape(lambda: load(fixtures / name, "float32")[1])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, loaded)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(params))
    q = np.asarray(params["layers"]["q"], np.float32)
    assert q.std() == pytest.approx(config.hidden_size**-0.5, rel=0.1)
    assert not np.array_equal(q[0], q[1])
    ids, lengths = np.array([[3, 4, 5]]), np.array([3])
    logits = family_of(config).forward(config, params, ids, lengths)
    assert 0.1 < float(jnp.std(logits)) < 10
