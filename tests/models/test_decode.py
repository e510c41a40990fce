"""Decoding on top of the programs: full caches, loops under jit, greedy text."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache, init_cache
from models.config import ModelConfig
from models.decode import (
    PAD,
    DecodeStep,
    decode_params,
    generate,
    pad,
    prefill,
    teacher_forced,
)
from models.params import Params
from models.weights import load

FOLDER = Path(__file__).parents[1] / "fixtures"
NAMES = ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16", "qwen3_untied"]


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


# ------------------------------------------------------------------------ greedy


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation(name: str) -> None:
    oracle = np.load(FOLDER / name / "oracle.npz")
    config, params = load(FOLDER / name, "float32")
    prompt = oracle["prompt_ids"].tolist()
    found = generate(config, params, [prompt], 32, eos_ids=(), implementation="xla")
    ids = [int(row[0]) for row in found]
    assert len(ids) == 32
    close = np.flatnonzero(oracle["greedy_gap"] < 1e-3)
    stop = close[0] if close.size else 32
    assert ids[:stop] == oracle["greedy_ids"][:stop].tolist()


@pytest.mark.slow
def test_a_row_ends_at_its_eos_and_the_others_go_on(
    model: tuple[ModelConfig, Params],
) -> None:
    config, _ = model
    params = load(FOLDER / "gemma3_window16", "float32")[1]
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5]]
    free = list(generate(config, params, prompts, 8, eos_ids=(), implementation="xla"))
    rows = np.array(free).T
    eos = next(t for t in rows[0].tolist() if t not in rows[1])
    at = rows[0].tolist().index(eos)
    found = generate(config, params, prompts, 8, eos_ids=(eos,), implementation="xla")
    ended = np.array(list(found)).T
    assert ended[0].tolist() == rows[0, :at].tolist() + [PAD] * (8 - at)
    np.testing.assert_array_equal(ended[1], rows[1])
    both = (eos, int(rows[1, 0]))
    found = generate(config, params, prompts, 8, eos_ids=both, implementation="xla")
    assert len(list(found)) == at


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
