"""Lesson 9: decode in jit.

A step of a language model, small but whole: look a token up, project q, k and v, attend
to the cache and to the token itself, write its key and value into the cache, choose the
next token. The step is one kernel; the loop over tokens is an ordinary `lax.fori_loop`
in an ordinary `jax.jit`, and lengths are arrays. So nothing is traced twice, nothing
comes back to Python between tokens, and the cache is written in place (`mk.Into`,
donated).

    python examples/lesson_09_decode_in_jit.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mkdsl as mk

VOCAB, DIM, SLOTS = 192, 64, 128
F32, BF16 = jnp.float32, jnp.bfloat16


def merge(a, b):
    top = jnp.maximum(a[0], b[0])
    x, y = (jnp.where(c[0] == -jnp.inf, 0.0, jnp.exp(c[0] - top)) for c in (a, b))
    return top, a[1] * x + b[1] * y, a[2] * x + b[2] * y


@mk.task
def same(*blocks):
    return blocks


@mk.task
def project(x, w):  # x [B, D], w [3 D, D] -> q, k, v [B, D]
    return tuple(jnp.split(mk.dot(x, w).astype(x.dtype), 3, axis=-1))


@mk.task
def attend(x, q, k_new, v_new, k, v):  # [1, D] each, cached k, v [S, D] -> [1, D]
    def block(carry, rows, valid):
        scores = jnp.where(valid, mk.dot(q, rows[0]), -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        mixed = mk.dot(weights.astype(q.dtype), rows[1].T)
        return merge(carry, (top, jnp.sum(weights, axis=-1, keepdims=True), mixed))

    # The fold starts from the token itself, which is not in the cache yet.
    own = jnp.sum(q.astype(F32) * k_new.astype(F32), axis=-1, keepdims=True)
    start = own, jnp.ones_like(own), v_new.astype(F32)
    none = jnp.full_like(own, -jnp.inf), own * 0, jnp.zeros(q.shape, F32)
    _, total, out = mk.fold(block, start, (k, v), block=64, merge=merge, identity=none)
    return (x.astype(F32) + out / total).astype(x.dtype)


@mk.task
def best(x, w):  # x [B, D], w [64, D] of the vocabulary -> score, token [B, 1]
    scores = mk.dot(x, w)
    token = jnp.argmax(scores, axis=-1) + mk.program_id(0) * w.shape[0]
    return jnp.max(scores, axis=-1)[:, None], token[:, None].astype(jnp.int32)


@mk.task
def pick(scores, tokens):  # [B, tiles] -> [B, 1]: the token of the largest score
    top = jnp.max(scores, axis=-1, keepdims=True)
    first = jnp.where(scores == top, tokens, 2**31 - 1)
    return jnp.min(first, axis=-1, keepdims=True)


def step(params, cache, tokens):  # tokens [B] -> tokens [B], cache
    lengths, dtype = cache["lengths"], params["embed"].dtype
    batch = tokens.shape[0]
    row = mk.Spec((1, DIM), lambda b: (b, 0))
    x = mk.call(
        same,
        grid=(batch,),
        in_specs=mk.Spec((1, DIM), lambda b: (tokens[b], 0)),
        out_specs=row,
        out_shape=mk.Shape((batch, DIM), dtype),
    )(params["embed"])
    q, k, v = mk.call(
        project,
        out_specs=(mk.Spec((batch, DIM), lambda: (0, 0)),) * 3,
        out_shape=(mk.Shape((batch, DIM), dtype),) * 3,
    )(x, params["qkv"])
    past = mk.Spec(
        (None, mk.BoundedSlice(SLOTS), DIM), lambda b: (b, mk.ds(0, lengths[b]), 0)
    )
    y = mk.call(
        attend,
        grid=(batch,),
        in_specs=(row, row, row, row, past, past),
        out_specs=row,
        out_shape=mk.Shape((batch, DIM), dtype),
    )(x, q, k, v, cache["k"], cache["v"])
    slot = (None, 1, DIM), lambda b: (b, lengths[b], 0)
    k, v = mk.call(
        same,
        grid=(batch,),
        in_specs=row,
        out_specs=tuple(mk.Into(cache[name], *slot) for name in "kv"),
    )(k, v)
    tile = mk.Spec((batch, 1), lambda i: (0, i))
    scores, ids = mk.call(
        best,
        grid=(VOCAB // 64,),
        in_specs=(mk.whole, mk.Spec((64, DIM), lambda i: (i, 0))),
        out_specs=(tile, tile),
        out_shape=tuple(mk.Shape((batch, VOCAB // 64), t) for t in (F32, jnp.int32)),
    )(y, params["head"])
    token = mk.call(
        pick,
        out_specs=mk.Spec((batch, 1), lambda: (0, 0)),
        out_shape=mk.Shape((batch, 1), jnp.int32),
    )(scores, ids)
    return token.reshape(batch), {"k": k, "v": v, "lengths": lengths}


def plain_step(params, cache, tokens):
    """The same in plain JAX."""
    lengths, rows = cache["lengths"], jnp.arange(tokens.shape[0])
    x = params["embed"][tokens]
    dot = partial(jnp.einsum, preferred_element_type=F32)
    qkv = dot("bd,rd->br", x, params["qkv"]).astype(x.dtype)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    cache = cache | {
        name: cache[name].at[rows, lengths].set(new)
        for name, new in {"k": k, "v": v}.items()
    }
    seen = jnp.arange(SLOTS) <= lengths[:, None]
    scores = dot("bd,bsd->bs", q, cache["k"])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    y = x.astype(F32) + dot("bs,bsd->bd", weights, cache["v"].astype(F32))
    logits = dot("bd,rd->br", y.astype(x.dtype), params["head"])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


@partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def generate(one_step, params, cache, count, tokens):
    """`count` tokens of every row [B, count], greedily, and the cache after them."""

    def body(i, state):
        tokens, cache, found = state
        tokens, cache = one_step(params, cache, tokens)
        cache = cache | {"lengths": cache["lengths"] + 1}
        return tokens, cache, found.at[:, i].set(tokens)

    found = jnp.zeros((tokens.shape[0], count), jnp.int32)
    return lax.fori_loop(0, count, body, (tokens, cache, found))[:0:-1]


def data():
    keys = jax.random.split(jax.random.key(1), 4)
    sizes = {"embed": (VOCAB, DIM), "head": (VOCAB, DIM), "qkv": (3 * DIM, DIM)}
    params = {
        name: jax.random.normal(key, size, BF16) / (8 if name == "qkv" else 1)
        for key, (name, size) in zip(keys[1:], sizes.items(), strict=True)
    }
    cache = {n: jnp.zeros((2, SLOTS, DIM), BF16) for n in "kv"}
    cache["lengths"] = jnp.zeros(2, jnp.int32)
    return params, cache, jax.random.randint(keys[0], (2,), 0, VOCAB, jnp.int32)


def main() -> None:
    megakernel = mk.megakernel(step, donate_argnums=1)
    params, cache, tokens = data()
    found, _ = generate(megakernel, params, cache, 24, tokens)
    _, cache, _ = data()
    wanted, _ = generate(plain_step, params, cache, 24, tokens)
    print(f"what ran: {megakernel.why()}")
    for row in np.asarray(found):
        print("tokens:", *row)
    print("the same as plain JAX:", bool((found == wanted).all()))
    print(f"24 steps at 24 lengths, traced {megakernel.traces} time")

    params, cache, tokens = data()
    simulated = mk.megakernel(step, implementation="simulate")
    token, after = simulated(params, cache, tokens)
    print("the first token in the simulator:", *np.asarray(token))
    print("rows of the cache that it wrote:", int((after["k"] != 0).any(-1).sum()))


if __name__ == "__main__":
    main()
