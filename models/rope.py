"""Rotary position embeddings, half-split as in Hugging Face's `rotate_half`.

Feature `i` of a head is paired with feature `i + D / 2`; both turn by the angle
`position * frequency[i]`. Angles are float32: a position in bfloat16 is wrong from 257
on.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.config import Rope

type Frequencies = np.ndarray[tuple[int], np.dtype[np.float32]]


def frequencies(rope: Rope, head_dim: int) -> Frequencies:
    """Compute the inverse frequencies of a head, in radians per token.

    Computed in float64 and rounded once, so that every machine gets the same bits.

    Returns:
        float32 [head_dim / 2]. A program that wants one number per feature repeats it:
        `np.tile(frequencies(...), 2)`.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-exponent
    if rope.kind == "default":
        return plain.astype(np.float32)
    if rope.kind == "linear":
        return (plain / rope.factor).astype(np.float32)
    # llama3 (transformers modeling_rope_utils.py, _compute_llama3_parameters): long
    # waves are divided by the factor, short ones kept, in between a linear mix.
    waves = rope.original_max_length * plain / (2 * math.pi)  # waves per old context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return (keep * plain + (1 - keep) * plain / rope.factor).astype(np.float32)


def tables(
    positions: jax.Array, inverse: Frequencies | jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Compute cosines and sines.

    Args:
        positions: int32 [B, T], tokens before this one in its row.
        inverse: float32 [D / 2], see `frequencies`.
        dtype: Activation dtype, to which Hugging Face rounds both tables.

    Returns:
        Two arrays [B, T, D / 2] of `dtype`.
    """
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs of features of every head: [B, T, heads, D] -> the same."""
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
