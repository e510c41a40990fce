"""Gemma 3 (text): forward pass in plain JAX, and decode step as a program.

What differs from Llama: norms multiply by 1 + gain and stand on both sides of each
branch, queries and keys are normed per head, the embedding is scaled, the MLP has gelu,
and most layers see a sliding window, with a RoPE of their own. The forward pass is the
oracle of the program and its prefill. `params` is the tree of `leaves(config)`; ids
are int32 [B, T], padded on the right, `lengths` int32 [B] the numbers of real ids.
Arithmetic is in the dtype of the parameters.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from models import rope
from models.cache import KVCache
from models.gemma3_config import Gemma3Config
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
    rms_normalize,
    scan_layers,
)
from models.tasks import sample
from models.tasks import sandwich as tasks
from models.tasks.linear import product

__all__ = [
    "Gemma3Config",
    "decode_params",
    "decode_program",
    "forward",
    "layer_windows",
    "leaves",
    "prefill",
    "rope_frequencies",
]

# Window of a global layer: more than any context, and no overflow in `position -
# window`.
NO_WINDOW = 2**30


def leaves(config: Gemma3Config) -> tuple[Leaf, ...]:
    """List the parameters."""
    norms = {
        "input_norm": "input_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        # Norms the output of attention, where Llama's key of this name norms the
        # input of the MLP.
        "post_norm": "post_attention_layernorm",
        "pre_ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    }
    return decoder_leaves(config, norms, gain_mean=0.0)


def rope_frequencies(config: Gemma3Config, is_global: bool) -> rope.Frequencies:
    """Inverse frequencies of one kind of layer, float32 [D / 2]."""
    kind = config.rope if is_global else config.local_rope
    return rope.frequencies(kind, config.head_dim)


def layer_windows(config: Gemma3Config) -> tuple[int, ...]:
    """Tokens that each layer sees, the current one included; `NO_WINDOW` for all."""
    return tuple(NO_WINDOW if g else config.window for g in config.layer_is_global)


def _norm(config: Gemma3Config, x: jax.Array, gain: jax.Array) -> jax.Array:
    """Normalise and multiply by 1 + gain, all in float32, then round."""
    normed = rms_normalize(x, config.norm_eps)
    return (normed * (1.0 + gain.astype(jnp.float32))).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def _run(
    config: Gemma3Config,
    params: Params,
    cache: KVCache,
    ids: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, Past]:
    """Final hidden states [B, T, h], normed, and new keys and values."""
    x = embed(params["embed"], ids, lengths)
    # The factor itself is rounded to the activation dtype: 25.25 for sqrt(640).
    x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
    positions = cache.lengths[:, None] + jnp.arange(ids.shape[1])
    is_global = np.array(config.layer_is_global)
    both = np.stack([rope_frequencies(config, g) for g in (False, True)])
    static = (both[is_global.astype(int)], np.array(layer_windows(config), np.int32))
    norm = partial(_norm, config)

    def layer(
        x: jax.Array, p: Params, past: Past, static: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, Past]:
        inverse, window = static
        cos, sin = rope.tables(positions, inverse, x.dtype)
        n = norm(x, p["input_norm"])
        q = norm(heads(linear(n, p["q"]), config.head_dim), p["q_norm"])
        k = norm(heads(linear(n, p["k"]), config.head_dim), p["k_norm"])
        v = heads(linear(n, p["v"]), config.head_dim)
        new = Past(rope.rotate(k, cos, sin), v)
        a = attention(
            rope.rotate(q, cos, sin),
            new,
            past,
            cache.lengths,
            scale=config.query_scalar**-0.5,
            window=window,
        )
        x = x + norm(linear(a, p["o"]), p["post_norm"])
        n = norm(x, p["pre_ffn_norm"])
        h = _gelu(linear(n, p["gate"])) * linear(n, p["up"])
        return x + norm(linear(h, p["down"]), p["post_ffn_norm"]), new

    x, new = scan_layers(layer, x, params["layers"], cache, static)
    return norm(x, params["norm"]), new


forward = forward_of(_run)
prefill = prefill_of(_run)


def decode_params(config: Gemma3Config, params: Params) -> Params:
    """Add what the decode program needs besides.

    `frequencies` is a dictionary of `local` and `global`, float32 [1, D] each.
    """
    kinds = {"local": config.local_rope, "global": config.rope}
    made = {name: twice(kind, config.head_dim) for name, kind in kinds.items()}
    return {**params, "frequencies": made}


def decode_program(
    config: Gemma3Config,
    batch: int,
    max_length: int,
    *,
    logits: bool = False,
    scores: bool = False,
    **sizes: Any,
) -> Callable[[Params, KVCache, Array], tuple[Any, KVCache]]:
    """Write the decode step as a program, to be run by `mk.megakernel`.

    A layer passes on x and y, where x + norm(y) is the residual stream: y is the output
    of its MLP, not yet normed. See `tasks/sandwich.py` for why.

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
    c = config
    eps = {"eps": c.norm_eps}
    is_global = list(c.layer_is_global)

    def gemma3_decode(
        params: Params, cache: KVCache, tokens: Array
    ) -> tuple[Any, KVCache]:
        step = Step(c, batch, max_length, params["embed"].dtype, **sizes)
        embed = partial(sample.embed_branch, scale=c.hidden_size**0.5)
        x, y = step.embed(embed, 2, params["embed"], tokens)
        # A program has no use for a table that no layer reads.
        kinds = {True: "global", False: "local"}
        frequencies = {kind: params["frequencies"][kinds[kind]] for kind in is_global}
        tables = {k: step.tables(cache.lengths, f) for k, f in frequencies.items()}
        y_gains = params["layers"]["post_ffn_norm"]

        def layer(
            carry: tuple[Array, Array, KVCache], p: Params, i: Any, is_global: bool
        ) -> tuple[Array, Array, KVCache]:
            x, y, cache = carry
            # y is the previous layer's. Before the first layer it is zero.
            s = (x, y, y_gains[mk.maximum(i - 1, 0)])
            n, table = (*s, p["input_norm"]), tables[is_global]
            turned, kv = partial(tasks.project_norm_rope, **eps), c.num_kv_heads
            q = step.heads(turned, "q", c.num_heads, n, p["q"], (p["q_norm"], *table))
            k = step.heads(turned, "k", kv, n, p["k"], (p["k_norm"], *table))
            v = step.heads(partial(tasks.project, **eps), "v", kv, n, p["v"])
            window = None if is_global else c.window
            scale = c.query_scalar**-0.5
            a, cache = step.attend(q, k, v, cache, i, scale=scale, window=window)
            x = step.add_branch(*s)
            y = step.by_rows(product, "o", c.hidden_size, (a,), p["o"])
            s = (x, y, p["post_norm"])
            n, gated = (*s, p["pre_ffn_norm"]), partial(tasks.gate_up, **eps)
            inner = c.intermediate_size
            u = step.by_rows(
                gated, "gate_up", inner, n, p["gate"], p["up"], normed=True
            )
            x = step.add_branch(*s)
            y = step.by_rows(product, "down", c.hidden_size, (u,), p["down"])
            return x, y, cache

        carry = (x, y, cache)
        x, y, cache = mk.scan(layer, carry, params["layers"], static=is_global)
        x = step.add_branch(x, y, y_gains[c.num_layers - 1])
        end = x, params["norm"], head_of(params)
        return step.result(*end, unit_offset=True, logits=logits, scores=scores), cache

    return gemma3_decode
