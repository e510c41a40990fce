"""Tasks of models that norm the output of each branch before they add it (Gemma 3).

That norm needs a whole row, which no task of the branch's last projection has. So the
sum x + norm(y) is the prologue of every task that reads it: each computes it again,
which is cheap at decode and saves a dependent stage of the schedule per branch. One
task, `add_branch`, keeps it for the next sum, beside the others.

All norms here have Gemma's unit offset.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mkdsl as mk
from models.tasks.norm import rms_norm
from models.tasks.rope import rotate

Array = Any


def _norm(x: Array, gain: Array, eps: float) -> Array:
    return rms_norm(x, gain, eps, unit_offset=True)


def _sum(x: Array, y: Array, y_gain: Array, eps: float) -> Array:
    """x + norm(y), float32."""
    return x.astype(jnp.float32) + _norm(y, y_gain, eps)


@mk.task
def add_branch(x: Array, part: Array, y: Array, y_gain: Array, *, eps: float) -> Array:
    """x + norm(y), R features of it.

    x, part: [B, R] of the stream and of y, y: [B, h], y_gain: [R] -> [B, R].
    """
    whole, part = y.astype(jnp.float32), part.astype(jnp.float32)
    square = jnp.mean(whole * whole, axis=-1, keepdims=True)
    normed = part * lax.rsqrt(square + eps) * (1.0 + y_gain.astype(jnp.float32))
    return (x.astype(jnp.float32) + normed).astype(x.dtype)


@mk.task
def project(
    x: Array, y: Array, y_gain: Array, gain: Array, w: Array, *, eps: float
) -> Array:
    """norm(x + norm(y)) @ w.T.

    x, y: [B, h], y_gain, gain: [h], w: [R, h] -> [B, R] in x.dtype.
    """
    n = _norm(_sum(x, y, y_gain, eps), gain, eps).astype(w.dtype)
    return mk.dot(n, w).astype(x.dtype)


@mk.task
def project_norm_rope(
    x: Array,
    y: Array,
    y_gain: Array,
    gain: Array,
    w: Array,
    head_gain: Array,
    cos: Array,
    sin: Array,
    *,
    eps: float,
) -> Array:
    """rope(norm(norm(x + norm(y)) @ w.T)) for one head.

    x, y: [B, h], y_gain, gain: [h], w: [D, h], head_gain: [D], cos, sin: [B, D]
    -> [B, D] in x.dtype.
    """
    n = _norm(_sum(x, y, y_gain, eps), gain, eps).astype(w.dtype)
    head = _norm(mk.dot(n, w), head_gain, eps)
    return rotate(head, cos, sin).astype(x.dtype)


@mk.task
def gate_up(
    x: Array,
    y: Array,
    y_gain: Array,
    gain: Array,
    gate: Array,
    up: Array,
    *,
    eps: float,
) -> Array:
    """gelu(n @ gate.T) * (n @ up.T), n = norm(x + norm(y)), with gelu's tanh form.

    x, y: [B, h], y_gain, gain: [h], gate, up: [R, h] -> [B, R] in x.dtype.
    """
    n = _norm(_sum(x, y, y_gain, eps), gain, eps).astype(gate.dtype)
    gated = jax.nn.gelu(mk.dot(n, gate), approximate=True)
    return (gated * mk.dot(n, up)).astype(x.dtype)
