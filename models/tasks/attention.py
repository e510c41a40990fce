"""Decode attention over a cache at run-time lengths, as a fold of online softmax."""

from typing import Any

import jax.numpy as jnp

import mkdsl as mk

Array = Any
Carry = tuple[Array, Array, Array]
LOG2_E = 1.4426950408889634


def _weight(m: Array, new: Array) -> Array:
    """exp2(m - new), 0 where nothing was seen (m = -inf), never NaN."""
    return jnp.where(m == -jnp.inf, 0.0, jnp.exp2(m - new))


def merge(a: Carry, b: Carry) -> Carry:
    """Join the softmax states (max, sum, weighted values) of two ranges of keys."""
    new = jnp.maximum(a[0], b[0])
    x, y = _weight(a[0], new), _weight(b[0], new)
    return new, a[1] * x + b[1] * y, a[2] * x + b[2] * y


def softmax_state(
    q: Array,
    k: Array,
    v: Array,
    k_new: Array,
    v_new: Array,
    *,
    scale: float,
    block: int,
) -> Carry:
    """Softmax state of queries over the new token and the cached ones.

    q: [G, D], k, v: [S, D] streamed, k_new, v_new: [1, D]
    -> max [G, 1], sum [G, 1], values [G, D], float32, in base 2.
    """
    f32, factor = jnp.float32, scale * LOG2_E

    def step(carry: Carry, kv: tuple[Array, ...], valid: Array) -> Carry:
        m, total, acc = carry
        scores = jnp.where(valid, mk.dot(q, kv[0]) * factor, -jnp.inf)
        new = jnp.maximum(m, jnp.max(scores, axis=-1, keepdims=True))
        p = jnp.exp2(scores - new)
        old = _weight(m, new)
        total = total * old + jnp.sum(p, axis=-1, keepdims=True)
        return new, total, acc * old + mk.dot(p.astype(q.dtype), kv[1].T)

    zero = jnp.zeros((q.shape[0], 1), f32)
    score = jnp.sum(q.astype(f32) * k_new.astype(f32), axis=-1, keepdims=True) * factor
    init = score, zero + 1.0, jnp.broadcast_to(v_new.astype(f32), q.shape)
    nothing = zero - jnp.inf, zero, jnp.zeros(q.shape, f32)
    return mk.fold(step, init, (k, v), block=block, merge=merge, identity=nothing)


@mk.task
def attend(
    q: Array,
    k: Array,
    v: Array,
    k_new: Array,
    v_new: Array,
    *,
    scale: float,
    block: int,
) -> Array:
    """softmax([k; k_new] @ q * scale) over cached rows and the new token.

    q: [G, D], k, v: [S, D] streamed, k_new, v_new: [1, D] -> [G, D] in q.dtype.
    """
    _, total, acc = softmax_state(q, k, v, k_new, v_new, scale=scale, block=block)
    return (acc / total).astype(q.dtype)


@mk.task
def append(k_new: Array, v_new: Array) -> tuple[Array, Array]:
    """The new token's key and value for the cache.

    k_new, v_new: [1, D] -> the same.
    """
    return k_new, v_new
