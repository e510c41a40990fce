"""Draws: which tokens may be drawn, how often each is, and on what a draw depends."""

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from models.sampling import kept, sample

Array = Any


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


# --------------------------------------------------------------------- the kept set

# Few different scores, so that ties are common; and tokens that cannot be drawn.
SCORES = st.one_of(
    st.integers(-8, 8).map(lambda x: x / 2),
    st.floats(-9, 9, width=32),
    st.just(-np.inf),
)
ROW = st.tuples(
    st.lists(SCORES, min_size=12, max_size=12).filter(lambda x: max(x) > -np.inf),
    st.floats(0.125, 4, width=32),
    st.integers(0, 14),
    st.one_of(st.just(1.0), st.floats(0.015625, 1, width=32)),
)


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.lists(ROW, min_size=3, max_size=3))
def test_the_kept_tokens_are_those_of_the_definition(rows: list) -> None:
    logits, temperature, top_k, top_p = (np.array(x) for x in zip(*rows, strict=True))
    found = jax.jit(kept)(logits.astype(np.float32), temperature, top_k, top_p)
    for row, (order, scaled, allowed) in enumerate(
        zip(*map(np.asarray, found), strict=True)
    ):
        scores = logits[row].astype(np.float64)
        # Best first, the lowest token on ties.
        assert order.tolist() == sorted(range(12), key=lambda t: (-scores[t], t))
        assert scaled[0] == 0
        count = int(allowed.sum())
        assert allowed[:count].all()
        most = min(top_k[row] or 12, 12)
        assert 1 <= count <= most
        mass = softmax(scores[order][:most] / temperature[row])
        if top_p[row] == 1:
            assert count == most
            continue
        # The fewest whose mass is at least p, but for rounding in float32.
        assert mass[:count].sum() >= top_p[row] - 1e-5
        assert mass[: count - 1].sum() < top_p[row] + 1e-5


def test_a_mass_that_is_just_enough_keeps_no_more() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: exact in float32."""
    logits = jnp.log(jnp.array([[1, 4, 2, 1.0]]))
    for top_p, tokens in ((0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.8, [1, 2, 0])):
        order, _, allowed = kept(logits, 1.0, 0, top_p)
        assert order[allowed].tolist() == tokens
    # Of the two best alone, 2/3 and 1/3.
    order, _, allowed = kept(logits, 1.0, 2, 0.6)
    assert order[allowed].tolist() == [1]


def test_nothing_else_is_ever_drawn() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(512, 50)), jnp.float32)
    order, _, allowed = (np.asarray(x) for x in kept(logits, 2.0, 5, 0.7))
    for at in range(4):
        found = np.asarray(sample(logits, jax.random.key(1), 2.0, 5, 0.7, position=at))
        for row, token in enumerate(found):
            assert token in order[row][allowed[row]]


# --------------------------------------------------------------------- how often


@pytest.mark.parametrize("over", ["rows", "positions"])
def test_tokens_are_as_frequent_as_their_probability(over: str) -> None:
    """Pearson's chi-square of 20,000 draws, of rows or of positions of one row.

    With 5 degrees of freedom it is above 20.5 once in 1000 keys (its table); this key
    is fixed.
    """
    count, temperature = 20_000, 0.7
    scores = np.array([0.3, -1.0, 1.2, 0.3, -0.2, -3.0, 0.9, 0.0])
    key = jax.random.key(20)
    row = jnp.asarray(scores, jnp.float32)[None]
    if over == "rows":
        found = sample(jnp.tile(row, (count, 1)), key, temperature, 6, 1.0)
    else:
        draw = jax.vmap(lambda at: sample(row, key, temperature, 6, 1.0, position=at))
        found = draw(jnp.arange(count))[:, 0]
    best = np.argsort(-scores, kind="stable")[:6]
    want = count * softmax(scores[best] / temperature)
    seen = np.bincount(np.asarray(found), minlength=8)
    assert seen[best].sum() == count
    assert ((seen[best] - want) ** 2 / want).sum() < 20.5
    # The test would notice another temperature.
    wrong = count * softmax(scores[best] / 0.75)
    assert ((seen[best] - wrong) ** 2 / wrong).sum() > 20.5


def test_draws_of_neighbours_are_independent() -> None:
    """They agree as often as chance: 1/4 of 20,000, +- 5 sigma."""
    logits, key = jnp.zeros((20_001, 4)), jax.random.key(5)
    now = np.asarray(sample(logits, key))
    then = np.asarray(sample(logits, key, position=1))
    sigma = (20_000 * 3 / 16) ** 0.5
    for a, b in ((now[1:], now[:-1]), (now[1:], then[1:]), (now[1:], then[:-1])):
        assert abs((a == b).sum() - 5000) < 5 * sigma


# ------------------------------------------------------------- what it depends on


def test_temperature_0_is_greedy_and_the_lowest_wins() -> None:
    logits = jnp.array([[1.0, 3, 3, 2], [-np.inf, -5, -4, -4], [0, 0, 0, 0]])
    found = sample(logits, jax.random.key(0), 0.0, [0, 3, 2], 0.5)
    assert found.dtype == jnp.int32
    assert found.tolist() == [1, 2, 0]
    assert sample(logits, jax.random.key(0), 1e-30).tolist()[1] in (2, 3)


def test_a_row_depends_on_nothing_but_itself() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(16, 300)), jnp.float32)
    key = jax.random.key(2)
    at = np.arange(16) + 40
    temperature = np.linspace(0.5, 2, 16)
    want = sample(logits, key, temperature, 0, 0.9, position=at)
    for rows in (1, 2, 4, 8):
        few = slice(None, rows)
        found = sample(logits[few], key, temperature[few], 0, 0.9, position=at[few])
        np.testing.assert_array_equal(found, want[few])
    others = logits.at[1:].set(jnp.nan)
    assert sample(others, key, temperature, 0, 0.9, position=at)[0] == want[0]
    jitted = jax.jit(sample)(logits, key, temperature, 0, 0.9, position=at)
    np.testing.assert_array_equal(jitted, want)
    for changed in ({"position": at + 1}, {"key": jax.random.key(3)}):
        options = {"key": key, "position": at} | changed
        assert (sample(logits, temperature=temperature, **options) != want).any()


def test_bfloat16_scores_are_those_in_float32() -> None:
    logits = jax.random.normal(jax.random.key(0), (4, 64), jnp.bfloat16)
    key = jax.random.key(1)
    found = sample(logits, key, 0.8, 20, 0.9)
    np.testing.assert_array_equal(
        found, sample(logits.astype(jnp.float32), key, 0.8, 20, 0.9)
    )


# --------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature must be finite and not negative; 0 takes"),
        ({"temperature": [0.5, np.nan]}, r"temperature must be finite .* not \[nan\]"),
        ({"top_k": -1}, "top_k must be 0 or more tokens; 0 keeps all; not -1"),
        ({"top_k": 0.5}, "top_k must be whole numbers, not 0.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; 1 keeps all; not 0.0"),
        ({"top_p": [0.5, 1.5]}, r"top_p must be in \(0, 1\]; .* not \[1.5\]"),
        ({"top_p": np.nan}, r"top_p must be in \(0, 1\]"),
        ({"top_p": [0.5] * 3}, r"one for each of the 2 rows, not of shape \[3\]"),
        (
            {"key": jax.random.key(0, impl="rbg")},
            "a key of 'rbg' .*impl='threefry2x32'",
        ),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], words: str) -> None:
    arguments = {"key": jax.random.key(0)} | options
    with pytest.raises(ValueError, match=words):
        sample(jnp.zeros((2, 5)), **arguments)
