"""The best plain XLA decode found: what a megakernel has to beat.

A greedy decode of the Llama family as a JAX user would write it, with the choices
that were measured to be fastest (H200, JAX 0.11.2, 2026-11-29; Llama-3.2-1B, batch 1,
context 1024 of 2048):

- the loop of 64 tokens is one jitted `lax.fori_loop`: a call from the host costs 0.7
  to 0.9 ms;
- weights are stored [out, in]: 1016 us a token, against 1415 us for [in, out];
- layers are unrolled: 1016 us, against 1985 us for `lax.scan` over stacked layers;
- q, k, v are one matrix and so are gate and up; the cache is one array per layer and
  is donated;
- cuDNN attention helps at batch 8 and 16, so it is one of the variants.

Which cache layout and attention is fastest depends on the batch: `VARIANTS` has all,
and the benchmark takes the fastest of them as *the* baseline of a case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.shapes import DecodeShape

STEPS = 64
WEIGHT_STD = 0.02


class LayerParams(NamedTuple):
    """Weights of one layer, matrices as [out, in]."""

    input_norm: jax.Array  # [hidden]
    qkv: jax.Array  # [(q_heads + 2 kv_heads) head_dim, hidden]
    output: jax.Array  # [hidden, q_heads head_dim]
    mlp_norm: jax.Array  # [hidden]
    gate_up: jax.Array  # [2 intermediate, hidden]
    down: jax.Array  # [hidden, intermediate]
    q_norm: jax.Array | None  # [head_dim]
    k_norm: jax.Array | None  # [head_dim]


class Params(NamedTuple):
    layers: tuple[LayerParams, ...]
    embedding: jax.Array  # [vocab, hidden]
    final_norm: jax.Array  # [hidden]
    lm_head: jax.Array | None  # [vocab, hidden]; None where tied


class LayerCache(NamedTuple):
    """Each [batch, kv_heads, max_length, head_dim] (`bksd`), or `bskd`."""

    k: jax.Array
    v: jax.Array


Cache = tuple[LayerCache, ...]


class LoopResult(NamedTuple):
    """What one run of a decode loop returns.

    cache is the donated cache, updated, in the form that the loop takes it. tokens is
    int32[steps, batch]. scores is f32[steps, batch], the logit of each chosen token, or
    None where an implementation has none to give: its error is then not known.
    """

    cache: Any
    tokens: jax.Array
    scores: jax.Array | None


class DecodeLoop(Protocol):
    """`steps` greedy tokens for every row in one call; consumes (donates) the cache.

    token is int32[batch], the last token of each row; position is an int32 scalar, the
    number of positions already cached, the same for all rows.
    """

    def __call__(
        self, params: Any, cache: Any, token: jax.Array, position: jax.Array
    ) -> LoopResult: ...


class MakeStep(Protocol):
    """Makes (loop, (params, cache)) for one case: what an implementation provides.

    The values of the parameters and of the cache must be those of `init_params` and
    `init_cache` with their default seeds, in any layout: results are compared.
    """

    def __call__(
        self, shape: DecodeShape, batch: int, max_length: int, steps: int = STEPS
    ) -> tuple[DecodeLoop, tuple[Any, Any]]: ...


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to write the step.

    Attributes:
        cache_layout: order of the axes of a layer's cache, see `LayerCache`.
        attention: `einsum` (f32 softmax under a mask over the whole cache) or `cudnn`.
        dtype: of activations; f32 is the reference and computes in full precision.
    """

    cache_layout: Literal["bksd", "bskd"] = "bksd"
    attention: Literal["einsum", "cudnn"] = "einsum"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.attention == "cudnn" and self.cache_layout != "bskd":
            raise ValueError(f"cudnn attention reads bskd, not {self.cache_layout=}")


VARIANTS = {
    "xla_bksd": Variant(),
    "xla_bskd": Variant(cache_layout="bskd"),
    "xla_cudnn": Variant(cache_layout="bskd", attention="cudnn"),
}
REFERENCE = Variant(dtype="float32")


def inverse_frequencies(shape: DecodeShape) -> np.ndarray:
    """RoPE inverse frequencies, float32[head_dim / 2], with llama3 scaling."""
    exponent = np.arange(0, shape.head_dim, 2) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponent
    scaling = shape.rope_scaling
    if scaling is None:
        return plain.astype(np.float32)
    wavelength = 2 * np.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_positions / wavelength - low) / (high - low)
    # Long waves are slowed by the factor, short ones kept, those between blended.
    smooth = np.clip(smooth, 0.0, 1.0)
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    return blended.astype(np.float32)


def _normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)


_random = jax.jit(_normal, static_argnums=(1, 2))


def init_params(shape: DecodeShape, seed: int = 0) -> Params:
    """Random bf16 parameters: normal, std 0.02; gains of norms are 1 plus that."""
    keys = iter(jax.random.split(jax.random.key(seed), 8 * shape.layers + 3))

    def matrix(rows: int, columns: int) -> jax.Array:
        return _random(next(keys), (rows, columns), WEIGHT_STD)

    def gain(size: int) -> jax.Array:
        return 1 + _random(next(keys), (size,), WEIGHT_STD)

    layers = tuple(
        LayerParams(
            input_norm=gain(shape.hidden),
            qkv=matrix(shape.qkv_rows, shape.hidden),
            output=matrix(shape.hidden, shape.q_heads * shape.head_dim),
            mlp_norm=gain(shape.hidden),
            gate_up=matrix(2 * shape.intermediate, shape.hidden),
            down=matrix(shape.hidden, shape.intermediate),
            q_norm=gain(shape.head_dim) if shape.qk_norm else None,
            k_norm=gain(shape.head_dim) if shape.qk_norm else None,
        )
        for _ in range(shape.layers)
    )
    embedding, final_norm = matrix(shape.vocab, shape.hidden), gain(shape.hidden)
    lm_head = None if shape.tied else matrix(shape.vocab, shape.hidden)
    return Params(layers, embedding, final_norm, lm_head)


def init_cache(
    shape: DecodeShape,
    batch: int,
    max_length: int,
    variant: Variant = VARIANTS["xla_bksd"],
    seed: int = 1,
) -> Cache:
    """Random standard normal cache: the same values whatever the layout and dtype."""
    size = (batch, shape.kv_heads, max_length, shape.head_dim)
    keys = iter(jax.random.split(jax.random.key(seed), 2 * shape.layers))

    def rows() -> jax.Array:
        values = _random(next(keys), size, 1.0).astype(variant.dtype)
        return values if variant.cache_layout == "bksd" else values.swapaxes(1, 2)

    return tuple(LayerCache(k=rows(), v=rows()) for _ in range(shape.layers))


def _rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * gain.astype(x.dtype)


def _rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(index, value) of the largest logit of each row: lowest index on ties.

    One reduction of pairs, which is what `jnp.argmax` lowers to: the value is free. A
    NaN wins and so shows in the value.
    """

    def pick(a, b):
        (index_a, value_a), (index_b, value_b) = a, b
        tie = (value_a == value_b) & (index_a < index_b)
        first = (value_a > value_b) | tie | jnp.isnan(value_a)
        return (
            jnp.where(first, index_a, index_b),
            jnp.where(first, value_a, value_b),
        )

    indices = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return lax.reduce(
        (indices, logits), (np.int32(2**31 - 1), np.float32(-np.inf)), pick, (1,)
    )


def _linear(x: jax.Array, weight: jax.Array, **options) -> jax.Array:
    """x @ weight.T with the weight as [out, in]."""
    full = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("bi,oi->bo", x, weight.astype(x.dtype), precision=full, **options)


def _einsum_attention(
    q: jax.Array, cache: LayerCache, position: jax.Array, variant: Variant
) -> jax.Array:
    """q: [batch, q_heads, head_dim] -> the same; attends positions 0 .. position."""
    batch, q_heads, head_dim = q.shape
    keys = "bksd" if variant.cache_layout == "bksd" else "bskd"
    kv_heads, length = (cache.k.shape[keys.index(axis)] for axis in "ks")
    grouped = q.reshape(batch, kv_heads, q_heads // kv_heads, head_dim)
    full = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        f"bkgd,{keys}->bkgs",
        grouped,
        cache.k,
        precision=full,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(
        jnp.arange(length) <= position, scores * head_dim**-0.5, -jnp.inf
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum(f"bkgs,{keys}->bkgd", weights, cache.v, precision=full)
    return out.reshape(q.shape)


def _cudnn_attention(q: jax.Array, cache: LayerCache, position: jax.Array) -> jax.Array:
    batch = q.shape[0]
    return jax.nn.dot_product_attention(
        q[:, None],
        cache.k,
        cache.v,
        query_seq_lengths=jnp.ones((batch,), jnp.int32),
        key_value_seq_lengths=jnp.full((batch,), position + 1, jnp.int32),
        implementation="cudnn",
    )[:, 0]


def _append(
    cache: LayerCache, k: jax.Array, v: jax.Array, position: jax.Array, layout: str
) -> LayerCache:
    """Write k, v: [batch, kv_heads, head_dim] at `position`."""
    axis = layout.index("s")
    start = tuple(position if i == axis else 0 for i in range(4))
    return LayerCache(
        k=lax.dynamic_update_slice(cache.k, jnp.expand_dims(k, axis), start),
        v=lax.dynamic_update_slice(cache.v, jnp.expand_dims(v, axis), start),
    )


def make_logits_step(
    shape: DecodeShape, variant: Variant
) -> Callable[[Params, Cache, jax.Array, jax.Array], tuple[Cache, jax.Array]]:
    """One step: (params, cache, token, position) -> (cache, f32 logits)."""
    frequencies = inverse_frequencies(shape)
    q_heads, kv_heads = shape.q_heads, shape.kv_heads

    def attention_block(x, layer, cache, position, cos, sin):
        batch = x.shape[0]
        qkv = _linear(_rms_norm(x, layer.input_norm, shape.rms_eps), layer.qkv)
        qkv = qkv.reshape(batch, q_heads + 2 * kv_heads, shape.head_dim)
        q, k, v = jnp.split(qkv, (q_heads, q_heads + kv_heads), axis=1)
        if shape.qk_norm:
            q = _rms_norm(q, layer.q_norm, shape.rms_eps)
            k = _rms_norm(k, layer.k_norm, shape.rms_eps)
        q, k = _rope(q, cos, sin), _rope(k, cos, sin)
        cache = _append(cache, k, v, position, variant.cache_layout)
        if variant.attention == "cudnn":
            out = _cudnn_attention(q, cache, position)
        else:
            out = _einsum_attention(q, cache, position, variant)
        return _linear(out.reshape(batch, -1), layer.output), cache

    def mlp_block(x, layer):
        normed = _rms_norm(x, layer.mlp_norm, shape.rms_eps)
        gate, up = jnp.split(_linear(normed, layer.gate_up), 2, axis=-1)
        return _linear(jax.nn.silu(gate) * up, layer.down)

    def step(params, cache, token, position):
        angles = position.astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        x = params.embedding[token].astype(variant.dtype)
        new_cache = []
        for layer, old in zip(params.layers, cache, strict=True):
            attended, new = attention_block(x, layer, old, position, cos, sin)
            x = x + attended
            x = x + mlp_block(x, layer)
            new_cache.append(new)
        head = params.embedding if params.lm_head is None else params.lm_head
        normed = _rms_norm(x, params.final_norm, shape.rms_eps)
        logits = _linear(normed, head, preferred_element_type=jnp.float32)
        return tuple(new_cache), logits

    return step


def make_decode_step(
    shape: DecodeShape, variant: Variant
) -> Callable[
    [Params, Cache, jax.Array, jax.Array], tuple[Cache, jax.Array, jax.Array]
]:
    """One greedy step: (params, cache, token, position) -> (cache, token, score)."""
    logits_of = make_logits_step(shape, variant)

    def step(params, cache, token, position):
        cache, logits = logits_of(params, cache, token, position)
        return (cache, *_best(logits))

    return step


def make_loop(shape: DecodeShape, variant: Variant, steps: int = STEPS) -> DecodeLoop:
    """`steps` greedy steps as one jitted function; the cache is donated."""
    step = make_decode_step(shape, variant)

    def decode_loop(params, cache, token, position):
        batch = token.shape[0]

        def body(i, state):
            cache, token, tokens, scores = state
            cache, token, score = step(params, cache, token, position + i)
            tokens = lax.dynamic_update_slice(tokens, token[None], (i, 0))
            scores = lax.dynamic_update_slice(scores, score[None], (i, 0))
            return cache, token, tokens, scores

        tokens = jnp.zeros((steps, batch), jnp.int32)
        scores = jnp.zeros((steps, batch), jnp.float32)
        cache, _, tokens, scores = lax.fori_loop(
            0, steps, body, (cache, token, tokens, scores)
        )
        return LoopResult(cache, tokens, scores)

    return jax.jit(decode_loop, donate_argnames="cache")


def make_judge(shape: DecodeShape, variant: Variant, steps: int = STEPS) -> Any:
    """A greedy loop that can be made to follow the tokens of another one.

    jit of (params, cache, token, position, follow int32[steps, batch]) -> (tokens,
    scores, gaps), all [steps, batch]. Where `follow` is negative the loop goes its own
    way; elsewhere it takes that token, and the gap is how far the token's logit is
    below the largest.
    """
    logits_of = make_logits_step(shape, variant)

    def judge(params, cache, token, position, follow):
        def body(state, forced):
            i, cache, token = state
            cache, logits = logits_of(params, cache, token, position + i)
            best, top = _best(logits)
            token = jnp.where(forced < 0, best, forced)
            score = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
            return (i + 1, cache, token), (token, score, top - score)

        return lax.scan(body, (jnp.int32(0), cache, token), follow)[1]

    return jax.jit(judge)


def make_step_of(variant: Variant) -> MakeStep:
    """The variant as an implementation for the benchmark."""

    def make_step(
        shape: DecodeShape, batch: int, max_length: int, steps: int = STEPS
    ) -> tuple[DecodeLoop, tuple[Any, Any]]:
        params = init_params(shape)
        cache = init_cache(shape, batch, max_length, variant)
        return make_loop(shape, variant, steps), (params, cache)

    return make_step
