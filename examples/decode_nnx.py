"""Decode a flax.nnx model of your own with a megakernel.

`Mine` is a model as a user may have it: modules and parameters with names of its own,
and a forward pass without a cache. It is of the Llama family, so a decode step for it
is there already: `NAMES` says where each parameter is, `CONFIG` how large it is.

    python examples/decode_nnx.py
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from models.cache import init_cache
from models.config import Rope
from models.decode import DecodeStep, decode_params, prefill
from models.llama import LlamaConfig
from models.nnx import from_nnx

Array = Any

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM = 509, 128, 320, 3, 4, 2, 64
EPS, THETA = 1e-5, 10_000.0


# --------------------------------------------------------------------- your own model


def turn(x: Array) -> Array:
    """Rotary embedding of x [B, T, heads, D]: pairs are (i, i + D / 2)."""
    angle = jnp.arange(x.shape[1])[:, None] * THETA ** -(jnp.arange(0, DIM, 2) / DIM)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.wq = linear(HIDDEN, HEADS * DIM)
        self.wk = linear(HIDDEN, KV_HEADS * DIM)
        self.wv = linear(HIDDEN, KV_HEADS * DIM)
        self.wo = linear(HEADS * DIM, HIDDEN)

    def __call__(self, x: Array) -> Array:
        q, k, v = (
            w(x).reshape(*x.shape[:2], -1, DIM) for w in (self.wq, self.wk, self.wv)
        )
        a = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.wo(a.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.before_attn = nnx.RMSNorm(HIDDEN, epsilon=EPS, rngs=rngs)
        self.attn = Attention(rngs)
        self.before_ffn = nnx.RMSNorm(HIDDEN, epsilon=EPS, rngs=rngs)
        self.w1, self.w3 = linear(HIDDEN, INNER), linear(HIDDEN, INNER)
        self.w2 = linear(INNER, HIDDEN)

    def __call__(self, x: Array) -> Array:
        x = x + self.attn(self.before_attn(x))
        n = self.before_ffn(x)
        return x + self.w2(nnx.silu(self.w1(n)) * self.w3(n))


class Mine(nnx.Module):
    """ids [B, T] -> scores of the next token, [B, T, V]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tok = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.out_norm = nnx.RMSNorm(HIDDEN, epsilon=EPS, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.out_norm(x))


# --------------------------------------------------------------- what the program needs

CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    norm_eps=EPS,
    tied=False,
    max_length=256,
    rope=Rope(THETA),
)
# `{}` is the number of a layer, `.T` is for a matrix [in, out].
NAMES = {
    "embed": "tok.embedding",
    "layers.input_norm": "blocks.{}.before_attn.scale",
    "layers.q": "blocks.{}.attn.wq.kernel.T",
    "layers.k": "blocks.{}.attn.wk.kernel.T",
    "layers.v": "blocks.{}.attn.wv.kernel.T",
    "layers.o": "blocks.{}.attn.wo.kernel.T",
    "layers.post_norm": "blocks.{}.before_ffn.scale",
    "layers.gate": "blocks.{}.w1.kernel.T",
    "layers.up": "blocks.{}.w3.kernel.T",
    "layers.down": "blocks.{}.w2.kernel.T",
    "norm": "out_norm.scale",
    "head": "out.kernel.T",
}


def decode(
    model: Mine,
    prompts: Array,
    count: int,
    dtype: Any = None,
    implementation: Any = None,
) -> tuple[Array, str]:
    """`count` greedy tokens behind prompts [B, T], in one jitted loop.

    Args:
        dtype: to compute in; that of the model where None.
        implementation: see mk.megakernel.

    Returns:
        int32 [B, count], and which implementation ran and why.
    """
    batch, length = prompts.shape
    slots = length + count
    params = decode_params(CONFIG, from_nnx(CONFIG, model, NAMES, dtype=dtype))
    step = DecodeStep(CONFIG, batch, slots, implementation=implementation)
    empty = init_cache(CONFIG, batch, slots, params["embed"].dtype)
    lengths = jnp.full(batch, length, jnp.int32)
    scores, cache = prefill(CONFIG, params, empty, prompts, lengths)

    @jax.jit
    def loop(params: Any, cache: Any, first: Array) -> Array:
        def one(i: Array, state: Any) -> Any:
            cache, found = state
            token, cache = step(params, cache, found[i])
            return cache, found.at[i + 1].set(token)

        found = jnp.zeros((count, batch), jnp.int32).at[0].set(first)
        return lax.fori_loop(0, count - 1, one, (cache, found))[1].T

    return loop(params, cache, jnp.argmax(scores, axis=-1)), step.why()


def plain_decode(model: Mine, prompts: Array, count: int) -> Array:
    """The same by the model itself, which reads all tokens again for each new one."""
    ids = prompts
    for _ in range(count):
        token = jnp.argmax(model(ids)[:, -1], axis=-1)
        ids = jnp.concatenate([ids, token[:, None].astype(jnp.int32)], axis=1)
    return ids[:, prompts.shape[1] :]


def main() -> None:
    """Decode twelve tokens of two rows, in both ways."""
    model = Mine(nnx.Rngs(0))
    prompts = jnp.array([[5, 71, 200, 3], [508, 1, 1, 9]], jnp.int32)
    # The kernel streams 16-bit weights, which may choose other tokens.
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else None
    found, why = decode(model, prompts, 12, dtype)
    print("implementation:", why)
    print("tokens:", *np.asarray(found).tolist())
    same = bool((found == plain_decode(model, prompts, 12)).all())
    print("the model itself chooses", "the same" if same else "others")


if __name__ == "__main__":
    main()
