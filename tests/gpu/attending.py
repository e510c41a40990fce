"""One step of attention over a cache: the program of models/, and float64 by loops."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.pipeline import Options
from models.cache import KVCache
from models.config import Rope
from models.llama import LlamaConfig
from models.programs import Step

Array = Any


class Sizes(NamedTuple):
    """Of `Inputs`: what a program depends on."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    slots: int
    dtype: Any


@dataclass(frozen=True)
class Inputs:
    """q [B, H, D]; k, v [B, KV, D] of the new token; k_old, v_old [B, KV, S, D]."""

    q: Array
    k: Array
    v: Array
    k_old: Array
    v_old: Array
    lengths: tuple[int, ...]

    @property
    def sizes(self) -> Sizes:
        batch, heads, dim = self.q.shape
        _, kv_heads, slots, _ = self.k_old.shape
        return Sizes(batch, heads, kv_heads, dim, slots, self.q.dtype)

    @property
    def cache(self) -> KVCache:
        """With one layer."""
        lengths = jnp.array(self.lengths, jnp.int32)
        return KVCache(self.k_old[None], self.v_old[None], lengths)


def inputs(
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: tuple[int, ...],
    slots: int,
    dtype: Any,
    seed: int = 0,
) -> Inputs:
    """Standard normal, and NaN in the slots behind the lengths."""
    batch, keys = len(lengths), jax.random.split(jax.random.key(seed), 4)
    new = jax.random.normal(keys[0], (2, batch, kv_heads, dim))
    old = jax.random.normal(keys[1], (2, batch, kv_heads, slots, dim))
    q = jax.random.normal(keys[2], (batch, heads, dim))
    used = (np.arange(slots) < np.array(lengths)[:, None])[:, None, :, None]
    old = jnp.where(used, old, jnp.nan)
    arrays = (x.astype(dtype) for x in (q, *new, *old))
    return Inputs(*arrays, lengths)


def low_scores(size: float, far: float, dtype: Any) -> Inputs:
    """Every score is lower than what others write for "masked".

    Args:
        size: One score of a row is about -size times the root of the features.
        far: How many times lower all others are; 1 for the same.
    """
    lengths = (0, 5, 64, 191)
    x = inputs(2, 1, 64, lengths, 192, dtype)
    top = jnp.array(lengths) // 2
    slot = jnp.arange(192) == top[:, None]
    old = jnp.where(slot[:, None, :, None], -size, -far * size)
    new = jnp.where(top == 0, -size, -far * size)[:, None, None]
    return replace(
        x,
        q=x.q * 0 + 1,
        k=(x.k * 0 + new).astype(dtype),
        k_old=jnp.where(jnp.isnan(x.k_old), jnp.nan, old).astype(dtype),
    )


def attend(
    x: Inputs, implementation: Any, *, window: int | None = None, parts: int = 1
) -> tuple[np.ndarray, KVCache]:
    """Run `Step.attend`; returns float64 [B, H, D] and the cache.

    Args:
        parts: into which the fold over the cache is split; 1 keeps it whole.
    """
    step = megakernel(x.sizes, implementation, window, parts)
    out, cache = step(x.q, x.k, x.v, x.cache)
    return np.asarray(out).astype(np.float64).reshape(x.q.shape), cache


@functools.cache
def megakernel(
    sizes: Sizes,
    implementation: Any,
    window: int | None = None,
    parts: int = 1,
    machine: Any = None,
) -> Any:
    """`program` as a function of (q, k, v, cache); compiled once."""
    splits = (("attend", parts),) if parts > 1 else ()
    return mk.megakernel(
        program(sizes, window),
        implementation=implementation,
        machine=machine,
        options=Options(decompose=DecomposeOptions(split=False, splits=splits)),
    )


def program(sizes: Sizes, window: int | None = None) -> Any:
    """(q, k, v, cache) -> (`Step.attend` of them, the longer cache), to be traced."""
    s = sizes
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=s.heads * s.dim,
        intermediate_size=64,
        num_layers=1,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.dim,
        norm_eps=1e-6,
        tied=True,
        max_length=s.slots,
        rope=Rope(1e4),
    )
    step, scale = Step(config, s.batch, s.slots, s.dtype), s.dim**-0.5

    def attention(q: Array, k: Array, v: Array, cache: KVCache) -> Any:
        return step.attend(q, k, v, cache, 0, scale=scale, window=window)

    return attention


def exact(x: Inputs, *, window: int | None = None) -> np.ndarray:
    """The same in float64, one head of one row after the other: [B, H, D]."""
    q, k, v, k_old, v_old = (
        np.asarray(a).astype(np.float64) for a in (x.q, x.k, x.v, x.k_old, x.v_old)
    )
    batch, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = dim**-0.5
    out = np.zeros(q.shape)
    for b in range(batch):
        n = x.lengths[b]
        first = 0 if window is None else max(0, n + 1 - window)
        for h in range(heads):
            g = h // group
            keys = np.concatenate([k_old[b, g, first:n], k[b, g][None]])
            values = np.concatenate([v_old[b, g, first:n], v[b, g][None]])
            scores = keys @ q[b, h] * scale
            weights = np.exp(scores - scores.max())
            out[b, h] = weights @ values / weights.sum()
    return out
