"""Gemma 3 (text) in plain JAX.

What differs from Llama: norms multiply by 1 + gain and stand on both sides of each
branch, queries and keys are normed per head, the embedding is scaled, the MLP has gelu,
and most layers see a sliding window, with a RoPE of their own. The forward pass is the
oracle of the megakernel and its prefill. `params` is the tree of `leaves(config)`; ids
are int32 [B, T], padded on the right, `lengths` int32 [B] the numbers of real ids.
Arithmetic is in the dtype of the parameters.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models import rope
from models.cache import KVCache, append, check_room
from models.gemma3_config import Gemma3Config
from models.params import Leaf, Params, decoder_leaves
from models.reference import (
    Past,
    attention,
    embed,
    heads,
    jit_model,
    last_real,
    linear,
    logits,
    no_cache,
    rms_normalize,
    scan_layers,
)

__all__ = [
    "Gemma3Config",
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


@jit_model
def forward(
    config: Gemma3Config, params: Params, ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Score every position.

    Returns:
        float32 [B, T, V]; row t is what follows token t. Padding positions hold finite
        numbers without meaning.
    """
    cache = no_cache(config, ids.shape[0], params["embed"].dtype)
    x, _ = _run(config, params, cache, ids, lengths)
    return logits(x, _head(params))


def prefill(
    config: Gemma3Config,
    params: Params,
    cache: KVCache,
    ids: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Read tokens behind those that the cache holds, all rows at once.

    A long prompt may come in pieces, and T = 1 is a decode step. To reuse the buffers
    of the cache: `jax.jit(prefill, static_argnums=0, donate_argnums=2)`.

    Returns:
        Logits after each row's last token, float32 [B, V] (no meaning where the length
        is 0), and the longer cache.

    Raises:
        ValueError: The cache has too few slots. Under `jax.jit` it cannot be raised;
            see `KVCache.lengths`.
    """
    check_room(cache, lengths)
    return _prefill(config, params, cache, ids, lengths)


@jit_model
def _prefill(
    config: Gemma3Config,
    params: Params,
    cache: KVCache,
    ids: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, KVCache]:
    x, new = _run(config, params, cache, ids, lengths)
    cache = append(cache, new.k, new.v, lengths)
    return logits(last_real(x, lengths), _head(params)), cache


def _head(params: Params) -> jax.Array:
    return params.get("head", params["embed"])


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
