"""A decode step in the style of GPT-NeoX and Phi: attention and MLP side by side.

    x + attention(layer_norm1(x)) + mlp(layer_norm2(x))

LayerNorm and projections have biases, the first features of each head alone are turned,
q, k and v of a head are packed, the MLP has GELU. `decode(model, batch, slots)` is the
program: one token per row, row b at position `lengths[b]`, keys and values written in
place. `plain_decode` is the same in plain JAX.

    python examples/parallel_block.py
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mkdsl as mk

Array = Any
Tree = Any
F32 = jnp.float32


@dataclass(frozen=True)
class Model:
    """Sizes; `rotary` features of a head are turned, the others are not."""

    vocab: int = 509
    hidden: int = 256
    inner: int = 1024
    layers: int = 3
    heads: int = 4
    head_dim: int = 64
    rotary: int = 16


# ------------------------------------------------------------------------------- block


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    x = x.astype(F32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
    return x * gain.astype(F32) + bias.astype(F32)


def turn(x: Array, angle: Array, half: int) -> Array:
    """Rotate pairs (i, i + half); from 2 * half on the angle is 0."""
    first = jnp.arange(x.shape[-1]) < half
    other = jnp.where(first, -mk.roll(x, -half), mk.roll(x, half))
    return x * jnp.cos(angle) + other * jnp.sin(angle)


def merge(a: Tree, b: Tree, scale: float) -> Tree:
    """Join (largest product, sum of weights, weighted values) of two ranges of keys."""
    top = jnp.maximum(a[0], b[0])
    x, y = (
        jnp.where(c[0] == -jnp.inf, 0.0, jnp.exp((c[0] - top) * scale)) for c in (a, b)
    )
    return top, a[1] * x + b[1] * y, a[2] * x + b[2] * y


@mk.task
def project(x, gain, bias, w, b, position, frequency, *, half):
    """x [B, h], w [3 D, h] of one head, position [B, 1] -> q, k, v [B, D]."""
    y = mk.dot(layer_norm(x, gain, bias).astype(w.dtype), w) + b
    q, k, v = jnp.split(y, 3, axis=-1)
    angle = position.astype(F32) * frequency
    q, k = turn(q, angle, half), turn(k, angle, half)
    return q.astype(x.dtype), k.astype(x.dtype), v.astype(x.dtype)


@mk.task
def attend(q: Array, k: Array, v: Array, k_new: Array, v_new: Array) -> Array:
    """q, k_new, v_new [1, D], cached k, v [S, D] -> [1, D]."""
    scale = q.shape[-1] ** -0.5
    join = partial(merge, scale=scale)

    def block(carry: Tree, kv: tuple[Array, ...], valid: Array) -> Tree:
        products = jnp.where(valid, mk.dot(q, kv[0]), -jnp.inf)
        top = jnp.max(products, axis=-1, keepdims=True)
        p = jnp.exp((products - top) * scale)
        values = mk.dot(p.astype(q.dtype), kv[1].T)
        return join(carry, (top, jnp.sum(p, axis=-1, keepdims=True), values))

    own = jnp.sum(q.astype(F32) * k_new.astype(F32), axis=-1, keepdims=True)
    start = own, jnp.ones_like(own), v_new.astype(F32)
    none = jnp.full_like(own, -jnp.inf), own * 0, jnp.zeros(q.shape, F32)
    _, total, out = mk.fold(block, start, (k, v), block=64, merge=join, identity=none)
    return (out / total).astype(q.dtype)


@mk.task
def same(*blocks: Array) -> tuple[Array, ...]:
    return blocks


@mk.task
def up(x: Array, gain: Array, bias: Array, w: Array, b: Array) -> Array:
    n = layer_norm(x, gain, bias).astype(w.dtype)
    return jax.nn.gelu(mk.dot(n, w) + b, approximate=False).astype(x.dtype)


@mk.task
def add(x: Array, a: Array, u: Array, out: Array, down: Array, b: Array) -> Array:
    return (x.astype(F32) + mk.dot(a, out) + mk.dot(u, down) + b).astype(x.dtype)


def weight(rows: int, depth: int) -> mk.Spec:
    return mk.Spec((rows, depth), lambda i: (i, 0))


def parallel_block(
    m: Model, slots: int, carry: Tree, p: Tree, i: Any, lengths: Array, turns: Array
) -> Tree:
    """One layer: (x [B, h], cached keys, values) -> the same, one token longer."""
    x, *cached = carry
    batch, dim, wide, rows = x.shape[0], m.head_dim, m.heads * m.head_dim, 64
    tile = mk.Spec((batch, rows), lambda i: (0, i))
    part, bias = (mk.Spec((n,), lambda i: i) for n in (rows, 3 * dim))
    position = mk.Spec((batch,), lambda h: 0, column=True)
    q, k, v = mk.call(
        partial(project, half=m.rotary // 2),
        grid=(m.heads,),
        in_specs=(*[mk.whole] * 3, weight(3 * dim, m.hidden), bias, position, mk.whole),
        out_specs=(mk.Spec((batch, None, dim), lambda h: (0, h, 0)),) * 3,
        out_shape=(mk.Shape((batch, m.heads, dim), x.dtype),) * 3,
    )(x, p["gain1"], p["bias1"], p["qkv"], p["qkv_bias"], lengths, turns)
    one = mk.Spec((None, 1, dim), lambda b, h: (b, h, 0))
    old = mk.Spec(
        (None, None, mk.BoundedSlice(slots), dim),
        lambda b, h: (b, h, mk.ds(0, lengths[b]), 0),
    )
    a = mk.call(
        attend,
        grid=(batch, m.heads),
        in_specs=(one, old, old, one, one),
        out_specs=one,
        out_shape=mk.Shape(q.shape, x.dtype),
    )(q, cached[0][i], cached[1][i], k, v)
    slot = (None, None, 1, dim), lambda b, h: (b, h, lengths[b], 0)
    cached = mk.call(
        same,
        grid=(batch, m.heads),
        in_specs=one,
        out_specs=tuple(mk.Into(c[i], *slot) for c in cached),
    )(k, v)
    u = mk.call(
        up,
        grid=(mk.cdiv(m.inner, rows),),
        in_specs=(*[mk.whole] * 3, weight(rows, m.hidden), part),
        out_specs=tile,
        out_shape=mk.Shape((batch, m.inner), x.dtype),
    )(x, p["gain2"], p["bias2"], p["up"], p["up_bias"])
    both = weight(rows, wide), weight(rows, m.inner)
    x = mk.call(
        add,
        grid=(mk.cdiv(m.hidden, rows),),
        in_specs=(tile, mk.whole, mk.whole, *both, part),
        out_specs=tile,
        out_shape=mk.Shape(x.shape, x.dtype),
    )(x, a.reshape(batch, wide), u, p["out"], p["down"], p["down_bias"])
    return x, *cached


# ------------------------------------------------------- from tokens, and back to them


@mk.task
def best(x: Array, gain: Array, bias: Array, w: Array) -> tuple[Array, Array]:
    """x [B, h], w [R, h] of the vocabulary -> score, token [B, 1]."""
    scores = mk.dot(layer_norm(x, gain, bias).astype(w.dtype), w)
    scores = jnp.where(mk.valid(w, 0), scores, -jnp.inf)
    token = jnp.argmax(scores, axis=-1) + mk.program_id(0) * w.shape[0]
    return jnp.max(scores, axis=-1)[:, None], token[:, None].astype(jnp.int32)


@mk.task
def pick(scores: Array, tokens: Array) -> tuple[Array, Array]:
    """The largest score [B, 1] and its token, the lowest of equal ones."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    token = jnp.min(jnp.where(scores == top, tokens, 2**31 - 1), axis=-1)
    return top, token[:, None]


def decode(m: Model, batch: int, slots: int) -> Any:
    """f(params, cache, tokens [B]) -> (tokens [B], their scores [B], cache)."""

    def parallel_decode(params: Tree, cache: Tree, tokens: Array) -> Any:
        lengths = cache["lengths"]
        x = mk.call(
            same,
            grid=(batch,),
            in_specs=mk.Spec((1, m.hidden), lambda b: (tokens[b], 0)),
            out_specs=mk.Spec((1, m.hidden), lambda b: (b, 0)),
            out_shape=mk.Shape((batch, m.hidden), params["embed"].dtype),
        )(params["embed"])
        here = {"lengths": lengths, "turns": params["frequency"]}
        layer = partial(parallel_block, m, slots, **here)
        x, k, v = mk.scan(layer, (x, cache["k"], cache["v"]), params["layers"])
        count = mk.cdiv(m.vocab, 128)
        found = mk.call(
            best,
            grid=(count,),
            in_specs=(*[mk.whole] * 3, weight(128, m.hidden)),
            out_specs=(mk.Spec((batch, 1), lambda i: (0, i)),) * 2,
            out_shape=tuple(mk.Shape((batch, count), t) for t in (F32, jnp.int32)),
        )(x, params["gain"], params["bias"], params["head"])
        score, token = mk.call(
            pick,
            out_specs=(mk.Spec((batch,), lambda: 0, column=True),) * 2,
            out_shape=(mk.Shape((batch,), F32), mk.Shape((batch,), jnp.int32)),
        )(*found)
        return token, score, {"k": k, "v": v, "lengths": lengths}

    return parallel_decode


# ------------------------------------------------------------------ plain JAX, and data


def plain_decode(m: Model, params: Tree, cache: Tree, tokens: Array) -> Any:
    """What `decode` means: the same arguments and results."""
    lengths, rows = cache["lengths"], jnp.arange(tokens.shape[0])
    linear = partial(jnp.einsum, "bi,oi->bo", preferred_element_type=F32)
    scale, half = m.head_dim**-0.5, m.rotary // 2
    angle = lengths[:, None, None] * params["frequency"][:, None, :half]
    x = params["embed"][tokens]
    keys, values = [], []

    def turned(y: Array) -> Array:
        a, b, rest = jnp.split(y, (half, m.rotary), axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    for i in range(m.layers):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        n = layer_norm(x, p["gain1"], p["bias1"]).astype(x.dtype)
        y = linear(n, p["qkv"]) + p["qkv_bias"]
        q, k, v = jnp.split(y.reshape(-1, m.heads, 3 * m.head_dim), 3, axis=-1)
        q, k, v = (t.astype(x.dtype) for t in (turned(q), turned(k), v))
        at = (rows, slice(None), lengths)
        keys.append(cache["k"][i].at[at].set(k, mode="drop"))
        values.append(cache["v"][i].at[at].set(v, mode="drop"))
        seen = (jnp.arange(keys[i].shape[2]) <= lengths[:, None])[:, None, :, None]
        k, v = (jnp.where(seen, t[i].astype(F32), 0) for t in (keys, values))
        scores = jnp.einsum("bhd,bhsd->bhs", q.astype(F32), k) * scale
        weights = jax.nn.softmax(jnp.where(seen[..., 0], scores, -jnp.inf), axis=-1)
        a = jnp.einsum("bhs,bhsd->bhd", weights, v).astype(x.dtype)
        n = layer_norm(x, p["gain2"], p["bias2"]).astype(x.dtype)
        u = jax.nn.gelu(linear(n, p["up"]) + p["up_bias"], approximate=False)
        y = linear(a.reshape(n.shape[0], -1), p["out"]) + linear(
            u.astype(x.dtype), p["down"]
        )
        x = (x.astype(F32) + y + p["down_bias"]).astype(x.dtype)
    n = layer_norm(x, params["gain"], params["bias"]).astype(x.dtype)
    scores = linear(n, params["head"])
    cache = {"k": jnp.stack(keys), "v": jnp.stack(values), "lengths": lengths}
    return jnp.argmax(scores, axis=-1), jnp.max(scores, axis=-1), cache


def random_params(m: Model, key: Array, dtype: Any = jnp.bfloat16) -> Tree:
    """Matrices [out, in], stacked over layers, and the rotary frequencies [1, D]."""
    wide, count = m.heads * m.head_dim, iter(range(100))

    def normal(*size: int, mean: float = 0.0, spread: float = 0.1) -> Array:
        noise = jax.random.normal(jax.random.fold_in(key, next(count)), size)
        return (mean + spread * noise).astype(dtype)

    def matrix(*size: int) -> Array:
        return normal(*size, spread=size[-1] ** -0.5)

    n, h = m.layers, m.hidden
    layers = {
        "qkv": matrix(n, 3 * wide, h),
        "out": matrix(n, h, wide),
        "up": matrix(n, m.inner, h),
        "down": matrix(n, h, m.inner),
        "qkv_bias": normal(n, 3 * wide),
        "up_bias": normal(n, m.inner),
        "down_bias": normal(n, h),
    }
    layers |= {name: normal(n, h, mean=1.0) for name in ("gain1", "gain2")}
    layers |= {name: normal(n, h) for name in ("bias1", "bias2")}
    turned = np.arange(m.head_dim) < m.rotary
    exponent = np.arange(m.head_dim) % (m.rotary // 2) / (m.rotary // 2)
    return {
        "embed": normal(m.vocab, h, spread=1.0),
        "layers": layers,
        "gain": normal(h, mean=1.0),
        "bias": normal(h),
        "head": matrix(m.vocab, h),
        "frequency": jnp.asarray(np.where(turned, 1e4**-exponent, 0)[None], F32),
    }


def filled_cache(
    m: Model, lengths: list[int], slots: int, key: Array, dtype: Any = jnp.bfloat16
) -> Tree:
    """`lengths[b]` random tokens in row b, and NaN in the slots behind them."""
    size = m.layers, len(lengths), m.heads, slots, m.head_dim
    used = (jnp.arange(slots) < jnp.array(lengths)[:, None])[None, :, None, :, None]
    k, v = jnp.where(used, jax.random.normal(key, (2, *size)), jnp.nan).astype(dtype)
    return {"k": k, "v": v, "lengths": jnp.array(lengths, jnp.int32)}


def main() -> None:
    """Decode eight tokens of three rows in one jitted loop, in both ways."""
    m, lengths, slots, count = Model(), [5, 64, 100], 128, 8
    key = jax.random.key(0)
    params = random_params(m, key, F32)
    tokens = jnp.array([7, 300, 508], jnp.int32)
    step = mk.megakernel(decode(m, len(lengths), slots), donate_argnums=1)

    @partial(jax.jit, static_argnums=0)
    def loop(run: Any, cache: Tree) -> Array:
        def one(i: Array, state: Any) -> Any:
            cache, found = state
            token, _, cache = run(params, cache, found[i])
            cache["lengths"] += 1
            return cache, found.at[i + 1].set(token)

        found = jnp.zeros((count + 1, len(lengths)), jnp.int32).at[0].set(tokens)
        return lax.fori_loop(0, count, one, (cache, found))[1][1:].T

    found = loop(step, filled_cache(m, lengths, slots, key, F32))
    plain = loop(partial(plain_decode, m), filled_cache(m, lengths, slots, key, F32))
    print("implementation:", step.why())
    print("tokens:", *np.asarray(found).tolist())
    print("plain JAX chooses", "the same" if (found == plain).all() else "others")


if __name__ == "__main__":
    main()
