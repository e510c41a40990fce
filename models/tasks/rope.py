"""Rotary position embedding: tables, and the rotation of one head."""

from typing import Any

import jax.numpy as jnp

import mkdsl as mk

Array = Any


@mk.task
def rope_table(positions: Array, frequencies: Array) -> tuple[Array, Array]:
    """cos and sin of position * frequency, in float32.

    positions: [B, 1] int32, frequencies: [1, D] float32 (each one twice, half-split)
    -> cos, sin [B, D] float32, sin negated in the first half.
    """
    angle = positions.astype(jnp.float32) * frequencies
    half = jnp.arange(frequencies.shape[-1]) < frequencies.shape[-1] // 2
    sin = jnp.sin(angle) * jnp.where(half, -1.0, 1.0)
    return jnp.cos(angle), sin


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE, half-split: x * cos + rotate_half(x) * sin.

    x: [columns, D] float32; cos, sin: [columns, D] of `rope_table`
    -> [columns, D] float32.
    """
    return x * cos + mk.roll(x, x.shape[-1] // 2) * sin
