"""What `define` finds in a task: uses, streams, columns, the cut and shared memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mkdsl as mk
from mkdsl.errors import NO_SRC
from mkdsl.lang.body import is_literal
from mkdsl.lang.program import Dot, Fold, Scratch, TaskDef
from mkdsl.lang.task import Block, define
from models.tasks.attention import attend
from models.tasks.linear import gate_up, project, residual

Array = Any
BF16, F32, I32 = "bfloat16", "float32", "int32"


def block(*shape: int, dtype: str = BF16) -> Block:
    return Block(shape, dtype)


def defined(task: Any, *blocks: Block, **static: Any) -> TaskDef:
    task = task if isinstance(task, type(residual)) else mk.task(task)
    return define(functools.partial(task, **static), blocks, NO_SRC)


def test_a_task_is_an_ordinary_function() -> None:
    x = np.ones((2, 64), np.float32)
    w = np.ones((8, 64), np.float32)
    y = residual(np.zeros((2, 8), np.float32), x, w)
    np.testing.assert_array_equal(y, np.full((2, 8), 64.0))
    np.testing.assert_array_equal(
        jax.jit(residual)(np.zeros((2, 8), np.float32), x, w), y
    )
    many = jax.vmap(residual, in_axes=(None, None, 0))(y, x, np.stack([w, w]))
    assert many.shape == (2, 2, 8)
    assert "residual" in repr(residual)
    assert residual.__doc__


def test_a_task_may_be_any_callable() -> None:
    task = mk.task(jnp.square)
    assert task.name == "square"
    np.testing.assert_array_equal(task(np.float32([3])), np.float32([9]))


def test_uses_of_operands() -> None:
    def task(
        x: Array, gain: Array, row: Array, top: Array, n: Array, w: Array
    ) -> Array:
        return mk.dot(x * gain * row, w) * top + n

    found = defined(
        task,
        block(4, 64),
        block(64),
        block(1, 64),
        block(4, 1, dtype=F32),
        block(dtype=I32),
        block(128, 64),
    )
    assert [p.use for p in found.params] == [
        "tile",
        "vector",
        "vector",
        "tile",
        "scalar",
        "stream",
    ]
    assert [p.name for p in found.params] == ["x", "gain", "row", "top", "n", "w"]
    assert found.params[1].shape == (1, 64)
    assert found.columns == 4
    assert (found.results[0].shape, found.results[0].dtype) == ((4, 128), F32)


def test_a_row_of_a_task_of_one_column_is_a_tile() -> None:
    found = defined(lambda x, g: x * g, block(1, 64), block(64))
    assert [p.use for p in found.params] == ["tile", "vector"]
    assert found.results[0].use == "tile"


@pytest.mark.parametrize(
    ("task", "shape", "use"),
    [
        (lambda x, g: (x * g, g * 2), (1, 64), "vector"),
        (lambda x, g: (x * g, jnp.sum(x.astype(F32), -1)), (4, 1), "tile"),
        (
            lambda x, g: (x * g, jnp.sum(x.astype(F32), -1, keepdims=True)),
            (4, 1),
            "tile",
        ),
        (lambda x, g: (x * g, jnp.arange(64)), (1, 64), "vector"),
        (lambda x, g: (x * g, jnp.zeros((4, 64))), (4, 64), "tile"),
    ],
)
def test_results(task: Any, shape: tuple[int, ...], use: str) -> None:
    result = defined(task, block(4, 64), block(64)).results[1]
    assert (result.shape, result.use) == (shape, use)


def test_a_dot_of_an_operand_as_it_stands() -> None:
    found = defined(residual, block(4, 8), block(4, 64), block(8, 64))
    assert found.streams == (Dot(1, 2, 8, 64),)
    assert found.cut == "dot"
    assert (found.before, found.after) == ((1, 2), (0,))
    assert found.scratch == ()


def test_a_dot_of_a_norm_is_stored_over_its_operand() -> None:
    found = defined(project, block(4, 64), block(64), block(8, 64), eps=1e-5)
    assert found.streams == (Dot(None, 2, 8, 64),)
    assert (found.before, found.after) == ((0, 1, 2), ())
    assert found.scratch == ()


def test_a_computed_left_side_beside_its_operand_needs_scratch() -> None:
    def task(x: Array, w: Array) -> tuple[Array, Array]:
        return mk.dot(jnp.tanh(x), w), x

    assert defined(task, block(4, 64), block(8, 64)).scratch == (
        Scratch("operand", 64),
    )


def test_what_the_epilogue_needs_of_a_left_side_needs_scratch() -> None:
    def task(x: Array, w: Array) -> Array:
        y = jnp.tanh(x)
        return mk.dot(y, w) + y

    # A part may overwrite x, the whole may not: the plan serves both.
    found = defined(task, block(4, 64), block(64, 64))
    assert found.scratch == (Scratch("operand", 64),)


def test_two_dots_of_one_left_side() -> None:
    blocks = block(4, 64), block(64), block(8, 64), block(8, 64)
    found = defined(gate_up, *blocks, eps=1e-5)
    assert found.streams == (Dot(None, 2, 8, 64), Dot(None, 3, 8, 64))
    assert found.cut == "dot"


def test_a_vector_is_a_computed_left_side() -> None:
    def task(g: Array, y: Array, w: Array) -> Array:
        return mk.dot(g, w) + y

    row = defined(task, block(1, 64), block(4, 8, dtype=F32), block(8, 64))
    assert row.streams == (Dot(None, 1 + 1, 8, 64),)
    # Accumulators of parts have all columns.
    assert row.cut == "none"
    assert row.scratch == (Scratch("operand", 64),)
    flat = defined(lambda g, w: mk.dot(g, w), block(64), block(8, 64))
    assert flat.streams == (Dot(None, 1, 8, 64),)
    assert (flat.results[0].shape, flat.results[0].use) == ((1, 8), "vector")


@pytest.mark.parametrize(
    "task",
    [
        lambda x, v, w: mk.dot(mk.dot(x, v).astype(x.dtype), w),
        lambda x, v, w: mk.dot(x, v) + mk.dot(x[:, :64], w),
    ],
)
def test_dots_that_may_not_be_split(task: Any) -> None:
    found = defined(task, block(4, 128), block(64, 128), block(64, 64))
    assert found.cut == "none"
    assert found.after == tuple(sorted({*found.before, *found.after}))


def test_a_fold_with_a_merge_is_the_cut() -> None:
    rows = block(256, 64)
    found = defined(
        attend,
        block(4, 64),
        rows,
        rows,
        block(1, 64),
        block(1, 64),
        scale=1.0,
        block=64,
    )
    carries = (((4, 1), F32), ((4, 1), F32), ((4, 64), F32))
    assert found.streams == (Fold((1, 2), 64, carries),)
    assert found.cut == "fold"
    assert (found.before, found.after) == ((0, 1, 2, 3, 4), ())
    # The weights of a block are the left side of the second dot.
    assert found.scratch == (Scratch("operand", 64),)


def test_a_fold_without_a_merge_is_not_split() -> None:
    def task(q: Array, k: Array) -> Array:
        step = lambda c, b, v: c + mk.dot(q, b[0])  # noqa: E731
        return mk.fold(step, jnp.zeros((4, 64)), (k,), block=64)

    found = defined(task, block(4, 64), block(256, 64))
    assert (found.cut, found.before) == ("none", ())


def test_rolls_need_scratch_on_their_side_of_the_cut() -> None:
    def task(x: Array, w: Array) -> Array:
        return mk.roll(mk.dot(mk.roll(x, 3), w), 1)

    found = defined(task, block(4, 128), block(64, 128))
    assert found.scratch == (
        Scratch("roll", 128),
        Scratch("operand", 128),
        Scratch("roll", 64, after_cut=True),
    )


def test_digest_tells_bodies_apart() -> None:
    def of(task: Any, *shape: int) -> str:
        return defined(task, block(*shape)).digest

    double, triple = (lambda x: x * 2), (lambda x: x * 3)
    assert of(double, 4, 64) == of(double, 4, 64)
    assert len({of(double, 4, 64), of(triple, 4, 64), of(double, 8, 64)}) == 3


def test_constants_are_bound_by_keyword_once_or_twice() -> None:
    @mk.task
    def scaled(x: Array, *, by: float, plus: float) -> Array:
        return x * by + plus

    inner = functools.partial(scaled, by=2.0, plus=1.0)
    outer = functools.partial(inner, plus=3.0)
    body = define(outer, [block(4, 64)], NO_SRC).body
    literals = [float(v.val) for e in body.equations for v in e.invars if is_literal(v)]
    assert literals == [2.0, 3.0]


def test_any_number_of_operands() -> None:
    found = defined(lambda *xs: sum(xs[1:], xs[0]), *[block(4, 64)] * 3)
    assert [p.name for p in found.params] == ["xs0", "xs1", "xs2"]


def test_a_reduction_over_masked_padding() -> None:
    def task(x: Array) -> Array:
        y = jnp.where(mk.valid(x) & (x > 0), x, 0).astype(jnp.float32)
        return jnp.sum(y, -1, keepdims=True)

    ragged = Block((4, 64), BF16, (False, True))
    assert defined(task, ragged).results[0].shape == (4, 1)


def test_equal_equations_are_made_once() -> None:
    def task(x: Array) -> Array:
        return lax.rsqrt(jnp.sum(x * x, -1, keepdims=True)) + lax.rsqrt(
            jnp.sum(x * x, -1, keepdims=True)
        )

    body = defined(task, block(4, 1024, dtype=F32)).body
    names = [e.primitive.name for e in body.equations]
    assert names.count("reduce_sum") == names.count("rsqrt") == 1
