"""Plain-JAX pieces that the families share: matrices, attention, the scan over layers.

Rounding follows Hugging Face's bfloat16 run: every matrix product accumulates in
float32 and is rounded to the activation dtype, softmax is float32 and its result
rounded, residual sums are in the activation dtype. Two roundings of eager attention are
left out, both of which only lose accuracy: scores and logits stay in float32.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from models.cache import KVCache, append, check_room
from models.config import ModelConfig
from models.params import Params

type Layer = Callable[[jax.Array, Params, "Past", Any], tuple[jax.Array, "Past"]]
# (config, params, cache, ids, lengths) -> final hidden states [B, T, h], normed, and
# new keys and values: what a family writes itself.
type Run = Callable[
    [Any, Params, KVCache, jax.Array, jax.Array], tuple[jax.Array, "Past"]
]
type Forward = Callable[[Any, Params, jax.Array, jax.Array], jax.Array]
type Prefill = Callable[
    [Any, Params, KVCache, jax.Array, jax.Array], tuple[jax.Array, KVCache]
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Past:
    """Keys and values of one layer, or of all with a leading axis.

    Attributes:
        k: Cached: [B, KV, S, D]. New tokens: [B, T, KV, D].
        v: Like `k`.
    """

    k: jax.Array
    v: jax.Array


def jit_model[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`jax.jit` with the first argument, the configuration, as a static one."""
    return cast("Callable[P, R]", jax.jit(function, static_argnums=0))


def _precision(dtype: Any) -> jax.lax.Precision | None:
    # Without this a GPU computes float32 products in TF32, 10 bits of mantissa.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Contract in float32 and return float32."""
    return jnp.einsum(
        equation,
        a,
        b,
        precision=_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Equivalent to `x @ weight.T`: [..., in], [out, in] -> [..., out]."""
    return _dot("...i,oi->...o", x, weight).astype(x.dtype)


def logits(x: jax.Array, head: jax.Array) -> jax.Array:
    """Score the vocabulary: [..., h], [V, h] -> float32 [..., V], not rounded."""
    return _dot("...i,oi->...o", x, head)


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square of the last axis; returns float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Normalise in float32, round, then multiply by the gain (Llama's order)."""
    return rms_normalize(x, eps).astype(x.dtype) * gain


def silu(x: jax.Array) -> jax.Array:
    """In float32, then rounded."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Split features into heads: [B, T, N * D] -> [B, T, N, D]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


def embed(table: jax.Array, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Look up ids [B, T]; padding may hold anything, -1 included -> [B, T, h].

    A real id beyond the vocabulary gives NaN, not another token.
    """
    real = jnp.arange(ids.shape[1]) < lengths[:, None]
    return table.at[jnp.where(real, ids, 0)].get(mode="fill", fill_value=jnp.nan)


def attention(
    q: jax.Array,
    new: Past,
    past: Past,
    start: jax.Array,
    *,
    scale: float,
    window: jax.Array | None = None,
) -> jax.Array:
    """Attend causally over cached and new tokens.

    Args:
        q: [B, T, H, D], after RoPE. Head h reads key-value head h // (H / KV).
        new: Keys and values of the same T tokens, [B, T, KV, D].
        past: Cached ones, [B, KV, S, D]; slots from `start` on are ignored, NaN or not.
        start: int32 [B], tokens already cached; query t is token `start + t`.
        scale: Multiplies the scores.
        window: int32 [], how many tokens a query sees, itself included; None for all.

    Returns:
        [B, T, H * D].
    """
    batch, count, num_heads, head_dim = q.shape
    kv_heads, slots = past.k.shape[1:3]
    q = q.reshape(batch, count, kv_heads, num_heads // kv_heads, head_dim)
    scores = jnp.concatenate(
        [
            _dot("btkgd,bksd->bkgts", q, past.k.astype(q.dtype)),
            _dot("btkgd,bskd->bkgts", q, new.k),
        ],
        axis=-1,
    )
    step, slot = jnp.arange(count), jnp.arange(slots)
    key_position = jnp.concatenate(
        [jnp.tile(slot, (batch, 1)), start[:, None] + step], axis=1
    )[:, None]
    query_position = (start[:, None] + step)[..., None]
    used = slot < start[:, None]
    exists = jnp.concatenate([used, jnp.ones((batch, count), bool)], axis=1)
    seen = exists[:, None] & (key_position <= query_position)
    if window is not None:
        seen &= key_position > query_position - window
    # A query always sees itself, so no row is empty and -inf cannot give NaN.
    scores = jnp.where(seen[:, None, None], scores * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    # A weight of zero does not hide a NaN: unused values have to go too.
    past_v = jnp.where(used[:, None, :, None], past.v.astype(q.dtype), 0)
    # Heads last, as is wanted, XLA's CPU backend cannot do in bfloat16 (jax 0.11.2).
    out = _dot("bkgts,bksd->bkgtd", weights[..., :slots], past_v)
    out += _dot("bkgts,bskd->bkgtd", weights[..., slots:], new.v)
    out = out.astype(q.dtype).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, count, num_heads * head_dim)


def scan_layers(
    layer: Layer, x: jax.Array, params: Params, cache: KVCache, static: Any = None
) -> tuple[jax.Array, Past]:
    """Run stacked layers one after the other.

    Args:
        layer: `(x, params, past, static) -> (x, new keys and values)` of one layer.
        x: [B, T, h].
        params: The stacked layers, [L, ...] each.
        cache: The tokens so far.
        static: Further values per layer, [L, ...] each.

    Returns:
        x after the last layer and all new keys and values, [L, B, T, KV, D].
    """

    def body(x: jax.Array, xs: tuple[Params, Past, Any]) -> tuple[jax.Array, Past]:
        return layer(x, *xs)

    return jax.lax.scan(body, x, (params, Past(cache.k, cache.v), static))


def no_cache(config: ModelConfig, batch: int, dtype: Any) -> KVCache:
    """A cache without slots: only the new tokens are attended to."""
    shape = (config.num_layers, batch, config.num_kv_heads, 0, config.head_dim)
    empty = jnp.zeros(shape, dtype)
    return KVCache(empty, empty, jnp.zeros(batch, jnp.int32))


def last_real(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Take each row's last real position: [B, T, h], [B] -> [B, h]."""
    index = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def forward_of(run: Run) -> Forward:
    """Make the function that scores every position, from what a family writes."""

    @jit_model
    def forward(
        config: Any, params: Params, ids: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Score every position.

        Returns:
            float32 [B, T, V]; row t is what follows token t. Padding positions hold
            finite numbers without meaning.
        """
        cache = no_cache(config, ids.shape[0], params["embed"].dtype)
        x, _ = run(config, params, cache, ids, lengths)
        return logits(x, _head(params))

    return forward


def prefill_of(run: Run) -> Prefill:
    """Make the function that reads tokens into a cache, from what a family writes."""

    @jit_model
    def compiled(
        config: Any,
        params: Params,
        cache: KVCache,
        ids: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        x, new = run(config, params, cache, ids, lengths)
        cache = append(cache, new.k, new.v, lengths)
        return logits(last_real(x, lengths), _head(params)), cache

    def prefill(
        config: Any,
        params: Params,
        cache: KVCache,
        ids: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Read tokens behind those that the cache holds, all rows at once.

        A long prompt may come in pieces, and T = 1 is a decode step. To reuse the
        buffers of the cache: `jax.jit(prefill, static_argnums=0, donate_argnums=2)`.

        Returns:
            Logits after each row's last token, float32 [B, V] (no meaning where the
            length is 0), and the longer cache.

        Raises:
            ValueError: The cache has too few slots. Under `jax.jit` it cannot be
                raised; see `KVCache.lengths`.
        """
        check_room(cache, lengths)
        return compiled(config, params, cache, ids, lengths)

    return prefill


def _head(params: Params) -> jax.Array:
    return params.get("head", params["embed"])
