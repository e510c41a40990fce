"""Every mode of a task against the plain function, and parts against the whole."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.errors import NO_SRC
from mkdsl.lang.program import TaskDef
from mkdsl.lang.task import Block, define
from mkdsl.runtime.evaluate import (
    Operand,
    run_combine,
    run_full,
    run_partial,
    zero_beyond,
)
from models.tasks.attention import attend
from models.tasks.linear import gate_up, residual
from tests.tiers import first_quick

Array = Any
ROWS, DIM, GROUP, BLOCK = 96, 64, 4, 16
PARTS = (1, 2, 3, 4, 5)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def defined(task: Any, *values: Array, **static: Any) -> TaskDef:
    blocks = [Block(v.shape, str(v.dtype)) for v in values]
    return define(functools.partial(task, **static), blocks, NO_SRC)


def close(got: list[Array], want: list[Array], tolerance: float = 1e-5) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------- dots


@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_a_dot_with_a_computed_left_side(parts: int) -> None:
    depth = 60
    values = normal(0, 3, depth), normal(1, depth), normal(2, 8, depth)
    values = (*values, normal(3, 8, depth))
    task = defined(gate_up, *values, eps=1e-5)
    whole = {i: Operand(v) for i, v in enumerate(values)}
    size = depth // parts
    cuts = [
        run_partial(
            task,
            {
                i: Operand(v[:, p * size :][:, :size], first=p * size) if i > 1 else o
                for (i, o), v in zip(whole.items(), values, strict=True)
            },
            (),
            p,
        )
        for p in range(parts)
    ]
    joined = [jnp.stack(c) for c in zip(*cuts, strict=True)]
    after = {i: whole[i] for i in task.after}
    want = [gate_up(*values, eps=1e-5)]
    close(run_full(task, whole, ()), want)
    close(run_combine(task, after, (), joined), want)


@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_a_dot_whose_left_side_is_narrowed(parts: int) -> None:
    depth = 60
    values = normal(0, 3, 8), normal(1, 3, depth), normal(2, 8, depth)
    task = defined(residual, *values)
    size = depth // parts
    cuts = [
        run_partial(
            task,
            {i: Operand(values[i][:, p * size :][:, :size]) for i in (1, 2)},
            (),
            p,
        )
        for p in range(parts)
    ]
    joined = [jnp.stack(c) for c in zip(*cuts, strict=True)]
    assert task.after == (0,)
    close(run_combine(task, {0: Operand(values[0])}, (), joined), [residual(*values)])


def test_accumulators_are_summed_in_the_order_of_parts() -> None:
    values = normal(0, 1, 1), normal(1, 1, 4), normal(2, 1, 4)
    task = defined(residual, *values)
    cut = np.float32([[[1e8]], [[-1e8]], [[1.0]]])
    zero = Operand(np.zeros((1, 1), np.float32))
    assert run_combine(task, {0: zero}, (), [cut])[0] == 1.0


# ------------------------------------------------------------------------- folds


def attention(q: Array, k: Array, v: Array, k_new: Array, v_new: Array) -> Array:
    keys, values = np.concatenate([k, k_new]), np.concatenate([v, v_new])
    scores = (q @ keys.T * DIM**-0.5).astype(np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


@pytest.fixture(scope="module")
def attention_values() -> list[Array]:
    shapes = ((GROUP, DIM), (ROWS, DIM), (ROWS, DIM), (1, DIM), (1, DIM))
    return [normal(i, *shape) for i, shape in enumerate(shapes)]


@pytest.fixture(scope="module")
def attention_task(attention_values: list[Array]) -> TaskDef:
    return defined(attend, *attention_values, scale=DIM**-0.5, block=BLOCK)


@pytest.fixture(scope="module")
def fold_part(attention_task: TaskDef) -> Any:
    """A part of the fold, compiled once for each number of a part."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(p: int, values: list[Array], first: Array, count: Array) -> list[Array]:
        operands = {i: Operand(values[i]) for i in attention_task.before}
        for i in (1, 2):
            operands[i] = Operand(values[i], (count, None), first)
        return run_partial(attention_task, operands, (), p)

    return run


LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 70, ROWS)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_fold_sees_its_rows_alone(
    n: int, attention_task: TaskDef, attention_values: list[Array]
) -> None:
    q, k, v, *new = attention_values
    want = attention(q, k[:n], v[:n], *new)
    k, v = (np.where(np.arange(ROWS)[:, None] < n, x, np.nan) for x in (k, v))
    operands = {i: Operand(x) for i, x in enumerate((q, k, v, *new))}
    operands[1] = Operand(k, (n, None))
    close(run_full(attention_task, operands, ())[:1], [want])


@pytest.mark.parametrize("n", first_quick(LENGTHS[::-1], 3))
@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_a_fold(
    n: int,
    parts: int,
    attention_task: TaskDef,
    attention_values: list[Array],
    fold_part: Any,
) -> None:
    q, k, v, *new = attention_values
    want = attention(q, k[:n], v[:n], *new)
    k, v = (np.where(np.arange(ROWS)[:, None] < n, x, np.nan) for x in (k, v))
    blocks, values = -(-n // BLOCK), [q, k, v, *new]
    cuts: list[list[Array]] = []
    for p in range(parts):
        first = p * blocks // parts * BLOCK
        last = min(n, (p + 1) * blocks // parts * BLOCK)
        cuts.append(fold_part(p, values, first, last - first))
    joined = [jnp.stack(c) for c in zip(*cuts, strict=True)]
    after = {i: Operand(values[i]) for i in attention_task.after}
    close(run_combine(attention_task, after, (), joined)[:1], [want])


@mk.task
def count_rows(x: Array, s: Array) -> Array:
    """5 + the number of rows: its init is used once, its identity elsewhere."""
    init = jnp.full((1, 1), 5.0)

    def body(c: Array, _: tuple[Array, ...], valid: Array) -> Array:
        return c + jnp.sum(valid.astype(jnp.float32))

    return x + mk.fold(
        body, init, (s,), block=4, merge=lambda a, b: a + b, identity=init * 0
    )


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("n", first_quick([5, 0, 1, 3, 4, 12], 2))
def test_init_is_used_once_and_empty_parts_give_the_identity(
    parts: int, n: int
) -> None:
    x, s = normal(0, 1, 1), normal(1, 12, 8)
    task = defined(count_rows, x, s)
    blocks = -(-n // 4)
    cuts: list[Array] = []
    for p in range(parts):
        first = p * blocks // parts * 4
        count = min(n, (p + 1) * blocks // parts * 4) - first
        stream = Operand(s, (count, None), first)
        cuts += run_partial(task, {0: Operand(x), 1: stream}, (), p)
    got = run_combine(task, {0: Operand(x)}, (), [jnp.stack(cuts)])
    close(got, [x + 5 + n])


@mk.task
def sum_of_products(x: Array, s: Array) -> Array:
    """sum(x @ s.T)."""

    def body(c: Array, at: tuple[Array, ...], _: Array) -> Array:
        return c + jnp.sum(mk.dot(x, at[0]), axis=-1, keepdims=True)

    return mk.fold(body, jnp.zeros((1, 1)), (s,), block=4)


def test_a_fold_reads_rows_of_a_larger_array() -> None:
    x, s = normal(0, 1, 8), normal(1, 12, 8)
    table = np.full((40, 8), np.nan, np.float32)
    table[17:24] = s[:7]
    task = defined(sum_of_products, x, s)
    got = run_full(task, {0: Operand(x), 1: Operand(table, (7, None), 17)}, ())
    close(got, [np.sum(x @ s[:7].T, keepdims=True)])


# ----------------------------------------------------------------- other primitives


@mk.task
def masked_position(x: Array) -> Array:
    """x where it exists, else -1, plus the position in the grid."""
    return jnp.where(mk.valid(x, 1), x, -1.0) + mk.program_id(1).astype(jnp.float32)


def test_extents_and_positions_come_from_the_caller() -> None:
    x = normal(0, 2, 5)
    task = defined(masked_position, x)
    run = jax.jit(lambda n, i: run_full(task, {0: Operand(x, (None, n))}, (9, i)))
    want = np.concatenate([x[:, :3], np.full((2, 2), -1)], axis=1) + 7
    close(run(3, 7), [want])


def test_zero_beyond_hides_nan() -> None:
    x = np.full((4, 6), np.nan, np.float32)
    x[:2, :3] = 1
    got = zero_beyond(x, (2, 3))
    assert np.sum(got) == 6
    assert zero_beyond(x, (None, None)) is x


def test_vmap_over_instances(
    attention_task: TaskDef, attention_values: list[Array]
) -> None:
    q, k, v, *new = attention_values

    def run(n: Array, first: Array) -> Array:
        streams = {i: Operand(x, (n, None), first) for i, x in ((1, k), (2, v))}
        others = {0: Operand(q), 3: Operand(new[0]), 4: Operand(new[1])}
        return run_full(attention_task, others | streams, ())[0]

    pairs = ((0, 0), (40, 3), (5, 90))
    got = jax.vmap(run)(*(jnp.array(x) for x in zip(*pairs, strict=True)))
    want = [attention(q, k[f : f + n], v[f : f + n], *new) for n, f in pairs]
    close(list(got), want)
