"""Decoding on top of the programs: full caches, rows that rest, loops under jit."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache, init_cache
from models.config import ModelConfig
from models.decode import (
    DecodeStep,
    decode_params,
    pad,
    prefill,
    teacher_forced,
)
from models.params import Params
from models.registry import random_params
from models.weights import load
from tests.tiny_llama import TINY, example

FOLDER = Path(__file__).parents[1] / "fixtures"
NAMES = ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16", "qwen3_untied"]
IMPLEMENTATIONS = ["xla", pytest.param("simulate", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def model() -> tuple[ModelConfig, Params]:
    config, params = load(FOLDER / "gemma3_window16", "float32")
    return config, decode_params(config, params)


def bits(cache: KVCache) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(cache)]


def nearly_full(config: ModelConfig, slots: int, lengths: list[int]) -> KVCache:
    cache = init_cache(config, len(lengths), slots, jnp.float32)
    return replace(cache, k=cache.k + 2, lengths=jnp.array(lengths, jnp.int32))


# --------------------------------------------------------------------- full caches


def test_a_full_cache_is_an_error_before_anything_is_lost(
    model: tuple[ModelConfig, Params],
) -> None:
    config, params = model
    step = DecodeStep(config, 2, 8, implementation="xla")
    cache = nearly_full(config, 8, [3, 8])
    before = bits(cache)
    with pytest.raises(ValueError, match=r"cache is full: rows \[1\] would hold \[9\]"):
        step(params, cache, jnp.array([1, 2]))
    for a, b in zip(before, bits(cache), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_under_jit_a_full_row_is_flagged_and_keeps_its_slots(
    model: tuple[ModelConfig, Params],
) -> None:
    config, params = model
    step = DecodeStep(config, 2, 8, implementation="xla")
    before = bits(nearly_full(config, 8, [3, 8]))
    cache = nearly_full(config, 8, [3, 8])
    _, cache = jax.jit(step)(params, cache, jnp.array([1, 2]))
    k, v, lengths = bits(cache)
    assert lengths.tolist() == [4, 9]
    np.testing.assert_array_equal(k[:, 1], before[0][:, 1])
    np.testing.assert_array_equal(v[:, 1], before[1][:, 1])
    assert (k[:, 0, :, 3] != before[0][:, 0, :, 3]).any()
    full = nearly_full(config, 8, [3, 8])
    assert int(step.kernel.status(params, full, jnp.array([1, 2]))) > 0


# ------------------------------------------------------------------- under jax.jit


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_loop_under_jit_gives_the_same_tokens_and_traces_once(name: str) -> None:
    config, params = load(FOLDER / name, "float32")
    params = decode_params(config, params)
    step = DecodeStep(config, 2, 64, implementation="xla")
    tokens = jnp.array([3, 4], jnp.int32)

    @jax.jit
    def loop(params: Params, cache: KVCache) -> tuple[jax.Array, KVCache]:
        def body(carry: tuple, _: None) -> tuple:
            out = step(params, carry[1], carry[0])
            return out, out[0]

        carry = (tokens, cache)
        (_, cache), found = jax.lax.scan(body, carry, length=20)
        return found, cache

    found, end = loop(params, init_cache(config, 2, 64, jnp.float32))
    cache, out = init_cache(config, 2, 64, jnp.float32), tokens
    for t in range(20):
        out, cache = step(params, cache, out)
        np.testing.assert_array_equal(out, found[t])
    assert step.kernel.traces == 1
    assert end.lengths.tolist() == cache.lengths.tolist() == [20, 20]


# ------------------------------------------------------------------- arguments


@pytest.mark.slow
def test_prefill_then_decode_equals_decode_alone(
    model: tuple[ModelConfig, Params],
) -> None:
    config, params = model
    prompts = [[3, 4, 5, 9, 11], [9, 8]]
    ids, lengths = pad(config, prompts)
    cache = init_cache(config, 2, 64, jnp.float32)
    scores, _ = prefill(config, params, cache, jnp.asarray(ids), jnp.asarray(lengths))
    alone = teacher_forced(config, params, ids, implementation="xla")
    last = alone[np.arange(2), lengths - 1]
    np.testing.assert_allclose(scores, last, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[]], "every row needs a token"),
        ([], "every row needs a token"),
        ([[3], [512]], r"row 1 has ids \[512\], but tokens are 0 to 511"),
        ([[3, -1, 4]], r"row 0 has ids \[-1\].*padding \(-1\) is on the right alone"),
    ],
)
def test_ids_that_are_no_tokens(
    model: tuple[ModelConfig, Params], rows: list[list[int]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        pad(model[0], rows)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": jnp.array([1, 2, 3])}, r"tokens must be int32 \[2\].*int32 \[3\]"),
        ({"tokens": jnp.array([[1], [2]])}, r"one for each row, not int32 \[2, 1\]"),
        ({"tokens": jnp.array([1.0, 2.0])}, r"tokens must be int32 .* not float32"),
        ({"active": jnp.array([1, 0])}, r"active must be bool \[2\].* not int32 \[2\]"),
        (
            {"batch": 3},
            r"cache.k is \[1, 3, .* reads \[1, 2, .*init_cache\(config, 2, 8",
        ),
        ({"slots": 16}, r"cache.k is .* \(layers, rows, key-value heads, slots"),
        ({"dtype": "bfloat16"}, r"cache.k is bfloat16, but the parameters are float32"),
    ],
    ids=["rows", "rank", "dtype", "active", "batch", "slots", "cache-dtype"],
)
def test_arguments_of_another_shape_or_dtype(change: dict, words: str) -> None:
    config = replace(TINY, num_layers=1)
    params = decode_params(config, random_params(config, jax.random.key(0), "float32"))
    step = DecodeStep(config, 2, 8, implementation="xla")
    size = change.get("batch", 2), change.get("slots", 8)
    cache = init_cache(config, *size, change.get("dtype", "float32"))
    tokens = change.get("tokens", jnp.array([1, 2]))
    for call in (step, step.unchecked, jax.jit(step)):
        with pytest.raises(ValueError, match=words):
            call(params, cache, tokens, change.get("active"))
    assert step.kernel.traces == 0


# ------------------------------------------------------------------- rows that rest


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_rests_keeps_its_tokens_and_length(implementation: str) -> None:
    """It writes its first unused slot at most, and no bit of the other rows changes."""
    step = DecodeStep(TINY, 3, 16, logits=True, implementation=implementation)
    lengths = [4, 7, 16]
    want, grown = step.unchecked(*example(TINY, lengths, 16, dtype=jnp.float32))
    params, cache, tokens = example(TINY, lengths, 16, dtype=jnp.float32)
    before = bits(cache)
    # The last row is full, so it has to rest.
    active = jnp.array([True, False, False])
    out, cache = step(params, cache, tokens, active)
    k, v, after = bits(cache)
    assert after.tolist() == [5, 7, 16]
    np.testing.assert_array_equal(out[0], want[0])
    for new, old, other in zip((k, v), before, bits(grown), strict=False):
        np.testing.assert_array_equal(new[:, 0], other[:, 0])
        np.testing.assert_array_equal(new[:, 1, :, :7], old[:, 1, :, :7])
        assert np.isnan(new[:, 1, :, 8:]).all()
        np.testing.assert_array_equal(new[:, 2], old[:, 2])
    # And it goes on as if it had not rested.
    again, _ = step(params, cache, tokens, jnp.array([False, True, False]))
    np.testing.assert_array_equal(again[1], want[1])
    assert step.kernel.traces == 1


@pytest.mark.slow
def test_only_rows_that_grow_need_room() -> None:
    step = DecodeStep(TINY, 2, 8, implementation="xla")
    params, cache, tokens = example(TINY, [3, 8], 8)
    with pytest.raises(ValueError, match=r"rows \[1\] would hold \[9\] tokens"):
        step(params, cache, tokens)
    _, cache = step(params, cache, tokens, jnp.array([True, False]))
    assert cache.lengths.tolist() == [4, 8]
