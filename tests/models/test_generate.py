"""Texts: greedy and drawn, why rows end, and what the caller may ask for."""

from dataclasses import replace
from functools import cache as memoize
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import batches
from models import generate as texts
from models.cache import KVCache, init_cache
from models.generate import Generation, Row, generate
from models.llama import leaves
from models.params import Params, random_tree
from models.prompts import PAD
from models.weights import load
from tests.tiny_llama import TINY

FOLDER = Path(__file__).parents[1] / "fixtures"
NAMES = ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16", "qwen3_untied"]
IMPLEMENTATIONS = ["xla", pytest.param("simulate", marks=pytest.mark.slow)]
CONFIG = replace(TINY, num_layers=1, eos_ids=(508,))
PROMPTS = [[5, 71, 200], [508, 1], [9, 9, 4, 2, 77], [300]]


@memoize
def params_of() -> Params:
    return random_tree(leaves(CONFIG), jax.random.key(1), jnp.float32)


def texts_of(prompts: list[list[int]], count: int, **options: Any) -> Generation:
    """All tokens at once, without an end that the model chooses."""
    options = {"eos_ids": (), "max_length": 32, "implementation": "xla"} | options
    found = generate(CONFIG, params_of(), prompts, count, **options)
    for _ in found:
        pass
    return found


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
def test_a_row_ends_at_its_eos_and_the_others_go_on(fixtures: Path) -> None:
    config, params = load(fixtures / "gemma3_window16", "float32")
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


# ------------------------------------------------------------------ why rows end


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_row_has_its_reason_and_the_others_go_on(implementation: str) -> None:
    free = texts_of(PROMPTS, 6, implementation=implementation)
    assert [row.reason for row in free.rows] == ["max_tokens"] * 4
    assert [len(row.tokens) for row in free.rows] == [6] * 4
    # An end that row 0 comes to and no other row does before.
    others = {t for row in free.rows[1:] for t in row.tokens}
    at = next(i for i, t in enumerate(free.rows[0].tokens) if t not in others)
    eos = free.rows[0].tokens[at]
    # Row 2 has 5 tokens of a prompt in 8 slots: 3 new ones go in, and one more is told.
    found = generate(
        CONFIG,
        params_of(),
        PROMPTS,
        5,
        max_length=8,
        eos_ids=(eos,),
        implementation=implementation,
    )
    steps = np.array(list(found)).T
    first = free.rows[0].tokens.index(eos)
    assert found.rows == [
        Row(free.rows[0].tokens[:first], "eos"),
        Row(free.rows[1].tokens[:5], "max_tokens"),
        Row(free.rows[2].tokens[:4], "cache full"),
        Row(free.rows[3].tokens[:5], "max_tokens"),
    ]
    for row, told in zip(found.rows, steps, strict=True):
        assert told.tolist() == row.tokens + [PAD] * (5 - len(row.tokens))
    # Two tokens of the prompt, and all new ones but the last.
    assert found.cache.lengths.tolist() == [3 + first, 6, 8, 5]


def nan_cache(*args: Any) -> KVCache:
    cache = init_cache(*args)
    return replace(cache, k=cache.k * jnp.nan, v=cache.v * jnp.nan)


@pytest.mark.slow
def test_slots_behind_a_row_stay_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rows that ended, in a class that they do not fill, hold NaN before."""
    free = texts_of(PROMPTS[:3], 8)
    eos = free.rows[0].tokens[0]
    clean = texts_of(PROMPTS[:3], 8, eos_ids=(eos,))
    monkeypatch.setattr(batches, "init_cache", nan_cache)
    found = texts_of(PROMPTS[:3], 8, eos_ids=(eos,))
    assert found.rows == clean.rows
    assert found.rows[0] == Row([], "eos")
    assert found.cache.batch == 4
    lengths = found.cache.lengths.tolist()
    assert lengths[0] == 3
    assert lengths[3] == 0
    for array, same in ((found.cache.k, clean.cache.k), (found.cache.v, clean.cache.v)):
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(
                array[:, row, :, :length], same[:, row, :, :length]
            )
            # One slot behind it is there for rows that rest.
            assert np.isnan(array[:, row, :, length + 1 :]).all()


@pytest.mark.slow
def test_a_row_that_ends_changes_no_bit_of_the_others() -> None:
    free = texts_of(PROMPTS, 6)
    eos = free.rows[0].tokens[0]
    assert all(eos not in row.tokens for row in free.rows[1:])
    ended = texts_of(PROMPTS, 6, eos_ids=(eos,))
    assert ended.rows[0] == Row([], "eos")
    assert ended.rows[1:] == free.rows[1:]
    for a, b in ((ended.cache.k, free.cache.k), (ended.cache.v, free.cache.v)):
        np.testing.assert_array_equal(a[:, 1:], b[:, 1:])


@pytest.mark.slow
def test_a_prompt_that_fills_the_cache_gets_one_token() -> None:
    found = texts_of([[5, 71, 200]], 4, max_length=3)
    assert found.rows == [Row(texts_of([[5, 71, 200]], 1).rows[0].tokens, "cache full")]


@pytest.mark.slow
def test_rows_can_be_read_while_they_grow() -> None:
    found = generate(CONFIG, params_of(), PROMPTS[:1], 3, eos_ids=())
    assert found.rows == [Row([], None)]
    first = next(found)
    assert found.rows == [Row(first.tolist(), None)]
    assert len(list(found)) == 2
    assert found.rows[0].reason == "max_tokens"
    assert next(found, None) is None


@pytest.mark.slow
def test_the_ends_of_the_model_are_the_default() -> None:
    free = texts_of(PROMPTS[:1], 4)
    config = replace(CONFIG, eos_ids=(free.rows[0].tokens[0],))
    found = generate(config, params_of(), PROMPTS[:1], 4, implementation="xla")
    assert list(found) == []
    assert found.rows == [Row([], "eos")]


# ------------------------------------------------------------------------ classes


@pytest.mark.slow
def test_rows_of_a_class_share_what_is_compiled() -> None:
    rows = [texts_of(PROMPTS[:n], 4).rows for n in (3, 4, 3)]
    assert rows[0] == rows[2] == rows[1][:3]
    step = batches.decoder_of(CONFIG, 32, "xla").step(4)
    assert step is batches.decoder_of(CONFIG, 32, "xla").step(3)
    assert step.kernel.traces == 1
    assert step._jitted._cache_size() == 1


# ------------------------------------------------------------------------ draws


@pytest.mark.slow
def test_the_same_key_gives_the_same_tokens_whoever_else_is_there() -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "key": jax.random.key(7)}
    four = texts_of(PROMPTS, 8, **options).rows
    assert texts_of(PROMPTS, 8, **options).rows == four
    assert texts_of(PROMPTS[:3], 8, **options).rows == four[:3]
    other = {**options, "key": jax.random.key(8)}
    assert texts_of(PROMPTS, 8, **other).rows != four
    # Two rows of one prompt have draws of their own.
    twins = texts_of([PROMPTS[0]] * 2, 8, **options).rows
    assert twins[0].tokens == four[0].tokens != twins[1].tokens


@pytest.mark.slow
def test_a_text_that_is_continued_has_the_same_stream() -> None:
    options = {"temperature": 1.0, "key": jax.random.key(3)}
    whole = texts_of(PROMPTS[:1], 8, **options).rows[0].tokens
    rest = texts_of([PROMPTS[0] + whole[:3]], 5, **options).rows[0].tokens
    assert whole[3:] == rest


@pytest.mark.slow
def test_rows_may_be_drawn_in_different_ways() -> None:
    greedy = texts_of(PROMPTS[:3], 6).rows
    found = texts_of(
        PROMPTS[:3],
        6,
        temperature=[0.0, 5.0, 5.0],
        top_k=[0, 1, 0],
        key=jax.random.key(0),
    ).rows
    assert found[:2] == greedy[:2]
    assert found[2] != greedy[2]


# ------------------------------------------------------------------------ input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": [[]]}, "every row needs a token"),
        ({"prompts": [[1], [2, 509]]}, r"row 1 has ids \[509\]"),
        ({"prompts": [[1]] * 17}, "17 rows are more than the largest class"),
        (
            {"prompts": [[1], [2] * 9], "max_length": 8},
            r"prompts of rows \[1\] have \[9\] tokens.*8 slots.*raise max_length",
        ),
        ({"max_length": 0}, "prompts of rows .* but the cache has 0 slots"),
        ({"max_tokens": 0}, "max_tokens=0: a row gets at least one token"),
        ({"eos_ids": (3, 509, -1)}, r"eos_ids \[509, -1\] are no tokens .* 0 to 508"),
        ({"temperature": -0.5}, "temperature must be finite and not negative"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_k": [1, 2]}, r"top_k must be a number or one for each of the 1 rows"),
        ({"temperature": 0.7}, r"needs a key: key=jax.random.key\(seed\)"),
        (
            {"temperature": 0.7, "key": jax.random.key(0, impl="rbg")},
            "a key of 'rbg' gives a row other numbers in another batch",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_read(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a prompt was read")

    monkeypatch.setattr(texts, "_read", never)
    arguments = {"prompts": [[1, 2]], "max_tokens": 4} | options
    with pytest.raises(ValueError, match=words):
        generate(CONFIG, params_of(), **arguments)
