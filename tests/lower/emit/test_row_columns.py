"""Single 16-bit columns that lie along the last axis of their array.

A value per column of the task, read from or written to a row of memory: what is a
feature to the tasks before and after is a column to this one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.errors import PlanError
from mkdsl.lower.machine import H200
from tests.lower.emit.lowered import kernels
from tests.lower.emit.test_interpret import interpret

Array = Any
BF16 = jnp.bfloat16
GROUPS, FEATURES = 3, 64


@mk.task
def outer(x: Array, c: Array) -> tuple[Array, Array]:
    """x [N, F], c [N, 1] -> x * c, and the sum of each column [N]."""
    y = x.astype(jnp.float32) * c.astype(jnp.float32)
    return y.astype(x.dtype), jnp.sum(y, axis=-1).astype(x.dtype)


@mk.task
def double(c: Array) -> Array:
    return c * 2


def columns_of(array: Array) -> Array:
    """The last axis of [GROUPS, N] as columns, doubled."""
    n = array.shape[-1]
    spec = mk.Spec((None, n), lambda g: (g, 0), column=True)
    return mk.call(
        double,
        grid=(GROUPS,),
        in_specs=spec,
        out_specs=spec,
        out_shape=mk.Shape(array.shape, array.dtype),
    )(array)


def product(x: Array, c: Array) -> tuple[Array, Array, Array]:
    """x [G, N, F], c [G, N] -> x * c, its sums [G * N] and the doubled sums [G, N]."""
    groups, n, features = x.shape
    tile = mk.Spec((None, n, features), lambda g: (g, 0, 0))
    column = mk.Spec((None, n), lambda g: (g, 0), column=True)
    y, sums = mk.call(
        outer,
        grid=(groups,),
        in_specs=(tile, column),
        out_specs=(tile, column),
        out_shape=(mk.Shape(x.shape, x.dtype), mk.Shape((groups, n), x.dtype)),
    )(x, c)
    return y, sums, columns_of(sums)


def plain(x: Array, c: Array) -> tuple[Array, Array, Array]:
    y = x.astype(jnp.float32) * c.astype(jnp.float32)[..., None]
    sums = jnp.sum(y, axis=-1).astype(x.dtype)
    return y.astype(x.dtype), sums, sums * 2


def arguments(n: int) -> tuple[Array, Array]:
    a, b = jax.random.split(jax.random.key(n))
    x = jax.random.normal(a, (GROUPS, n, FEATURES), BF16)
    return x, jax.random.normal(b, (GROUPS, n), BF16)


def agrees(found: Any, exact: Any) -> None:
    for a, b in zip(found, exact, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("implementation", ["xla", "simulate"])
@pytest.mark.parametrize("n", [64, 128])
def test_columns_on_the_host(n: int, implementation: Any) -> None:
    args = arguments(n)
    agrees(mk.megakernel(product, implementation=implementation)(*args), plain(*args))


@pytest.mark.interpret
@pytest.mark.timeout(240, method="thread")
@pytest.mark.parametrize("n", [64, 128])
def test_columns_in_the_kernel(n: int) -> None:
    agrees(interpret(product, *arguments(n)), plain(*arguments(n)))


@pytest.mark.interpret
@pytest.mark.timeout(240, method="thread")
def test_more_columns_than_one_copy_takes() -> None:
    c = jax.random.normal(jax.random.key(0), (GROUPS, 320), BF16)
    np.testing.assert_array_equal(interpret(columns_of, c), c * 2)


def in_another_view(c: Array) -> Array:
    """Columns written as [G, N] are read as [1, G * N]."""
    sums = columns_of(c).reshape(1, -1)
    n = sums.shape[-1]
    return mk.call(
        double,
        in_specs=mk.whole,
        out_specs=mk.Spec((1, n), lambda: (0, 0)),
        out_shape=mk.Shape((1, n), c.dtype),
    )(sums)


@pytest.mark.interpret
@pytest.mark.timeout(240, method="thread")
def test_columns_written_in_another_view() -> None:
    c = arguments(64)[1]
    np.testing.assert_array_equal(interpret(in_another_view, c), c.reshape(1, -1) * 4)


def lowered(program: Any, *args: Any) -> Any:
    step = mk.megakernel(program, implementation="mosaic_gpu", machine=H200)
    return jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("program", [product, lambda x, c: in_another_view(c)])
def test_columns_lower_to_one_kernel(program: Any) -> None:
    assert len(kernels(lowered(program, *arguments(128)))) == 1


def down_the_first_axis(c: Array) -> Array:
    spec = mk.Spec((64, None), lambda i: (0, i), column=True)
    return mk.call(
        double,
        grid=(c.shape[1],),
        in_specs=spec,
        out_specs=spec,
        out_shape=mk.Shape(c.shape, c.dtype),
    )(c)


def blocks_of_one(c: Array) -> Array:
    spec = mk.Spec((64, 1), lambda i: (0, i))
    return mk.call(
        double,
        grid=(c.shape[1],),
        in_specs=spec,
        out_specs=spec,
        out_shape=mk.Shape(c.shape, c.dtype),
    )(c)


@pytest.mark.parametrize(
    ("program", "shape"),
    [
        (columns_of, (GROUPS, 72)),
        (down_the_first_axis, (64, 8)),
        (blocks_of_one, (64, 8)),
    ],
)
def test_other_narrow_columns_are_refused(program: Any, shape: tuple[int, ...]) -> None:
    c = jax.ShapeDtypeStruct(shape, BF16)
    words = r"block bfloat16\[\d+, 1\]\n(.*\n)*.*multiple of 64 along the last axis"
    with pytest.raises(PlanError, match=words) as error:
        lowered(program, c)
    assert error.value.src.line
