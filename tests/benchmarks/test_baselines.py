"""The baseline computes what a plain forward computes, and lowers for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import baselines
from benchmarks.baselines import REFERENCE, VARIANTS, Variant
from benchmarks.shapes import LLAMA_3_1_8B, LLAMA_3_2_1B, QWEN3_8B, TINY

BATCH, CONTEXT, MAX_LENGTH, STEPS = 3, 37, 64, 8
QK_NORM = dataclasses.replace(TINY, qk_norm=True, tied=False, rope_scaling=None)


def run_loop(shape, variant):
    loop, (params, cache) = baselines.make_step_of(variant)(
        shape, BATCH, MAX_LENGTH, STEPS
    )
    token = jnp.arange(BATCH, dtype=jnp.int32) + 5
    return loop(params, cache, token, jnp.int32(CONTEXT))


def norm(x, gain, eps):
    return x / np.sqrt(np.mean(x**2) + eps) * gain


def rotate(head, position, frequencies):
    """RoPE of one head as a complex rotation of pairs (i, i + head_dim / 2)."""
    half = len(head) // 2
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([turned.real, turned.imag])


def plain_layer(shape, layer, x, keys, values, position):
    """One layer of one row, in float64, head by head; appends to keys and values."""
    size, group = shape.head_dim, shape.q_heads // shape.kv_heads
    frequencies = baselines.inverse_frequencies(shape).astype(np.float64)
    heads = layer.qkv @ norm(x, layer.input_norm, shape.rms_eps)
    heads = heads.reshape(-1, size)
    attended = []
    for kv in range(shape.kv_heads):
        key = heads[shape.q_heads + kv]
        if shape.qk_norm:
            key = norm(key, layer.k_norm, shape.rms_eps)
        keys[kv].append(rotate(key, position, frequencies))
        values[kv].append(heads[shape.q_heads + shape.kv_heads + kv])
    for head in range(shape.q_heads):
        query = heads[head]
        if shape.qk_norm:
            query = norm(query, layer.q_norm, shape.rms_eps)
        query = rotate(query, position, frequencies)
        scores = np.array(keys[head // group]) @ query / np.sqrt(size)
        weights = np.exp(scores - scores.max())
        attended.append(weights / weights.sum() @ np.array(values[head // group]))
    x = x + layer.output @ np.concatenate(attended)
    hidden = layer.gate_up @ norm(x, layer.mlp_norm, shape.rms_eps)
    gate, up = hidden[: shape.intermediate], hidden[shape.intermediate :]
    return x + layer.down @ (gate / (1 + np.exp(-gate)) * up)


def plain_decode(shape):
    """Tokens and scores [steps, batch] of the same inputs, one row after the other."""

    def wide(x):
        return np.asarray(x.astype(jnp.float32)).astype(np.float64)

    params = jax.tree.map(wide, baselines.init_params(shape))
    cache = jax.tree.map(wide, baselines.init_cache(shape, BATCH, MAX_LENGTH))
    head = params.embedding if params.lm_head is None else params.lm_head
    tokens = np.zeros((STEPS, BATCH), np.int32)
    scores = np.zeros((STEPS, BATCH))
    for row in range(BATCH):
        token = 5 + row
        past = [
            ([list(h[:CONTEXT]) for h in k[row]], [list(h[:CONTEXT]) for h in v[row]])
            for k, v in cache
        ]
        for step in range(STEPS):
            x = params.embedding[token]
            for layer, (keys, values) in zip(params.layers, past, strict=True):
                x = plain_layer(shape, layer, x, keys, values, CONTEXT + step)
            logits = head @ norm(x, params.final_norm, shape.rms_eps)
            token = int(np.argmax(logits))
            tokens[step, row], scores[step, row] = token, logits[token]
    return tokens, scores


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TINY, QK_NORM], ids=["llama", "qwen"])
@pytest.mark.parametrize("layout", ["bksd", "bskd"])
def test_f32_loop_equals_a_plain_decode(shape, layout):
    result = run_loop(shape, Variant(cache_layout=layout, dtype="float32"))
    tokens, scores = plain_decode(shape)
    np.testing.assert_array_equal(result.tokens, tokens)
    np.testing.assert_allclose(result.scores, scores, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["xla_bksd", "xla_bskd", pytest.param("xla_cudnn", marks=pytest.mark.gpu)],
)
def test_bf16_loop_is_near_the_plain_decode(name):
    shape = dataclasses.replace(TINY, head_dim=64)  # cuDNN takes no smaller one
    result = run_loop(shape, VARIANTS[name])
    _, scores = plain_decode(shape)
    # The first step: later ones may follow another token. bf16 keeps 8 bits.
    np.testing.assert_allclose(result.scores[0], scores[0], rtol=2e-2, atol=5e-3)


@pytest.mark.slow
def test_cache_is_donated_and_only_the_new_rows_change():
    loop, (params, cache) = baselines.make_step_of(VARIANTS["xla_bksd"])(
        TINY, BATCH, MAX_LENGTH, STEPS
    )
    before = [np.asarray(layer.k.astype(jnp.float32)) for layer in cache]
    token = jnp.arange(BATCH, dtype=jnp.int32)
    result = loop(params, cache, token, jnp.int32(CONTEXT))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    written = slice(CONTEXT, CONTEXT + STEPS)
    for old, layer in zip(before, result.cache, strict=True):
        new = np.array(layer.k.astype(jnp.float32))
        assert (new[:, :, written] != old[:, :, written]).any(axis=(0, 1, 3)).all()
        new[:, :, written] = old[:, :, written]
        np.testing.assert_array_equal(new, old)


def test_layouts_hold_the_same_values():
    first, second = (
        baselines.init_cache(TINY, BATCH, MAX_LENGTH, VARIANTS[name])
        for name in ("xla_bksd", "xla_bskd")
    )
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [VARIANTS["xla_bksd"], VARIANTS["xla_bskd"]])
def test_real_shape_lowers_for_cuda_as_one_loop(variant):
    args = jax.eval_shape(
        lambda: (
            baselines.init_params(LLAMA_3_2_1B),
            baselines.init_cache(LLAMA_3_2_1B, 8, 2048, variant),
            jnp.zeros((8,), jnp.int32),
            jnp.int32(0),
        )
    )
    loop = baselines.make_loop(LLAMA_3_2_1B, variant)
    text = loop.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") == 1


@pytest.mark.parametrize(
    ("shape", "index", "expected"),
    [
        (LLAMA_3_2_1B, 15, 1.2905479e-3),
        (LLAMA_3_2_1B, 16, 4.2955680e-4),
        (LLAMA_3_2_1B, 17, 9.7082878e-5),
        (LLAMA_3_2_1B, 31, 9.4183067e-8),
        (LLAMA_3_1_8B, 29, 2.1665708e-3),
        (LLAMA_3_1_8B, 34, 1.7850781e-4),
        (LLAMA_3_1_8B, 63, 3.0689260e-7),
    ],
)
def test_llama3_frequencies(shape, index, expected):
    """Values that Hugging Face's implementation gives for the published configs."""
    found = baselines.inverse_frequencies(shape)[index]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_best_takes_the_lowest_index_on_ties_and_shows_nan():
    logits = jnp.array([[-3.0, -1.0, -1.0], [-jnp.inf, -5.0, -5.5], [0.0, jnp.nan, 9]])
    index, value = baselines._best(logits)
    np.testing.assert_array_equal(index, [1, 1, 1])
    np.testing.assert_array_equal(value, [-1.0, -5.0, jnp.nan])


def test_reference_is_f32_and_cudnn_needs_its_layout():
    assert REFERENCE.dtype == "float32"
    with pytest.raises(ValueError, match="bskd"):
        Variant(attention="cudnn")


def test_bytes_of_known_models():
    """2.47 GB of weights and 32768 bytes a position: Llama-3.2-1B; Qwen3-8B 15.1 GB."""
    assert LLAMA_3_2_1B.weight_bytes == 2_471_628_800
    assert LLAMA_3_2_1B.kv_bytes_per_token == 32768
    assert LLAMA_3_2_1B.step_bytes(2, 1024, 1) == 2_471_628_800 + 2 * 1024 * 32768
    assert LLAMA_3_1_8B.kv_bytes_per_token == 131072
    assert QWEN3_8B.kv_bytes_per_token == 147456
    assert QWEN3_8B.weight_bytes == pytest.approx(15.1e9, rel=5e-3)
