"""The families as `flax.nnx` modules: their forward pass, short and without a cache.

    model = nnx_decoder.load(config, params)
    logits = model(ids)

Modules and parameters have the names of Hugging Face's keys. It shares the tables of
rotary embeddings with the other forward pass and nothing else, so each is an oracle of
the other. Arithmetic is in the dtype of the parameters; norms are in float32.
"""

# flax and jax annotate few of their functions in full.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import rope
from models.config import ModelConfig, Rope
from models.gemma3_config import Gemma3Config
from models.nnx import to_nnx
from models.params import Params
from models.qwen3 import Qwen3Config

type Array = jax.Array


class Norm(nnx.Module):
    """RMS norm; Gemma's multiplies by 1 + scale."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        self.offset = 1.0 if isinstance(config, Gemma3Config) else 0.0
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.full(size, 1.0 - self.offset))

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (wide * (self.offset + self.scale[...].astype(wide.dtype))).astype(
            x.dtype
        )


class Attention(nnx.Module):
    """Causal attention, within a window where there is one."""

    def __init__(
        self, c: ModelConfig, turned: Rope, window: int | None, rngs: nnx.Rngs
    ) -> None:
        self.dim, self.window = c.head_dim, window
        gemma = isinstance(c, Gemma3Config)
        self.scale = (c.query_scalar if gemma else c.head_dim) ** -0.5
        self.rope = turned
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q_proj = linear(c.hidden_size, c.num_heads * c.head_dim)
        self.k_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim)
        self.v_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim)
        self.o_proj = linear(c.num_heads * c.head_dim, c.hidden_size)
        self.has_norms = gemma or isinstance(c, Qwen3Config)
        if self.has_norms:
            self.q_norm, self.k_norm = Norm(c.head_dim, c), Norm(c.head_dim, c)

    def __call__(self, x: Array) -> Array:
        q, k, v = (
            project(x).reshape(*x.shape[:2], -1, self.dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        positions = jnp.arange(x.shape[1])[None]
        tables = rope.tables(positions, rope.frequencies(self.rope, self.dim), x.dtype)
        q, k = rope.rotate(q, *tables), rope.rotate(k, *tables)
        a = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=self.scale,
            is_causal=True,
            local_window_size=None if self.window is None else (self.window - 1, 0),
        )
        return self.o_proj(a.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """act(gate(x)) * up(x), projected down."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj = linear(c.hidden_size, c.intermediate_size)
        self.up_proj = linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)
        self.act = jax.nn.gelu if isinstance(c, Gemma3Config) else jax.nn.silu

    def __call__(self, x: Array) -> Array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """A layer of Llama or Qwen3: a norm before each branch."""

    def __init__(self, c: ModelConfig, index: int, rngs: nnx.Rngs) -> None:
        self.input_layernorm = Norm(c.hidden_size, c)
        self.self_attn = Attention(c, c.rope, None, rngs)
        self.post_attention_layernorm = Norm(c.hidden_size, c)
        self.mlp = MLP(c, rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Gemma3Layer(nnx.Module):
    """A layer of Gemma 3: a norm before and after each branch."""

    def __init__(self, c: Gemma3Config, index: int, rngs: nnx.Rngs) -> None:
        is_global = c.layer_is_global[index]
        turned, window = (c.rope, None) if is_global else (c.local_rope, c.window)
        self.input_layernorm = Norm(c.hidden_size, c)
        self.self_attn = Attention(c, turned, window, rngs)
        self.post_attention_layernorm = Norm(c.hidden_size, c)
        self.pre_feedforward_layernorm = Norm(c.hidden_size, c)
        self.mlp = MLP(c, rngs)
        self.post_feedforward_layernorm = Norm(c.hidden_size, c)

    def __call__(self, x: Array) -> Array:
        a = self.self_attn(self.input_layernorm(x))
        x = x + self.post_attention_layernorm(a)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


class Stack(nnx.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        gemma = isinstance(c, Gemma3Config)
        layer: Any = Gemma3Layer if gemma else Layer
        self.embed_scale = c.hidden_size**0.5 if gemma else 1.0
        self.embed_tokens = nnx.Embed(c.vocab_size, c.hidden_size, rngs=rngs)
        self.layers = nnx.List([layer(c, i, rngs) for i in range(c.num_layers)])
        self.norm = Norm(c.hidden_size, c)

    def __call__(self, ids: Array) -> Array:
        x = self.embed_tokens(ids)
        x = x * jnp.asarray(self.embed_scale, x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Decoder(nnx.Module):
    """A language model: int32 ids [B, T] -> float32 scores [B, T, V].

    Row t scores what follows token t. Rows are padded on the right with any token:
    what is before it does not see it.
    """

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs) -> None:
        self.model = Stack(c, rngs)
        self.tied = c.tied
        if not c.tied:
            self.lm_head = nnx.Linear(
                c.hidden_size, c.vocab_size, use_bias=False, rngs=rngs
            )

    def __call__(self, ids: Array) -> Array:
        x = self.model(ids)
        tied = self.tied
        w = self.model.embed_tokens.embedding[...].T if tied else self.lm_head.kernel
        return jnp.einsum("bth,hv->btv", x, w, preferred_element_type=jnp.float32)


def load(config: ModelConfig, params: Params) -> Decoder:
    """A module that holds these parameters."""
    return to_nnx(config, params, nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
