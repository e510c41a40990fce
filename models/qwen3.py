"""Qwen3 (dense): configuration, forward pass in plain JAX, decode step as a program.

What differs from Llama: queries and keys are normed per head, before RoPE, and head_dim
is a size of its own, not hidden / heads. The forward pass is the oracle of the program
and its prefill. `params` is the tree of `leaves(config)`; ids are int32 [B, T], padded
on the right, `lengths` int32 [B] the numbers of real ids. Arithmetic is in the dtype of
the parameters.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import mkdsl as mk
from models import rope
from models.cache import KVCache
from models.config import (
    ConfigError,
    HFConfig,
    ModelConfig,
    choice,
    common_fields,
    count,
    read_one_rope,
    refuse,
)
from models.params import Leaf, Params, decoder_leaves
from models.programs import Array, Step, head_of, twice
from models.reference import (
    Past,
    attention,
    embed,
    forward_of,
    heads,
    linear,
    prefill_of,
    rms_norm,
    scan_layers,
    silu,
)
from models.tasks import linear as tasks
from models.tasks import sample


@dataclass(frozen=True, slots=True)
class Qwen3Config(ModelConfig):
    """Sizes and constants of a Qwen3 model."""

    @classmethod
    def from_hf(cls, config: HFConfig) -> "Qwen3Config":
        """Read a parsed `config.json`.

        Raises:
            ConfigError: A key is missing, or its value is not supported.
        """
        choice(config, "hidden_act", ("silu", "swish"))
        # A window is given by some files and switched off by this key, or by the types.
        refuse(config, "use_sliding_window")
        windowed = sorted({*(config.get("layer_types") or ())} - {"full_attention"})
        if windowed:
            raise ConfigError(
                f"config.json: 'layer_types' has {', '.join(map(repr, windowed))}, "
                "which is not supported; supported: 'full_attention'"
            )
        # transformers' class has 128 where the file says nothing, not hidden / heads.
        config = {**config, "head_dim": count(config, "head_dim", 128)}
        return cls(**common_fields(config, tied=False), rope=read_one_rope(config))


def leaves(config: Qwen3Config) -> tuple[Leaf, ...]:
    """List the parameters."""
    norms = {
        "input_norm": "input_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "post_norm": "post_attention_layernorm",
    }
    return decoder_leaves(config, norms, gain_mean=1.0)


def rope_frequencies(config: Qwen3Config) -> rope.Frequencies:
    """Inverse frequencies of every layer, float32 [D / 2]; see `rope.frequencies`."""
    return rope.frequencies(config.rope, config.head_dim)


def _run(
    config: Qwen3Config,
    params: Params,
    cache: KVCache,
    ids: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, Past]:
    """Final hidden states [B, T, h], normed, and new keys and values."""
    eps, dim = config.norm_eps, config.head_dim
    x = embed(params["embed"], ids, lengths)
    positions = cache.lengths[:, None] + jnp.arange(ids.shape[1])
    cos, sin = rope.tables(positions, rope_frequencies(config), x.dtype)

    def layer(x: jax.Array, p: Params, past: Past, _: Any) -> tuple[jax.Array, Past]:
        n = rms_norm(x, p["input_norm"], eps)
        q = rms_norm(heads(linear(n, p["q"]), dim), p["q_norm"], eps)
        k = rms_norm(heads(linear(n, p["k"]), dim), p["k_norm"], eps)
        new = Past(rope.rotate(k, cos, sin), heads(linear(n, p["v"]), dim))
        q = rope.rotate(q, cos, sin)
        a = attention(q, new, past, cache.lengths, scale=dim**-0.5)
        x = x + linear(a, p["o"])
        n = rms_norm(x, p["post_norm"], eps)
        h = silu(linear(n, p["gate"])) * linear(n, p["up"])
        return x + linear(h, p["down"]), new

    x, new = scan_layers(layer, x, params["layers"], cache)
    return rms_norm(x, params["norm"], eps), new


forward = forward_of(_run)
prefill = prefill_of(_run)


def decode_params(config: Qwen3Config, params: Params) -> Params:
    """Add what the decode program needs besides: `frequencies`, float32 [1, D]."""
    return {**params, "frequencies": twice(config.rope, config.head_dim)}


def decode_program(
    config: Qwen3Config,
    batch: int,
    max_length: int,
    *,
    logits: bool = False,
    scores: bool = False,
    **sizes: Any,
) -> Callable[[Params, KVCache, Array], tuple[Any, KVCache]]:
    """Write the decode step as a program, to be run by `mk.megakernel`.

    Args:
        config: The model.
        batch: Rows (B).
        max_length: Slots of the cache.
        logits: Whether to return all scores, float32 [B, V], instead of tokens.
        scores: Whether to return (tokens, their scores float32 [B]).
        sizes: Of tiles, and the machine that they are for, see `Step`.

    Returns:
        `f(decode_params, cache, tokens int32 [B]) -> (tokens int32 [B], cache)`; see
        `programs.py`.
    """
    c, eps = config, config.norm_eps

    def qwen3_decode(
        params: Params, cache: KVCache, tokens: Array
    ) -> tuple[Any, KVCache]:
        step = Step(c, batch, max_length, params["embed"].dtype, **sizes)
        x = step.embed(partial(sample.embed, scale=1.0), 1, params["embed"], tokens)
        table = step.tables(cache.lengths, params["frequencies"])

        def layer(carry: tuple[Array, KVCache], p: Params, i: Any) -> Any:
            x, cache = carry
            n, kv = (x, p["input_norm"]), c.num_kv_heads
            turned = partial(tasks.project_norm_rope, eps=eps)
            q = step.heads(turned, "q", c.num_heads, n, p["q"], (p["q_norm"], *table))
            k = step.heads(turned, "k", kv, n, p["k"], (p["k_norm"], *table))
            v = step.heads(partial(tasks.project, eps=eps), "v", kv, n, p["v"])
            a, cache = step.attend(q, k, v, cache, i, scale=c.head_dim**-0.5)
            add, hidden = tasks.residual, c.hidden_size
            x = step.by_rows(add, "o", hidden, (x, a), p["o"], tiled=1)
            gated, n = partial(tasks.gate_up, eps=eps), (x, p["post_norm"])
            inner = c.intermediate_size
            u = step.by_rows(gated, "gate_up", inner, n, p["gate"], p["up"])
            return step.by_rows(add, "down", hidden, (x, u), p["down"], tiled=1), cache

        x, cache = mk.scan(layer, (x, cache), params["layers"])
        end = x, params["norm"], head_of(params)
        return step.result(*end, unit_offset=False, logits=logits, scores=scores), cache

    return qwen3_decode
