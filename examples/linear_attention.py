"""Gated linear attention: a recurrent state that a task reads and overwrites in place.

    state' = state * g + v k^T       one matrix [values, keys] per row, head and layer
    o = state' q                     g = sigmoid(z), one number per key

with an output projection, and a gated MLP behind it. There is no cache and no length: a
step costs the same however long the sequence is. `model(sizes, batch)` is the program:
the next vector of every row; `plain_model` is the same in plain JAX. A bfloat16 state
stays where it is; a float32 one gives the same, but the kernel keeps 32-bit tiles
transposed, and so it is transposed before and after every step.

    python examples/linear_attention.py
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
class Sizes:
    """Sizes of a model; a state is [layers, rows, heads, head_dim, head_dim]."""

    hidden: int = 256
    inner: int = 512
    layers: int = 3
    heads: int = 4
    head_dim: int = 64


# ------------------------------------------------------------------------------- tasks


def rms_norm(x: Array, gain: Array) -> Array:
    x = x.astype(F32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * gain.astype(F32)


@mk.task
def project(x: Array, gain: Array, w: Array) -> tuple[Array, ...]:
    """x [B, h], w [4 D, h] of one head -> q, k, v, z [B, D]."""
    y = mk.dot(rms_norm(x, gain).astype(w.dtype), w).astype(x.dtype)
    return tuple(jnp.split(y, 4, axis=-1))


@mk.task
def update(q: Array, k: Array, v: Array, z: Array, state: Array) -> tuple[Array, Array]:
    """q, k, z [1, keys], v [values, 1], state [values, keys] -> o [values], state."""
    k_wide, v_wide, z = (t.astype(F32) for t in (k, v, z))
    new = state.astype(F32) * jax.nn.sigmoid(z) + v_wide * k_wide
    o = jnp.sum(new * q.astype(F32), axis=-1) * q.shape[-1] ** -0.5
    return o.astype(q.dtype), new.astype(state.dtype)


@mk.task
def add(x: Array, h: Array, w: Array) -> Array:
    """x [B, R], h [B, K], w [R, K] -> x + h @ w.T [B, R]."""
    return (x.astype(F32) + mk.dot(h, w)).astype(x.dtype)


@mk.task
def gated(x: Array, gain: Array, gate: Array, up: Array) -> Array:
    """x [B, h], gate, up [R, h] -> [B, R]."""
    n = rms_norm(x, gain).astype(gate.dtype)
    return (jax.nn.silu(mk.dot(n, gate)) * mk.dot(n, up)).astype(x.dtype)


# ----------------------------------------------------------------------------- program


def model(s: Sizes, batch: int, rows: int = 64) -> Any:
    """f(params, state, x [B, h]) -> (y [B, h], state)."""
    dim, wide = s.head_dim, s.heads * s.head_dim
    tile = mk.Spec((batch, rows), lambda i: (0, i))

    def weight(rows: int, depth: int) -> mk.Spec:
        return mk.Spec((rows, depth), lambda i: (i, 0))

    def linear_attention(params: Tree, state: Array, x: Array) -> tuple[Array, Array]:
        shape = lambda *sizes: mk.Shape((batch, *sizes), x.dtype)  # noqa: E731

        def layer(carry: tuple[Array, Array], p: Tree, i: Any) -> tuple[Array, Array]:
            x, state = carry
            q, k, v, z = mk.call(
                project,
                grid=(s.heads,),
                in_specs=(mk.whole, mk.whole, weight(4 * dim, s.hidden)),
                out_specs=(mk.Spec((batch, None, dim), lambda h: (0, h, 0)),) * 4,
                out_shape=(shape(s.heads, dim),) * 4,
            )(x, p["gain1"], p["qkvz"])
            one = mk.Spec((None, 1, dim), lambda b, h: (b, h, 0))
            column = mk.Spec((None, None, dim), lambda b, h: (b, h, 0), column=True)
            block = (None, None, dim, dim), lambda b, h: (b, h, 0, 0)
            o, state = mk.call(
                update,
                grid=(batch, s.heads),
                in_specs=(one, one, column, one, mk.Spec(*block)),
                out_specs=(column, mk.Into(state[i], *block)),
                out_shape=(shape(s.heads, dim), None),
            )(q, k, v, z, state[i])
            x = mk.call(
                add,
                grid=(mk.cdiv(s.hidden, rows),),
                in_specs=(tile, mk.whole, weight(rows, wide)),
                out_specs=tile,
                out_shape=shape(s.hidden),
            )(x, o.reshape(batch, wide), p["out"])
            u = mk.call(
                gated,
                grid=(mk.cdiv(s.inner, rows),),
                in_specs=(mk.whole, mk.whole, *[weight(rows, s.hidden)] * 2),
                out_specs=tile,
                out_shape=shape(s.inner),
            )(x, p["gain2"], p["gate"], p["up"])
            x = mk.call(
                add,
                grid=(mk.cdiv(s.hidden, rows),),
                in_specs=(tile, mk.whole, weight(rows, s.inner)),
                out_specs=tile,
                out_shape=shape(s.hidden),
            )(x, u, p["down"])
            return x, state

        return mk.scan(layer, (x, state), params)

    return linear_attention


# ------------------------------------------------------------------ plain JAX, and data


def plain_model(s: Sizes, params: Tree, state: Array, x: Array) -> tuple[Array, Array]:
    """What `model` means: the same arguments and results."""
    linear = partial(jnp.einsum, "bi,oi->bo", preferred_element_type=F32)
    states = []
    for i in range(s.layers):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        y = linear(rms_norm(x, p["gain1"]).astype(x.dtype), p["qkvz"]).astype(x.dtype)
        y = y.reshape(-1, s.heads, 4 * s.head_dim).astype(F32)
        q, k, v, z = jnp.split(y, 4, axis=-1)
        old = state[i].astype(F32) * jax.nn.sigmoid(z)[:, :, None]
        new = old + jnp.einsum("bhv,bhk->bhvk", v, k)
        states.append(new.astype(state.dtype))
        o = jnp.einsum("bhvk,bhk->bhv", new, q) * s.head_dim**-0.5
        o = o.astype(x.dtype).reshape(x.shape[0], -1)
        x = (x.astype(F32) + linear(o, p["out"])).astype(x.dtype)
        n = rms_norm(x, p["gain2"]).astype(x.dtype)
        u = (jax.nn.silu(linear(n, p["gate"])) * linear(n, p["up"])).astype(x.dtype)
        x = (x.astype(F32) + linear(u, p["down"])).astype(x.dtype)
    return x, jnp.stack(states)


def random_params(s: Sizes, key: Array, dtype: Any = jnp.bfloat16) -> Tree:
    """Matrices [out, in] and gains, stacked over layers."""
    h, wide, n = s.hidden, s.heads * s.head_dim, s.layers
    sizes = {
        "qkvz": (n, 4 * wide, h),
        "out": (n, h, wide),
        "gate": (n, s.inner, h),
        "up": (n, s.inner, h),
        "down": (n, h, s.inner),
    }
    keys = jax.random.split(key, len(sizes) + 2)
    params = {
        name: jax.random.normal(k, size) * size[-1] ** -0.5
        for k, (name, size) in zip(keys, sizes.items(), strict=False)
    }
    for name, k in zip(("gain1", "gain2"), keys[-2:], strict=True):
        params[name] = 1 + 0.1 * jax.random.normal(k, (n, h))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def random_state(s: Sizes, batch: int, key: Array, dtype: Any = jnp.bfloat16) -> Array:
    """A state as after some tokens."""
    size = s.layers, batch, s.heads, s.head_dim, s.head_dim
    return jax.random.normal(key, size).astype(dtype)


def run(step: Any, params: Tree, state: Array, xs: Array) -> tuple[Array, Array]:
    """A vector per row and step: xs [T, B, h] -> ys [T, B, h], and the last state."""

    def one(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        ys, state = carry
        y, state = step(params, state, xs[t])
        return ys.at[t].set(y), state

    return lax.fori_loop(0, xs.shape[0], one, (jnp.zeros_like(xs), state))


def main() -> None:
    """Read twenty vectors of three rows in one jitted loop, in both ways."""
    s, batch, count = Sizes(), 3, 20
    params = random_params(s, jax.random.key(0), F32)
    xs = jax.random.normal(jax.random.key(1), (count, batch, s.hidden))
    step = mk.megakernel(model(s, batch), donate_argnums=1)
    loop = jax.jit(run, static_argnums=0, donate_argnums=2)
    ys, state = loop(step, params, random_state(s, batch, jax.random.key(2), F32), xs)
    plain = partial(plain_model, s)
    want = loop(plain, params, random_state(s, batch, jax.random.key(2), F32), xs)
    far = max(
        float(np.abs(a - b).max()) for a, b in zip((ys, state), want, strict=True)
    )
    print("implementation:", step.why())
    print(f"{count} steps of {batch} rows; largest difference to plain JAX: {far:.1e}")


if __name__ == "__main__":
    main()
