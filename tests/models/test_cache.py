"""Prefill with a cache equals the forward pass, whatever unused slots hold."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache, export_cache, import_cache, init_cache
from models.config import ModelConfig
from models.params import Params
from models.registry import family_of
from models.weights import load
from tests.tiers import first_quick

NAMES = ["llama_rope3_tied", "gemma3_window16"]
SLOTS = 40


@pytest.fixture(params=first_quick(NAMES))
def model(request: pytest.FixtureRequest, fixtures: Path) -> tuple[ModelConfig, Params]:
    return load(fixtures / request.param, "float32")


@pytest.fixture
def batch(fixtures: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids [3, 33] and lengths 3, 17 and 33."""
    oracle = np.load(fixtures / "llama_rope3_tied" / "oracle.npz")
    return oracle["batch_ids"], oracle["batch_lens"]


def nan_cache(config: ModelConfig, batch: int) -> KVCache:
    cache = init_cache(config, batch, SLOTS, jnp.float32)
    return replace(cache, k=cache.k * jnp.nan, v=cache.v * jnp.nan)


def expect(model: tuple[ModelConfig, Params], ids: np.ndarray, lengths: np.ndarray):
    config, params = model
    logits = np.asarray(family_of(config).forward(config, params, ids, lengths))
    return logits[np.arange(len(ids)), lengths - 1]


def close(a: jax.Array, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, atol=1e-4, rtol=0)


def test_prefill_equals_forward(model, batch) -> None:
    (config, params), (ids, lengths) = model, batch
    prefill = family_of(config).prefill
    logits, cache = prefill(config, params, nan_cache(config, 3), ids, lengths)
    close(logits, expect(model, ids, lengths))
    assert cache.lengths.tolist() == lengths.tolist()
    used = np.arange(SLOTS) < lengths[:, None]
    for array in (cache.k, cache.v):
        # Real tokens are written, and nothing else is.
        finite = np.isfinite(array).all(axis=(0, 2, 4))
        np.testing.assert_array_equal(finite, used)


def test_decode_steps_equal_forward(model, batch) -> None:
    (config, params), (ids, lengths) = model, batch
    prefill = family_of(config).prefill
    rest = np.minimum(lengths, 2)
    start = lengths - rest
    _, cache = prefill(config, params, nan_cache(config, 3), ids, start)
    for step in range(2):
        token = ids[np.arange(3), start + step][:, None]
        one = np.ones(3, np.int32)
        logits, cache = prefill(config, params, cache, token, one)
    close(logits, expect(model, ids, lengths))


@pytest.mark.slow
def test_a_prompt_in_pieces_equals_forward(model, batch) -> None:
    (config, params), (ids, lengths) = model, batch
    prefill = family_of(config).prefill
    cache = nan_cache(config, 1)
    for piece in np.split(ids[2:], [10, 27], axis=1):
        logits, cache = prefill(
            config, params, cache, piece, np.array([piece.shape[1]])
        )
    close(logits, expect(model, ids, lengths)[2:])


def test_a_row_may_get_no_token(model, batch) -> None:
    (config, params), (ids, lengths) = model, batch
    prefill = family_of(config).prefill
    _, cache = prefill(config, params, nan_cache(config, 3), ids, lengths - [0, 1, 1])
    last = ids[np.arange(3), lengths - 1][:, None]
    logits, cache = prefill(config, params, cache, last, np.array([0, 1, 1]))
    close(logits[1:], expect(model, ids, lengths)[1:])
    assert cache.lengths.tolist() == lengths.tolist()


def test_a_full_cache_is_an_error_and_overwrites_nothing(model, batch) -> None:
    config, params = model
    prefill = family_of(config).prefill
    ids, full = np.full((2, SLOTS), 5), np.array([SLOTS, 3])
    _, cache = prefill(config, params, nan_cache(config, 2), ids, full)
    one = np.ones(2, np.int32)
    with pytest.raises(
        ValueError, match=r"cache is full: rows \[0\] would hold \[41\]"
    ):
        prefill(config, params, cache, ids[:, :1], one)
    # Traced lengths cannot raise: the token is dropped and the length tells.
    step = jax.jit(partial(prefill, config))
    _, after = step(params, cache, ids[:, :1], one)
    np.testing.assert_array_equal(after.k[:, 0], cache.k[:, 0])
    assert after.lengths.tolist() == [SLOTS + 1, 4]


def test_traces_once_for_every_length_and_donates(model) -> None:
    config, params = model
    traces = 0

    def step(params: Params, cache: KVCache, ids: jax.Array, lengths: jax.Array):
        nonlocal traces
        traces += 1
        return family_of(config).prefill(config, params, cache, ids, lengths)

    jitted = jax.jit(step, donate_argnums=1)
    cache = init_cache(config, 1, SLOTS, jnp.float32)
    for length in (3, 1, 2):
        old = cache
        _, cache = jitted(params, cache, np.full((1, 3), 7), np.array([length]))
        assert old.k.is_deleted()
    assert traces == 1
    assert cache.lengths.tolist() == [6]


def test_export_and_import(model, batch) -> None:
    (config, params), (ids, lengths) = model, batch
    prefill = family_of(config).prefill
    short = init_cache(config, 3, ids.shape[1], jnp.float32)
    _, cache = prefill(config, params, short, ids, lengths - 1)
    arrays = export_cache(cache)
    assert sorted(arrays) == ["k", "lengths", "v"]
    longer = import_cache(arrays, max_length=SLOTS)
    assert longer.max_length == SLOTS
    last = ids[np.arange(3), lengths - 1][:, None]
    logits, _ = prefill(config, params, longer, last, np.ones(3, np.int32))
    close(logits, expect(model, ids, lengths))


def test_import_refuses_what_does_not_fit() -> None:
    k = np.zeros((2, 3, 1, 4, 8), np.float32)
    good = {"k": k, "v": k, "lengths": np.array([0, 4, 1])}
    assert import_cache(good, dtype=jnp.bfloat16).k.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"\['lengths'\] are missing"):
        import_cache({"k": k, "v": k})
    with pytest.raises(ValueError, match=r"must be k and v \[L, B, KV, S, D\]"):
        import_cache({**good, "v": k[:, :2]})
    with pytest.raises(ValueError, match=r"not in 0\.\.4"):
        import_cache({**good, "lengths": np.array([0, 5, 1])})
    with pytest.raises(ValueError, match="max_length=2 is less than the 4 slots"):
        import_cache(good, max_length=2)
