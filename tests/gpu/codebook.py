"""A program that is no language model, in the public API alone: recall by similarity.

    q = x / |x|                                  columns are queries
    nearest = argmax_i q . codes[i]              tiles of a codebook no tile divides
    r = softmax(SHARPNESS q . codes) @ values    a fold that the planner may split
    trace = (1 - RATE) trace + RATE r            in place

`recall(book, trace, x)` is the program, `plain_recall` the same in jnp.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk

Array = Any
Carry = tuple[Array, Array, Array]

QUERIES, CODES, WIDTH = 3, 777, 200
ROWS = 64
SHARPNESS = 20.0
RATE = 0.125
NO_CODE = 2**31 - 1
F32 = jnp.float32


@mk.task
def normalise(x: Array) -> Array:
    """x / |x|, [queries, width]."""
    wide = x.astype(F32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    return (wide / length).astype(x.dtype)


@mk.task
def best_of_tile(q: Array, codes: Array) -> tuple[Array, Array]:
    """The largest score of a tile of codes, and the code: [queries, 1] both."""
    scores = jnp.where(mk.valid(codes, 0), mk.dot(q, codes), -jnp.inf)
    code = jnp.argmax(scores, axis=-1) + mk.program_id(0) * codes.shape[0]
    return jnp.max(scores, axis=-1)[:, None], code[:, None].astype(jnp.int32)


@mk.task
def best_of_all(scores: Array, codes: Array) -> Array:
    """The code of the largest score, the lowest code on ties: [queries, 1]."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    found = jnp.where(scores == top, codes, NO_CODE)
    return jnp.min(found, axis=-1)[:, None]


def merge(a: Carry, b: Carry) -> Carry:
    """Join (largest score, sum of weights, weighted values) of two ranges of codes."""
    top = jnp.maximum(a[0], b[0])
    x, y = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    return top, a[1] * x + b[1] * y, a[2] * x + b[2] * y


@mk.task
def read_out(q: Array, codes: Array, values: Array) -> Array:
    """softmax(SHARPNESS q . codes) @ values, [queries, width]."""

    def step(carry: Carry, rows: tuple[Array, Array], valid: Array) -> Carry:
        scores = jnp.where(valid, mk.dot(q, rows[0]) * SHARPNESS, -jnp.inf)
        top = jnp.maximum(carry[0], jnp.max(scores, axis=-1, keepdims=True))
        weights, old = jnp.exp(scores - top), jnp.exp(carry[0] - top)
        total = carry[1] * old + jnp.sum(weights, axis=-1, keepdims=True)
        return top, total, carry[2] * old + mk.dot(weights.astype(q.dtype), rows[1].T)

    # Scores are at least -SHARPNESS: a start below them needs no infinity.
    low = jnp.full((q.shape[0], 1), -1e4, F32)
    init = (low, jnp.zeros_like(low), jnp.zeros(q.shape, F32))
    _, total, sums = mk.fold(step, init, (codes, values), block=ROWS, merge=merge)
    return (sums / total).astype(q.dtype)


@mk.task
def blend(trace: Array, r: Array) -> Array:
    """(1 - RATE) trace + RATE r."""
    return (trace * (1 - RATE) + r * RATE).astype(trace.dtype)


def recall(book: Any, trace: Array, x: Array) -> tuple[Array, Array, Array]:
    """(nearest int32 [queries], readout [queries, width], new trace)."""
    n, width = x.shape
    tiles = mk.cdiv(CODES, ROWS)
    q = mk.call(
        normalise,
        in_specs=(mk.whole,),
        out_specs=mk.Spec((n, width), lambda: (0, 0)),
        out_shape=mk.Shape((n, width), x.dtype),
    )(x)
    found = mk.call(
        best_of_tile,
        grid=(tiles,),
        in_specs=(mk.whole, mk.Spec((ROWS, width), lambda i: (i, 0))),
        out_specs=(mk.Spec((n, 1), lambda i: (0, i)),) * 2,
        out_shape=(mk.Shape((n, tiles), F32), mk.Shape((n, tiles), jnp.int32)),
    )(q, book["codes"])
    nearest = mk.call(
        best_of_all,
        in_specs=(mk.whole, mk.whole),
        out_specs=mk.Spec((n,), lambda: (0,), column=True),
        out_shape=mk.Shape((n,), jnp.int32),
    )(*found)
    r = mk.call(
        read_out,
        in_specs=(mk.whole, mk.whole, mk.whole),
        out_specs=mk.Spec((n, width), lambda: (0, 0)),
        out_shape=mk.Shape((n, width), x.dtype),
    )(q, book["codes"], book["values"])
    tile = mk.Spec((n, ROWS), lambda i: (0, i))
    trace = mk.call(
        blend,
        grid=(mk.cdiv(width, ROWS),),
        in_specs=(tile, tile),
        out_specs=mk.Into(trace, (n, ROWS), lambda i: (0, i)),
    )(trace, r)
    return nearest, r, trace


def plain_recall(book: Any, trace: Array, x: Array) -> tuple[Array, Array, Array]:
    """The same in float32."""
    codes, values = book["codes"].astype(F32), book["values"].astype(F32)
    x = x.astype(F32)
    exact = jax.lax.Precision.HIGHEST
    q = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    q = q.astype(jnp.bfloat16).astype(F32)
    scores = jnp.dot(q, codes.T, precision=exact)
    weights = jax.nn.softmax(SHARPNESS * scores, axis=-1)
    r = jnp.dot(weights, values, precision=exact)
    return jnp.argmax(scores, axis=-1), r, trace * (1 - RATE) + r * RATE


def example(seed: int = 0) -> tuple[Any, Array, Array]:
    """A book of unit codes, and queries near the last, the first and a middle one."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    codes = normal(CODES, WIDTH)
    codes /= np.linalg.norm(codes, axis=-1, keepdims=True)
    x = codes[[CODES - 1, 0, CODES // 2]] + 0.03 * normal(QUERIES, WIDTH)
    book = {"codes": codes, "values": normal(CODES, WIDTH)}
    book = {name: jnp.asarray(a, jnp.bfloat16) for name, a in book.items()}
    trace = jnp.asarray(normal(QUERIES, WIDTH), jnp.bfloat16)
    return book, trace, jnp.asarray(x, jnp.bfloat16)
