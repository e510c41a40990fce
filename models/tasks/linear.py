"""Projections: mk.dot with a prologue and an epilogue."""

from typing import Any

import jax
import jax.numpy as jnp

import mkdsl as mk
from models.tasks.norm import rms_norm
from models.tasks.rope import rotate

Array = Any


@mk.task
def project(x: Array, gain: Array, w: Array, *, eps: float) -> Array:
    """rms_norm(x) @ w.T.

    x: [B, h], gain: [h], w: [R, h] -> [B, R] in x.dtype.
    """
    return mk.dot(rms_norm(x, gain, eps).astype(w.dtype), w).astype(x.dtype)


@mk.task
def project_rope(
    x: Array, gain: Array, w: Array, cos: Array, sin: Array, *, eps: float
) -> Array:
    """rope(rms_norm(x) @ w.T) for one head.

    x: [B, h], gain: [h], w: [D, h], cos, sin: [B, D] float32 -> [B, D] in x.dtype.
    """
    y = mk.dot(rms_norm(x, gain, eps).astype(w.dtype), w)
    return rotate(y, cos, sin).astype(x.dtype)


@mk.task
def project_norm_rope(
    x: Array,
    gain: Array,
    w: Array,
    head_gain: Array,
    cos: Array,
    sin: Array,
    *,
    eps: float,
) -> Array:
    """rope(rms_norm(rms_norm(x) @ w.T)) for one head.

    x: [B, h], gain: [h], w: [D, h], head_gain: [D], cos, sin: [B, D] float32
    -> [B, D] in x.dtype.
    """
    y = mk.dot(rms_norm(x, gain, eps).astype(w.dtype), w)
    return rotate(rms_norm(y, head_gain, eps), cos, sin).astype(x.dtype)


@mk.task
def product(h: Array, w: Array) -> Array:
    """h @ w.T.

    h: [B, K], w: [R, K] -> [B, R] in h.dtype.
    """
    return mk.dot(h, w).astype(h.dtype)


@mk.task
def residual(x: Array, h: Array, w: Array) -> Array:
    """x + h @ w.T.

    x: [B, R], h: [B, K], w: [R, K] -> [B, R] in x.dtype.
    """
    return (x.astype(jnp.float32) + mk.dot(h, w)).astype(x.dtype)


@mk.task
def gate_up(x: Array, gain: Array, gate: Array, up: Array, *, eps: float) -> Array:
    """silu(n @ gate.T) * (n @ up.T), n = rms_norm(x).

    x: [B, h], gain: [h], gate, up: [R, h] -> [B, R] in x.dtype.
    """
    n = rms_norm(x, gain, eps).astype(gate.dtype)
    return (jax.nn.silu(mk.dot(n, gate)) * mk.dot(n, up)).astype(x.dtype)
