"""The plain forward passes against Hugging Face's results."""

from pathlib import Path

import numpy as np
import pytest

from models.cache import init_cache
from models.registry import family_of
from models.weights import load
from tests.fidelity import mean_kl
from tests.tiers import first_quick

NAMES = ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16", "qwen3_untied"]
TOLERANCE = (
    1e-3  # of f32 logits; the least sensitive feature tested moves them by 4.8e-3
)


def forward(
    folder: Path, dtype: str, ids: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    config, params = load(folder, dtype)
    return np.asarray(family_of(config).forward(config, params, ids, lengths))


@pytest.mark.parametrize("name", NAMES)
def test_float32_sequence(fixtures: Path, name: str) -> None:
    oracle = np.load(fixtures / name / "oracle.npz")
    ids = np.concatenate([oracle["prompt_ids"], oracle["teacher_ids"]])
    logits = forward(fixtures / name, "float32", ids[None], np.array([len(ids)]))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits[0], oracle["logits_f32"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", first_quick(NAMES))
def test_float32_rows_of_three_lengths(fixtures: Path, name: str) -> None:
    oracle = np.load(fixtures / name / "oracle.npz")
    lengths = oracle["batch_lens"]
    logits = forward(fixtures / name, "float32", oracle["batch_ids"], lengths)
    assert np.isfinite(logits).all()
    last = logits[np.arange(3), lengths - 1]
    np.testing.assert_allclose(last, oracle["batch_logits_f32"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", first_quick(NAMES))
def test_bfloat16_loses_no_more_than_hugging_face(fixtures: Path, name: str) -> None:
    oracle = np.load(fixtures / name / "oracle.npz")
    ids = np.concatenate([oracle["prompt_ids"], oracle["teacher_ids"]])
    logits = forward(fixtures / name, "bfloat16", ids[None], np.array([len(ids)]))[0]
    exact, theirs = oracle["logits_f32"], oracle["logits_bf16"]
    assert np.abs(logits - exact).max() <= 1.25 * np.abs(theirs - exact).max()
    assert mean_kl(exact, logits) <= 1.25 * mean_kl(exact, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_others(fixtures: Path, name: str) -> None:
    oracle = np.load(fixtures / name / "oracle.npz")
    ids, lengths = oracle["batch_ids"], oracle["batch_lens"]
    logits = forward(fixtures / name, "bfloat16", ids, lengths)
    other = ids.copy()
    other[1:] = 3
    again = forward(fixtures / name, "bfloat16", other, lengths)
    np.testing.assert_array_equal(again[0, : lengths[0]], logits[0, : lengths[0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_rows_behind_a_cache(fixtures: Path, name: str) -> None:
    """Several rows in pieces: the same as at once, up to the order of rounding."""
    oracle = np.load(fixtures / name / "oracle.npz")
    config, params = load(fixtures / name, "bfloat16")
    ids, lengths = oracle["batch_ids"], oracle["batch_lens"]
    prefill = family_of(config).prefill
    cache = init_cache(config, 3, ids.shape[1])
    first = lengths // 2
    _, cache = prefill(config, params, cache, ids, first)
    rest = np.array([np.roll(row, -n) for row, n in zip(ids, first, strict=True)])
    logits, cache = prefill(config, params, cache, rest, lengths - first)
    assert cache.lengths.tolist() == lengths.tolist()
    limit = 1.25 * np.abs(oracle["logits_bf16"] - oracle["logits_f32"]).max()
    assert np.abs(logits - oracle["batch_logits_f32"]).max() <= limit


def test_an_id_beyond_the_vocabulary_is_not_another_token(fixtures: Path) -> None:
    ids = np.array([[3, 512], [3, 4]])
    folder = fixtures / "llama_rope3_tied"
    logits = forward(folder, "float32", ids, np.array([2, 2]))
    assert np.isnan(logits[0, 1]).all()
    assert np.isfinite(logits[1]).all()
