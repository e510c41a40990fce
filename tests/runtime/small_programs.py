"""Small traced programs for the tests of what runs plans.

mlp()     x + down(silu(gate(x)) * up(x)): two calls, ragged edges
decode()  two layers of attention over a cache and of mlp, with an in-place append
bump()    a state that one call reads and a later one overwrites
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from mkdsl.lang.program import Program
from mkdsl.lang.trace import trace_program
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import Options, compile_program

BF16 = jnp.bfloat16
ROWS = 64


@mk.task
def gated(x: Any, gate: Any, up: Any) -> Any:
    """silu(x @ gate.T) * (x @ up.T)."""
    y = x.astype(jnp.float32) * 0.5
    y = y.astype(x.dtype)
    return (jax.nn.silu(mk.dot(y, gate)) * mk.dot(y, up)).astype(x.dtype)


@mk.task
def residual(x: Any, h: Any, w: Any) -> Any:
    """x + h @ w.T."""
    return x + mk.dot(h, w).astype(x.dtype)


@mk.task
def attend(q: Any, k: Any, v: Any, new: Any) -> Any:
    """Attention over cached rows, and the row for the cache."""

    def step(carry: Any, kv: Any, valid: Any) -> Any:
        top, total, acc = carry
        scores = jnp.where(valid, mk.dot(q, kv[0]), -jnp.inf)
        high = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        p = jnp.exp(scores - high)
        old = jnp.exp(top - high)
        acc = acc * old + mk.dot(p.astype(q.dtype), kv[1].T)
        return high, total * old + jnp.sum(p, axis=-1, keepdims=True), acc

    def merge(a: Any, b: Any) -> Any:
        high = jnp.maximum(a[0], b[0])
        x, y = jnp.exp(a[0] - high), jnp.exp(b[0] - high)
        return high, a[1] * x + b[1] * y, a[2] * x + b[2] * y

    # A finite neutral maximum: no row may be there at all.
    low = jnp.full((q.shape[0], 1), -1e30, jnp.float32)
    zero = jnp.zeros(q.shape, jnp.float32)
    init = (low, jnp.zeros_like(low), zero)
    _, total, acc = mk.fold(step, init, (k, v), block=64, merge=merge)
    return (acc / (total + 1.0)).astype(q.dtype), new


@mk.task
def double(x: Any) -> Any:
    """2 * x."""
    return x * 2


def leaf(*shape: int, dtype: Any = BF16) -> Any:
    """An argument of a program."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    b, d = x.shape
    inner = gate.shape[0]
    row = lambda k: mk.Spec((ROWS, k), lambda i: (i, 0))  # noqa: E731
    tile = mk.Spec((b, ROWS), lambda i: (0, i))
    h = mk.call(
        gated,
        grid=(mk.cdiv(inner, ROWS),),
        in_specs=(mk.whole, row(d), row(d)),
        out_specs=tile,
        out_shape=mk.Shape((b, inner), x.dtype),
    )(x, gate, up)
    return mk.call(
        residual,
        grid=(mk.cdiv(d, ROWS),),
        in_specs=(tile, mk.whole, row(inner)),
        out_specs=tile,
        out_shape=mk.Shape((b, d), x.dtype),
        name="down",
    )(x, h, down)


def mlp(b: int = 2, d: int = 320, inner: int = 200) -> Program:
    """One layer; no tile divides `inner`, and the depth takes two pages."""
    args = (leaf(b, d), leaf(inner, d), leaf(inner, d), leaf(d, inner))
    return trace_program(_mlp, args, "mlp", ["x", "gate", "up", "down"])[0]


def mlp_reference(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """The same in float32."""
    x, gate, up, down = (jnp.asarray(a, jnp.float32) for a in (x, gate, up, down))
    h = jax.nn.silu(0.5 * x @ gate.T) * (0.5 * x @ up.T)
    return np.asarray(x + h @ down.T)


def decode(
    b: int = 2, d: int = 128, inner: int = 512, rows: int = 256, layers: int = 2
) -> Program:
    """x, cache, lengths, weights of all layers -> x, cache."""

    def program(x: Any, cache: Any, lengths: Any, weights: Any) -> Any:
        def layer(carry: Any, w: Any, i: Any) -> Any:
            x, cache = carry
            past = mk.Spec(
                (None, mk.BoundedSlice(rows), d),
                lambda n: (n, mk.ds(0, lengths[n]), 0),
            )
            one = mk.Spec((1, d), lambda n: (n, 0))
            into = mk.Into(cache[i], (None, 1, d), lambda n: (n, lengths[n], 0))
            y, cache = mk.call(
                attend,
                grid=(b,),
                in_specs=(one, past, past, one),
                out_specs=(one, into),
                out_shape=(mk.Shape((b, d), x.dtype), None),
            )(x, cache[i], cache[i], x)
            return _mlp(y, *w), cache

        return mk.scan(layer, (x, cache), weights)

    wide = (leaf(layers, inner, d), leaf(layers, inner, d), leaf(layers, d, inner))
    args = (leaf(b, d), leaf(layers, b, rows, d), leaf(b, dtype=jnp.int32), wide)
    names = ["x", "cache", "lengths", "w"]
    return trace_program(program, args, "decode", names)[0]


def bump(d: int = 512) -> Program:
    """y = 2 * s; s = 2 * t: the second call overwrites what the first one reads."""

    def program(s: Any, t: Any) -> Any:
        tile = lambda n: mk.Spec((1, n), lambda i: (0, i))  # noqa: E731
        y = mk.call(
            double,
            grid=(d // 64,),
            in_specs=tile(64),
            out_specs=tile(64),
            out_shape=mk.Shape((1, d), BF16),
            name="reader",
        )(s)
        s = mk.call(
            double,
            grid=(d // 128,),
            in_specs=tile(128),
            out_specs=mk.Into(s, (1, 128), lambda i: (0, i)),
            name="writer",
        )(t)
        return y, s

    return trace_program(program, (leaf(1, d), leaf(1, d)), "bump", ["s", "t"])[0]


def plan_of(program: Program, sms: int = 4, **splits: int) -> KernelPlan:
    """The plan for a few virtual SMs, with these calls split."""
    options = DecomposeOptions(split=False, splits=tuple(splits.items()))
    return compile_program(program, simulated(sms), Options(decompose=options))


def arguments(program: Program, length: int = 70, seed: int = 0) -> list[np.ndarray]:
    """Random inputs; integers are `length`."""
    rng = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    for name in program.inputs:
        b = program.buffer(name)
        if b.dtype == "int32":
            made.append(np.full(b.shape, length, np.int32))
        else:
            scale = 1.0 if name in ("x", "s", "t") else 0.1
            made.append((rng.standard_normal(b.shape) * scale).astype(BF16))
    return made
