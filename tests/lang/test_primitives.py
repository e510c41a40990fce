"""mk.dot, fold, roll, valid and program_id as functions of arrays, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mkdsl as mk
from tests.strategies import examples

Array = Any


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_dot(columns: int) -> None:
    x, w = normal(0, columns, 64), normal(1, 8, 64)
    np.testing.assert_allclose(mk.dot(x, w), x @ w.T, rtol=1e-5, atol=1e-5)
    half = mk.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, x @ w.T, rtol=0.05, atol=0.3)


def test_dot_of_a_vector() -> None:
    x, w = normal(0, 64), normal(1, 8, 64)
    assert mk.dot(x, w).shape == (8,)
    np.testing.assert_allclose(mk.dot(x, w), w @ x, rtol=1e-5, atol=1e-5)


@given(st.integers(-300, 300), st.sampled_from([(64,), (3, 64)]))
@examples(20)
def test_roll(shift: int, shape: tuple[int, ...]) -> None:
    x = normal(0, *shape)
    np.testing.assert_array_equal(mk.roll(x, shift), np.roll(x, shift, -1))


def test_valid_outside_of_a_program_is_the_whole_axis() -> None:
    x = normal(0, 3, 5)
    np.testing.assert_array_equal(mk.valid(x), np.ones(5, bool))
    np.testing.assert_array_equal(
        jax.jit(lambda x: mk.valid(x, 0))(x), np.ones(3, bool)
    )


def test_program_id_outside_of_a_program() -> None:
    with pytest.raises(mk.TraceError, match=r"mk.program_id\(1\) outside a program"):
        mk.program_id(1)


def softmax_state(q: Array, k: Array, v: Array, **how: Any) -> Any:
    """Maximum, sum and weighted values of softmax(q @ k.T) @ v, by a fold."""

    def step(c: Any, blocks: Any, valid: Array) -> Any:
        scores = jnp.where(valid, mk.dot(q, blocks[0]), -jnp.inf)
        top = jnp.maximum(c[0], jnp.max(scores, -1, keepdims=True))
        p, old = jnp.exp(scores - top), jnp.exp(c[0] - top)
        total = c[1] * old + jnp.sum(p, -1, keepdims=True)
        return top, total, c[2] * old + mk.dot(p, blocks[1].T)

    low = jnp.full((q.shape[0], 1), -1e30, jnp.float32)
    init = (low, jnp.zeros_like(low), jnp.zeros((q.shape[0], v.shape[1])))
    return mk.fold(step, init, (k, v), **how)


@given(rows=st.integers(1, 70), block=st.sampled_from([1, 8, 16, 64]))
@examples(12)
def test_fold_is_softmax_whatever_the_blocks(rows: int, block: int) -> None:
    q, k, v = normal(0, 3, 16), normal(1, rows, 16), normal(2, rows, 8)
    top, total, acc = softmax_state(q, k, v, block=block)
    scores = q @ k.T
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(top, scores.max(-1, keepdims=True), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, weights.sum(-1, keepdims=True), rtol=1e-4)
    np.testing.assert_allclose(acc, weights @ v, rtol=1e-3, atol=1e-4)


def test_fold_over_no_rows_is_init() -> None:
    init = jnp.float32([[1.0], [2.0]])
    empty = jnp.zeros((0, 4))
    out = mk.fold(lambda c, b, v: c + jnp.sum(b[0]), init, (empty,), block=4)
    np.testing.assert_array_equal(out, init)


def test_a_partial_block_reads_zeros_and_says_so() -> None:
    ones = jnp.ones((5, 2))

    def step(c: Any, blocks: Any, valid: Array) -> Any:
        seen = jnp.stack([jnp.sum(blocks[0]), jnp.sum(valid), jnp.float32(1)])
        return c + seen[None]

    out = mk.fold(step, jnp.zeros((1, 3)), (ones,), block=4)
    np.testing.assert_array_equal(out, [[10, 5, 2]])


@given(cut=st.integers(0, 40))
@examples(8)
def test_merged_parts_are_the_whole(cut: int) -> None:
    k = normal(1, 40, 16)
    add = lambda c, b, v: c + jnp.sum(b[0], 0)[None]  # noqa: E731
    init = jnp.ones((1, 16))
    zero = jnp.zeros((1, 16))
    first = mk.fold(add, init, (k[:cut],), block=8)
    second = mk.fold(add, zero, (k[cut:],), block=8)
    whole = mk.fold(add, init, (k,), block=8, merge=lambda a, b: a + b, identity=zero)
    np.testing.assert_allclose(first + second, whole, rtol=1e-4, atol=1e-4)


def test_fold_under_jit_and_vmap() -> None:
    q, k = normal(0, 2, 3, 16), normal(1, 2, 20, 16)
    run = lambda q, k: softmax_state(q, k, k, block=8)[2]  # noqa: E731
    many = jax.jit(jax.vmap(run))(q, k)
    one = jnp.stack([run(q[i], k[i]) for i in range(2)])
    np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-4)
