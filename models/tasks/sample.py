"""From token to activation and from activation to token."""

from typing import Any

import jax.numpy as jnp

import mkdsl as mk
from models.tasks.norm import rms_norm

Array = Any
NO_INDEX = 2**31 - 1


@mk.task
def embed(row: Array, *, scale: float) -> Array:
    """row * scale, the scale rounded to the dtype of the row.

    row: [1, F] -> [1, F].
    """
    return row if scale == 1.0 else row * jnp.asarray(scale, row.dtype)


@mk.task
def embed_branch(row: Array, *, scale: float) -> tuple[Array, Array]:
    """row * scale, and zeros: the stream and a branch that adds nothing to it.

    row: [1, F] -> [1, F] twice.
    """
    x = row * jnp.asarray(scale, row.dtype)
    return x, jnp.zeros_like(x)


@mk.task
def logits(x: Array, gain: Array, w: Array, *, eps: float, unit_offset: bool) -> Array:
    """rms_norm(x) @ w.T in float32.

    x: [B, h], gain: [h], w: [R, h] -> [B, R] float32.
    """
    n = rms_norm(x, gain, eps, unit_offset=unit_offset).astype(w.dtype)
    return mk.dot(n, w)


@mk.task
def best(
    x: Array, gain: Array, w: Array, *, eps: float, unit_offset: bool
) -> tuple[Array, Array]:
    """Largest logit of a block of the vocabulary and its token, lowest on ties.

    x: [B, h], gain: [h], w: [R, h] -> value [B, 1] float32, token [B, 1] int32.
    """
    n = rms_norm(x, gain, eps, unit_offset=unit_offset).astype(w.dtype)
    y = mk.dot(n, w)
    y = jnp.where(mk.valid(w, 0), y, -jnp.inf)
    token = jnp.argmax(y, axis=-1) + mk.program_id(0) * w.shape[0]
    return jnp.max(y, axis=-1)[:, None], token[:, None].astype(jnp.int32)


@mk.task
def better(values: Array, tokens: Array) -> tuple[Array, Array]:
    """Largest value of a block and its token, lowest token on ties.

    values: [B, T] float32, tokens: [B, T] int32
    -> value [B, 1] float32, token [B, 1] int32.
    """
    values = jnp.where(mk.valid(values), values, -jnp.inf)
    top = jnp.max(values, axis=-1, keepdims=True)
    # A block of -inf alone has to name a token that exists.
    tokens = jnp.where(mk.valid(tokens), tokens, NO_INDEX)
    at_top = jnp.where(values == top, tokens, NO_INDEX)
    return top, jnp.min(at_top, axis=-1)[:, None]


@mk.task
def pick(values: Array, tokens: Array) -> tuple[Array, Array]:
    """Largest value and its token, lowest token on ties.

    values: [B, T] float32, tokens: [B, T] int32
    -> token [B, 1] int32, value [B, 1] float32.
    """
    top = jnp.max(values, axis=-1, keepdims=True)
    at_top = jnp.where(values == top, tokens, NO_INDEX)
    return jnp.min(at_top, axis=-1)[:, None], top
