"""Arrays of more than 2^31 elements: no offset is counted in 32 bits.

Rows of tasks lie at the far ends of stacked weights, a table and a state; elsewhere
the arrays are zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.machine import H200
from tests.lower.emit.lowered import kernels

Array = Any
BF16 = jnp.bfloat16
# Two layers, so that both a layer and the offset of a layer are beyond 2^31 elements.
LAYERS, ROWS, DEPTH = 2, (1 << 18) + 64, 8192
SLOTS, WIDTH = (1 << 23) + 8, 512
BATCH, TILE = 8, 64
LAST = ROWS // TILE - 1

pytestmark = pytest.mark.timeout(120, method="thread")


@mk.task
def product(x: Array, w: Array) -> Array:
    return mk.dot(x, w).astype(x.dtype)


@mk.task
def same(row: Array) -> Array:
    return row


def far_ends(table: Array, state: Array, x: Array, at: Array) -> Any:
    """Products with the first and the last rows of both layers, a row of the table
    for each of `at`, and these rows as the last ones of the state.
    """

    def layer(carry: tuple[Array], w: Array, i: Any) -> tuple[Array]:
        (x,) = carry
        y = mk.call(
            product,
            grid=(DEPTH // TILE,),
            in_specs=(mk.whole, mk.Spec((TILE, DEPTH), lambda j: (j % 2 * LAST, 0))),
            out_specs=mk.Spec((BATCH, TILE), lambda j: (0, j)),
            out_shape=mk.Shape((BATCH, DEPTH), BF16),
        )(x, w)
        return (y,)

    (y,) = mk.scan(layer, (x,), table)
    rows = mk.call(
        same,
        grid=(BATCH,),
        in_specs=mk.Spec((1, WIDTH), lambda b: (at[b], 0)),
        out_specs=mk.Spec((1, WIDTH), lambda b: (b, 0)),
        out_shape=mk.Shape((BATCH, WIDTH), BF16),
    )(table[LAYERS - 1])
    state = mk.call(
        same,
        grid=(BATCH,),
        in_specs=mk.Spec((1, WIDTH), lambda b: (b, 0)),
        out_specs=mk.Into(state, (1, WIDTH), lambda b: (SLOTS - BATCH + b, 0)),
        out_shape=None,
    )(rows)
    return y, rows, state


def shapes() -> tuple[Any, ...]:
    return (
        jax.ShapeDtypeStruct((LAYERS, ROWS, DEPTH), BF16),
        jax.ShapeDtypeStruct((SLOTS, WIDTH), BF16),
        jax.ShapeDtypeStruct((BATCH, DEPTH), BF16),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    )


@pytest.mark.slow
def test_it_lowers_for_cuda() -> None:
    assert all(np.prod(s.shape, dtype=np.int64) > 2**31 for s in shapes()[:2])
    step = mk.megakernel(
        far_ends, donate_argnums=1, implementation="mosaic_gpu", machine=H200
    )
    traced = jax.jit(step, donate_argnums=1).trace(*shapes())
    assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1


@pytest.mark.gpu
def test_the_far_ends_are_read_and_written() -> None:
    ends = jax.random.normal(jax.random.key(0), (LAYERS, 2, TILE, DEPTH)) / DEPTH**0.5
    ends = ends.astype(BF16)
    x = jax.random.normal(jax.random.key(1), (BATCH, DEPTH)).astype(BF16)
    at = jnp.arange(BATCH) * 3 + ROWS - TILE

    @jax.jit
    def make(ends: Array) -> tuple[Array, Array]:
        table = jnp.zeros((LAYERS, ROWS, DEPTH), BF16)
        table = table.at[:, :TILE].set(ends[:, 0]).at[:, -TILE:].set(ends[:, 1])
        return table, jnp.zeros((SLOTS, WIDTH), BF16)

    step = mk.megakernel(far_ends, donate_argnums=1, implementation="mosaic_gpu")
    y, rows, state = jax.jit(step, donate_argnums=1)(*make(ends), x, at)

    want = x.astype(jnp.float32)
    for layer in range(LAYERS):
        w = jnp.tile(ends[layer].reshape(-1, DEPTH), (DEPTH // TILE // 2, 1))
        want = want @ w.astype(jnp.float32).T
        want = want.astype(BF16).astype(jnp.float32)
    np.testing.assert_allclose(y.astype(jnp.float32), want, atol=0.05)
    read = ends[LAYERS - 1, 1][at - (ROWS - TILE), :WIDTH]
    np.testing.assert_array_equal(rows, read)
    np.testing.assert_array_equal(state[-BATCH:], read)
    # Nothing else was written: as many elements differ from zero as these rows have.
    count = jax.jit(lambda s: jnp.sum(jnp.any(s != 0, axis=-1)))(state)
    assert int(count) == BATCH
