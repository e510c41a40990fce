"""Normalisation inside tasks."""

from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any


def rms_norm(x: Array, gain: Array, eps: float, *, unit_offset: bool = False) -> Array:
    """RMS norm over features, in float32.

    Args:
        x: [columns, features].
        gain: [features] or [1, features].
        eps: added to the mean square.
        unit_offset: Gemma's form: gain is stored as weight - 1.

    Returns:
        [columns, features] float32.
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    factor = gain.astype(jnp.float32)
    return y * (1.0 + factor if unit_offset else factor)
