"""Decode attention over a cache at run-time lengths, as a fold of online softmax."""

from functools import partial
from typing import Any

import jax.numpy as jnp

import mkdsl as mk

Array = Any
Carry = tuple[Array, Array, Array]
LOG2_E = 1.4426950408889634


def _weight(m: Array, new: Array, factor: float) -> Array:
    """exp2((m - new) * factor), 0 where nothing was seen (m = -inf), never NaN."""
    return jnp.where(m == -jnp.inf, 0.0, jnp.exp2((m - new) * factor))


def merge(a: Carry, b: Carry, factor: float) -> Carry:
    """Join the softmax states (max, sum, weighted values) of two ranges of keys."""
    new = jnp.maximum(a[0], b[0])
    x, y = _weight(a[0], new, factor), _weight(b[0], new, factor)
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

    The maximum is that of products before they are scaled: subtracted first, it leaves
    an exact 0 of the largest. Scaled first, a fused multiply-subtract would leave what
    was rounded off, which is no small number where scores are large.

    q: [G, D], k, v: [S, D] streamed, k_new, v_new: [1, D]
    -> max [G, 1], sum [G, 1], values [G, D], float32.
    """
    f32, factor = jnp.float32, scale * LOG2_E

    def step(carry: Carry, kv: tuple[Array, ...], valid: Array) -> Carry:
        m, total, acc = carry
        products = jnp.where(valid, mk.dot(q, kv[0]), -jnp.inf)
        new = jnp.maximum(m, jnp.max(products, axis=-1, keepdims=True))
        p = jnp.exp2((products - new) * factor)
        old = _weight(m, new, factor)
        total = total * old + jnp.sum(p, axis=-1, keepdims=True)
        return new, total, acc * old + mk.dot(p.astype(q.dtype), kv[1].T)

    zero = jnp.zeros((q.shape[0], 1), f32)
    product = jnp.sum(q.astype(f32) * k_new.astype(f32), axis=-1, keepdims=True)
    init = product, zero + 1.0, jnp.broadcast_to(v_new.astype(f32), q.shape)
    nothing = zero - jnp.inf, zero, jnp.zeros(q.shape, f32)
    join = partial(merge, factor=factor)
    return mk.fold(step, init, (k, v), block=block, merge=join, identity=nothing)


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
