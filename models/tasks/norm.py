"""Normalisation inside tasks."""

from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any


def rms_norm(x: Array, gain: Array, eps: float, *, unit_offset: bool = False) -> Array:
    """RMS norm over features, in float32, rounded as Hugging Face rounds.

    Args:
        x: [columns, features].
        gain: [features] or [1, features].
        eps: added to the mean square.
        unit_offset: Gemma's form: gain is stored as weight - 1 and the product is
            taken in float32; otherwise the norm is rounded before the gain (Llama).

    Returns:
        [columns, features] in the dtype of x.
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if unit_offset:
        return (y * (1.0 + gain.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * gain


def head_norm(y: Array, gain: Array, eps: float) -> Array:
    """Gemma's norm of one head's float32 accumulator: y [columns, head_dim]."""
    return rms_norm(y, gain, eps, unit_offset=True)
