"""A row of a batch: what the others hold changes no bit of it, nor does their number
change more than rounding does.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache
from models.config import ModelConfig, Rope
from models.decode import decode_params
from models.gemma3 import Gemma3Config
from models.llama import LlamaConfig
from models.qwen3 import Qwen3Config
from models.registry import random_params
from tests.gpu.decoding import filled_cache, make_step

Array = Any
Other = Callable[[KVCache, Array, int], tuple[KVCache, Array]]

SLOTS, LENGTHS = 192, (64, 0, 129)
SIZES = {
    "vocab_size": 509,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "norm_eps": 1e-6,
    "tied": True,
    "max_length": 512,
    "rope": Rope(1e4),
}
CONFIGS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3Config(
        **SIZES,
        window=64,
        layer_is_global=(False, True),
        query_scalar=64.0,
        local_rope=Rope(1e4),
    ),
}
# Logits are about 1. Of a row alone and among others, in the order of their sums.
TOLERANCE = {jnp.float32: 1e-4, jnp.bfloat16: 0.05}

pytestmark = pytest.mark.timeout(150, method="thread")
everywhere = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param("xla", jnp.float32, marks=pytest.mark.slow, id="xla"),
        pytest.param("simulate", jnp.float32, marks=pytest.mark.slow, id="simulate"),
        pytest.param("mosaic_gpu", jnp.bfloat16, marks=pytest.mark.gpu, id="gpu"),
    ],
)
each = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def parameters(name: str, dtype: Any) -> Any:
    params = random_params(CONFIGS[name], jax.random.key(0), dtype)
    return decode_params(CONFIGS[name], params)


@functools.cache
def step_of(name: str, batch: int, implementation: Any) -> Any:
    config = CONFIGS[name]
    step = make_step(config, batch, SLOTS, implementation, logits=True)
    # The simulator runs on the host, where it may call JAX itself.
    return step if implementation == "simulate" else jax.jit(step, donate_argnums=1)


def example(name: str, dtype: Any) -> tuple[KVCache, Array]:
    """A cache with NaN in unused slots, and tokens."""
    cache = filled_cache(CONFIGS[name], LENGTHS, SLOTS, jax.random.key(1))
    cache = replace(cache, k=cache.k.astype(dtype), v=cache.v.astype(dtype))
    return cache, jnp.array([7, 300, 508], jnp.int32)


def fill(value: float) -> Other:
    """The other rows have this value in every slot, and the length of a full cache."""

    def other(cache: KVCache, tokens: Array, row: int) -> tuple[KVCache, Array]:
        mine = jnp.arange(len(LENGTHS)) == row
        k, v = (
            jnp.where(mine[None, :, None, None, None], x, jnp.asarray(value, x.dtype))
            for x in (cache.k, cache.v)
        )
        lengths = jnp.where(mine, cache.lengths, SLOTS - 1)
        return KVCache(k, v, lengths), jnp.where(mine, tokens, 1)

    return other


def beyond(cache: KVCache, tokens: Array, row: int) -> tuple[KVCache, Array]:
    """The other rows have tokens that do not exist, and no slot left."""
    mine = jnp.arange(len(LENGTHS)) == row
    lengths = jnp.where(mine, cache.lengths, SLOTS)
    return replace(cache, lengths=lengths), jnp.where(mine, tokens, 2**30)


OTHERS: dict[str, Other] = {
    "zeros": fill(0.0),
    "huge": fill(1e30),
    "nan": fill(np.nan),
    "inf": fill(np.inf),
    "beyond": beyond,
}


@each
@pytest.mark.parametrize("other", OTHERS)
@everywhere
def test_no_bit_depends_on_other_rows(
    name: str, other: str, implementation: Any, dtype: Any
) -> None:
    step, params = step_of(name, len(LENGTHS), implementation), parameters(name, dtype)
    want, kept = step(params, *example(name, dtype))
    for row, n in enumerate(LENGTHS):
        out, new = step(params, *OTHERS[other](*example(name, dtype), row))
        assert np.isfinite(out[row]).all()
        np.testing.assert_array_equal(out[row], want[row])
        for a, b in ((new.k, kept.k), (new.v, kept.v)):
            np.testing.assert_array_equal(a[:, row, :, : n + 1], b[:, row, :, : n + 1])


@each
@everywhere
def test_rows_of_three_lengths_are_those_alone(
    name: str, implementation: Any, dtype: Any
) -> None:
    params = parameters(name, dtype)
    together, _ = step_of(name, len(LENGTHS), implementation)(
        params, *example(name, dtype)
    )
    assert np.std(together) > 0.3
    for row in range(len(LENGTHS)):
        cache, tokens = example(name, dtype)
        one = KVCache(
            cache.k[:, row : row + 1],
            cache.v[:, row : row + 1],
            cache.lengths[row : row + 1],
        )
        alone, _ = step_of(name, 1, implementation)(params, one, tokens[row : row + 1])
        np.testing.assert_allclose(
            alone[0], together[row], atol=TOLERANCE[dtype], rtol=0
        )


@each
@everywhere
def test_a_full_row_keeps_its_slots(name: str, implementation: Any, dtype: Any) -> None:
    step, params = step_of(name, len(LENGTHS), implementation), parameters(name, dtype)
    cache, tokens = example(name, dtype)
    full = replace(cache, lengths=cache.lengths.at[2].set(SLOTS))
    before = np.asarray(full.k[:, 2]), np.asarray(full.v[:, 2])
    _, new = step(params, full, tokens)
    assert before[0].tobytes() == np.asarray(new.k[:, 2]).tobytes()
    assert before[1].tobytes() == np.asarray(new.v[:, 2]).tobytes()
    assert np.isfinite(new.k[:, 0, :, LENGTHS[0]]).all()
