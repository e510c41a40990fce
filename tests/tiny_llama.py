"""A Llama small enough for every test, and arguments of its decode step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import KVCache
from models.config import Rope
from models.llama import LlamaConfig, decode_params, leaves
from models.params import Params, random_tree

Array = Any

TINY = LlamaConfig(
    vocab_size=509,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    tied=True,
    max_length=256,
    rope=Rope(theta=10_000.0),
)


def example(
    config: LlamaConfig,
    lengths: list[int],
    slots: int,
    *,
    dtype: Any = jnp.bfloat16,
    unused: float = np.nan,
    seed: int = 0,
) -> tuple[Params, KVCache, Array]:
    """Arguments of a decode step: parameters, a cache filled up to `lengths`, tokens.

    Args:
        unused: what the slots beyond `lengths` hold.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    params = random_tree(leaves(config), keys[0], dtype)
    batch, used = len(lengths), np.asarray(lengths)
    size = (config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
    exists = (np.arange(slots) < used[:, None])[None, :, None, :, None]
    k, v = jnp.where(exists, jax.random.normal(keys[1], (2, *size)), unused)
    cache = KVCache(k.astype(dtype), v.astype(dtype), jnp.asarray(used, jnp.int32))
    tokens = jax.random.randint(keys[2], (batch,), 0, config.vocab_size)
    return decode_params(config, params), cache, tokens
