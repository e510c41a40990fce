"""Batches in classes: which is chosen, what it traces, and bits of rows in them."""

import dataclasses
from dataclasses import replace
from functools import cache as memoize
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import batches
from models.batches import PIECE, Decoder, class_of, fill
from models.cache import KVCache, export_cache, import_cache
from models.llama import leaves
from models.params import Params, random_tree
from models.registry import family_of
from models.step import decode_params
from tests.tiny_llama import TINY

CONFIG = replace(TINY, num_layers=1)
SLOTS = 96
PROMPTS = [[5, 71, 200], [508], [*range(1, 71)], [9, 9, 4, 2]]
IMPLEMENTATIONS = ["xla", pytest.param("simulate", marks=pytest.mark.slow)]


@memoize
def params_of() -> Params:
    params = random_tree(leaves(CONFIG), jax.random.key(0), jnp.float32)
    return decode_params(CONFIG, params)


def with_nan(cache: KVCache) -> KVCache:
    """NaN in every slot that is not used, of all rows."""
    used = jnp.arange(cache.max_length) < cache.lengths[:, None]
    k, v = (
        jnp.where(used[None, :, None, :, None], x, jnp.nan) for x in (cache.k, cache.v)
    )
    return replace(cache, k=k, v=v)


# ----------------------------------------------------------------------- classes


def test_the_smallest_class_that_holds_them() -> None:
    found = [class_of(rows) for rows in range(1, 17)]
    assert found == [1, 2, 4, 4, *[8] * 4, *[16] * 8]
    assert class_of(3, (8, 2)) == 8


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (17, r"17 rows are more than the largest class .*16\); decode at most 16 rows"),
        (0, "at least one row, not 0"),
    ],
)
def test_numbers_of_rows_without_a_class(rows: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        class_of(rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 0}, "max_length=0 slots: a cache needs at least one"),
        ({"max_length": 8, "classes": ()}, r"classes=\(\): sizes of batches are 1"),
        ({"max_length": 8, "classes": (0, 1)}, r"classes=\(0, 1\): sizes of batches"),
    ],
)
def test_a_decoder_without_size(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Decoder(CONFIG, **options)


def test_rows_are_filled_behind() -> None:
    assert fill([3, 4], 4, -1).tolist() == [3, 4, -1, -1]
    assert fill(np.ones((1, 2)), 2, 0).tolist() == [[1, 1], [0, 0]]


# ------------------------------------------------------------------------ traces


def test_another_number_of_rows_of_a_class_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[int] = []
    family = family_of(CONFIG)

    def prefill(config: Any, params: Any, cache: Any, ids: Any, lengths: Any) -> Any:
        traced.append(ids.shape[0])
        return family.prefill(config, params, cache, ids, lengths)

    counted = dataclasses.replace(family, prefill=prefill)
    monkeypatch.setattr(batches, "family_of", lambda _: counted)
    # A config of its own: what other tests compiled does not count.
    config = replace(CONFIG, max_length=250)
    decoder = Decoder(config, SLOTS, implementation="xla")
    steps = set()
    for rows in (3, 4, 3):
        cache = decoder.init_cache(rows, "float32")
        _, cache = decoder.prefill(params_of(), cache, PROMPTS[:rows])
        step = decoder.step(rows)
        active = jnp.asarray(np.arange(4) < rows)
        for _ in range(2):
            _, cache = step(params_of(), cache, jnp.zeros(4, jnp.int32), active)
        steps.add(step)
        assert cache.lengths.tolist() == [5, 3, 72, 6 * (rows == 4)]
    (step,) = steps
    # Prompts of 4 and of 70 tokens are pieces of one shape.
    assert traced == [4]
    assert step.kernel.traces == 1
    assert step._jitted._cache_size() == 1
    assert decoder.step(2) is not step
    assert decoder.step(4, logits=True) is not step


# -------------------------------------------------------------------------- bits


def run(decoder: Decoder, prompts: list[list[int]], steps: int) -> list[np.ndarray]:
    """Scores after the prompts and after each of some tokens, and the cache."""
    rows, params = len(prompts), params_of()
    cache = with_nan(decoder.init_cache(rows, "float32"))
    scores, cache = decoder.prefill(params, cache, prompts)
    step = decoder.step(rows, logits=True)
    active = jnp.asarray(np.arange(step.batch) < rows)
    found = [np.asarray(scores)]
    for token in range(steps):
        tokens = jnp.asarray(fill([7 * token + 3] * rows, step.batch, 0))
        scores, cache = step(params, cache, tokens, active)
        found.append(np.asarray(scores))
    return [*found, *(x.swapaxes(0, 1) for x in map(np.asarray, (cache.k, cache.v)))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_has_the_bits_of_a_full_batch(implementation: str) -> None:
    """Whoever is beside it: longer prompts, or rows that fill, full of NaN."""
    decoder = Decoder(CONFIG, SLOTS, implementation=implementation)
    full = run(decoder, PROMPTS, 3)
    some = run(decoder, [*PROMPTS[:2], PROMPTS[3]], 3)
    for a, b in zip(full, some, strict=True):
        np.testing.assert_array_equal(b[:2], a[:2])
    assert all(np.isfinite(scores[:3]).all() for scores in some[:4])
    for array in some[4:]:
        for row, length in enumerate((6, 4, 7)):
            assert np.isfinite(array[row, :, :, :length]).all()
            assert np.isnan(array[row, :, :, length:]).all()
        # A row that fills the batch has its first slot to write to.
        assert np.isnan(array[3, :, :, 1:]).all()


@pytest.mark.slow
def test_prompts_longer_than_a_piece_equal_the_forward_pass() -> None:
    decoder = Decoder(CONFIG, SLOTS)
    cache = decoder.init_cache(4, "float32")
    scores, cache = decoder.prefill(params_of(), with_nan(cache), PROMPTS)
    lengths = np.array([len(row) for row in PROMPTS])
    assert lengths.max() > PIECE
    assert cache.lengths.tolist() == lengths.tolist()
    for row, prompt in enumerate(PROMPTS):
        want = family_of(CONFIG).forward(
            CONFIG, params_of(), jnp.array([prompt]), jnp.array([len(prompt)])
        )
        np.testing.assert_allclose(scores[row], want[0, -1], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("prompts", "dtype", "words"),
    [
        ([[3], []], "float32", "every row needs a token"),
        ([[3], [600]], "float32", r"row 1 has ids \[600\]"),
        ([[3], [4] * 97], "float32", r"rows \[1\] would hold \[97\] tokens"),
        ([[3], [4], [5]], "float32", r"cache.k is \[1, 2, .* reads \[1, 4, "),
        ([[3], [4]], "bfloat16", "cache.k is bfloat16, but the parameters are float32"),
    ],
)
def test_prompts_that_cannot_be_read_lose_nothing(
    prompts: list[list[int]], dtype: str, words: str
) -> None:
    decoder = Decoder(CONFIG, SLOTS)
    cache = decoder.init_cache(2, dtype)
    with pytest.raises(ValueError, match=words):
        decoder.prefill(params_of(), cache, prompts)
    assert not cache.k.is_deleted()


@pytest.mark.slow
def test_rows_of_a_class_are_exported_and_imported() -> None:
    decoder = Decoder(CONFIG, SLOTS, implementation="xla")
    cache = decoder.init_cache(3, "float32")
    _, cache = decoder.prefill(params_of(), cache, PROMPTS[:3])
    arrays = export_cache(cache, rows=3)
    assert arrays["k"].shape == (1, 3, 2, SLOTS, 64)
    assert arrays["lengths"].tolist() == [3, 1, 70]
    other = import_cache(arrays, batch=4)
    assert other.lengths.tolist() == [3, 1, 70, 0]
    for name, array in export_cache(other, rows=3).items():
        np.testing.assert_array_equal(array, arrays[name])
    step = decoder.step(3, logits=True)
    tokens, active = jnp.array([1, 2, 3, 0]), jnp.array([True] * 3 + [False])
    want, _ = step(params_of(), cache, tokens, active)
    found, _ = step(params_of(), other, tokens, active)
    np.testing.assert_array_equal(found[:3], want[:3])
    with pytest.raises(ValueError, match=r"rows=5 is not in 1\.\.4"):
        export_cache(other, rows=5)
    with pytest.raises(ValueError, match="batch=2 is less than the 3 rows given"):
        import_cache(arrays, batch=2)
