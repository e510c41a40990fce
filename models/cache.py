"""The key-value cache that prefill fills and decoding extends.

Layout, fixed: `k` and `v` are [L, B, KV, S, D] (layer, row, key-value head, slot,
feature), row-major; slot `n` of a row holds its token number `n`, keys after RoPE (and
after the key norm where the model has one). `lengths` [B] counts the tokens that a row
has cached: slots from there on are unused, may hold anything, NaN included, and no
result depends on them. Sliding-window layers keep every token too; the window is a
mask.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens so far; a pytree of three arrays.

    Attributes:
        k: [L, B, KV, S, D] in the activation dtype.
        v: [L, B, KV, S, D] in the activation dtype.
        lengths: int32 [B], tokens cached per row. More than S means that tokens were
            dropped: the row's results are void from there on.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array

    @property
    def batch(self) -> int:
        """Rows (B)."""
        return self.k.shape[1]

    @property
    def max_length(self) -> int:
        """Slots per row (S)."""
        return self.k.shape[3]


def init_cache(
    config: ModelConfig,
    batch: int,
    max_length: int,
    dtype: DTypeLike = jnp.bfloat16,
) -> KVCache:
    """Make an empty cache of `batch` rows with `max_length` slots each."""
    shape = (config.num_layers, batch, config.num_kv_heads, max_length, config.head_dim)
    # Two arrays, not one twice: a donated cache may not hold the same buffer twice.
    return KVCache(
        jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32)
    )


def append(
    cache: KVCache, k: jax.Array, v: jax.Array, new_lengths: jax.Array
) -> KVCache:
    """Write new tokens behind those that are cached.

    Args:
        cache: The cache to extend.
        k: [L, B, T, KV, D], keys of the new tokens, padded on the right.
        v: [L, B, T, KV, D], values of the new tokens.
        new_lengths: int32 [B], how many of the T tokens are real. The others are not
            written, nor is a token for which no slot is left.
    """
    batch, count = k.shape[1:3]
    step = jnp.arange(count)
    real = step < new_lengths[:, None]
    slots = jnp.where(real, cache.lengths[:, None] + step, cache.max_length)
    at = (slice(None), jnp.arange(batch)[:, None], slice(None), slots)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        # Index arrays around a slice: their axes [B, T] come first.
        new = new.transpose(1, 2, 0, 3, 4).astype(old.dtype)
        return old.at[at].set(new, mode="drop")

    lengths = cache.lengths + new_lengths.astype(jnp.int32)
    return replace(cache, k=write(cache.k, k), v=write(cache.v, v), lengths=lengths)


def check_room(cache: KVCache, new_lengths: jax.Array) -> None:
    """Raise if rows would overflow. Traced lengths cannot be checked and pass.

    A row without new tokens always passes.

    Raises:
        ValueError: Some row has fewer free slots than new tokens.
    """
    if isinstance(cache.lengths, Tracer):
        return
    if isinstance(new_lengths, Tracer):
        return
    new = np.asarray(new_lengths)
    need = np.asarray(cache.lengths) + new
    rows = np.flatnonzero((need > cache.max_length) & (new > 0)).tolist()
    if rows:
        raise ValueError(
            f"cache is full: rows {rows} would hold {need[rows].tolist()} tokens, but "
            f"max_length is {cache.max_length}; make the cache longer (init_cache) or "
            "stop these rows"
        )


def export_cache(
    cache: KVCache, rows: int | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Copy a cache to the host as `{"k", "v", "lengths"}`, in the layout above.

    Args:
        cache: To copy.
        rows: How many rows, the first ones; all where None. A batch may hold rows that
            only fill it.
    """
    if rows is not None and not 0 < rows <= cache.batch:
        raise ValueError(f"{rows=} is not in 1..{cache.batch}, the rows of the cache")
    k, v, lengths = cache.k[:, :rows], cache.v[:, :rows], cache.lengths[:rows]
    return {"k": np.asarray(k), "v": np.asarray(v), "lengths": np.asarray(lengths)}


def import_cache(
    arrays: Mapping[str, Any],
    max_length: int | None = None,
    dtype: DTypeLike | None = None,
    batch: int | None = None,
) -> KVCache:
    """Make a cache from arrays that another engine filled.

    Args:
        arrays: `k` and `v` [L, B', KV, S', D], `lengths` [B'], as `export_cache` gives.
        max_length: Slots per row of the new cache (S >= S'); S' where None.
        dtype: Dtype of the new cache; that of `k` where None.
        batch: Rows of the new cache (B >= B'), the others empty; B' where None.

    Raises:
        ValueError: An array is missing or shapes disagree.
    """
    missing = [name for name in ("k", "v", "lengths") if name not in arrays]
    if missing:
        raise ValueError(f"cache arrays {missing} are missing; have {sorted(arrays)}")
    k, v = jnp.asarray(arrays["k"], dtype), jnp.asarray(arrays["v"], dtype)
    host_lengths = np.asarray(arrays["lengths"], np.int32)
    if k.ndim != 5 or v.shape != k.shape or host_lengths.shape != k.shape[1:2]:
        raise ValueError(
            f"cache arrays must be k and v [L, B, KV, S, D] and lengths [B], not "
            f"{k.shape=}, {v.shape=}, {host_lengths.shape=}"
        )
    if host_lengths.min(initial=0) < 0 or host_lengths.max(initial=0) > k.shape[3]:
        raise ValueError(f"lengths {host_lengths.tolist()} are not in 0..{k.shape[3]}")
    room = (k.shape[3] if max_length is None else max_length) - k.shape[3]
    if room < 0:
        raise ValueError(f"{max_length=} is less than the {k.shape[3]} slots given")
    more = (k.shape[1] if batch is None else batch) - k.shape[1]
    if more < 0:
        raise ValueError(f"{batch=} is less than the {k.shape[1]} rows given")
    pad = ((0, 0), (0, more), (0, 0), (0, room), (0, 0))
    lengths = jnp.asarray(np.pad(host_lengths, (0, more)))
    return KVCache(jnp.pad(k, pad), jnp.pad(v, pad), lengths)
