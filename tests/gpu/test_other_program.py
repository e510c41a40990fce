"""A program that is no language model runs everywhere with the same result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mkdsl as mk
from mkdsl.lower.machine import H200
from tests.gpu import codebook
from tests.gpu.codebook import example, plain_recall, recall
from tests.lower.emit.lowered import kernels

Array = Any

# Weights and results are rounded to bf16, 2^-9 relative, of values around 1.
TOLERANCE = 0.02
LAUNCHES = 100

pytestmark = pytest.mark.timeout(90, method="thread")
everywhere = pytest.mark.parametrize(
    "implementation",
    ["xla", "simulate", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)


@everywhere
def test_recall_agrees_with_plain_jax(implementation: Any) -> None:
    args = example()
    nearest, r, trace = mk.megakernel(recall, implementation=implementation)(*args)
    codes, exact_r, exact_trace = plain_recall(*args)
    assert codes.tolist() == [codebook.CODES - 1, 0, codebook.CODES // 2]
    assert nearest.tolist() == codes.tolist()
    np.testing.assert_allclose(r.astype(jnp.float32), exact_r, atol=TOLERANCE)
    np.testing.assert_allclose(trace.astype(jnp.float32), exact_trace, atol=TOLERANCE)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)
def test_a_trace_updated_in_a_loop(implementation: Any) -> None:
    """The trace converges to what is read; what is read stays the same, bitwise."""
    step = mk.megakernel(recall, donate_argnums=1, implementation=implementation)
    book, trace, x = example()
    _, first, _ = step(book, jnp.copy(trace), x)

    @jax.jit
    def run(trace: Array) -> tuple[Array, Array]:
        def one(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
            trace, changes = state
            _, r, trace = step(book, trace, x)
            return trace, changes + jnp.sum(r != first)

        return lax.fori_loop(0, LAUNCHES, one, (trace, jnp.int32(0)))

    trace, changes = run(trace)
    assert int(changes) == 0
    exact = np.asarray(plain_recall(book, trace, x)[1])
    # An update smaller than half a bf16 ulp of the trace, 2^-8 of 1 / RATE, is lost.
    near = np.abs(np.asarray(trace, np.float32) - exact)
    assert near.max() <= TOLERANCE + 2.0**-8 / codebook.RATE * np.abs(exact).max()


def test_it_lowers_to_one_kernel() -> None:
    f = mk.megakernel(
        recall, donate_argnums=1, implementation="mosaic_gpu", machine=H200
    )
    traced = jax.jit(f).trace(*jax.eval_shape(example))
    (kernel,) = kernels(traced.lower(lowering_platforms=("cuda",)))
    state = f"tensor<1x{codebook.QUERIES}x{codebook.WIDTH}xbf16>"
    assert state in {kernel.results[o] for _, o in kernel.aliases}
