"""Attention over a cache against float64: heads, lengths, windows, scores, parts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.reference import Past, attention
from tests.gpu.attending import (
    Inputs,
    attend,
    exact,
    inputs,
    low_scores,
    megakernel,
)
from tests.tiers import first_quick

Array = Any

# Of results around 1. In bfloat16 weights and results are rounded, 2^-9 of each.
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 0.02}

pytestmark = pytest.mark.timeout(150, method="thread")
everywhere = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param("xla", jnp.float32, id="xla"),
        pytest.param("simulate", jnp.float32, marks=pytest.mark.slow, id="simulate"),
        pytest.param("xla", jnp.bfloat16, marks=pytest.mark.slow, id="xla-bf16"),
        pytest.param("mosaic_gpu", jnp.bfloat16, marks=pytest.mark.gpu, id="gpu"),
    ],
)
# Around every multiple of a block of 64 tokens.
AROUND = (0, 1, 63, 64, 65, 127, 128, 129)
# The same at the lengths where public implementations lose their way.
LONG = (4095, 4096, 4097, 8191, 8192, 8193, 32703, 32704, 32767)


def agrees(found: np.ndarray, x: Inputs, dtype: Any, **options: Any) -> None:
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, exact(x, **options), atol=TOLERANCE[dtype])


@everywhere
@pytest.mark.parametrize(
    "heads",
    first_quick([(28, 4), (40, 8), (24, 8), (4, 1), (6, 2), (5, 1), (3, 3)]),
    ids=str,
)
def test_every_query_head_reads_its_own_keys(
    heads: tuple[int, int], implementation: Any, dtype: Any
) -> None:
    x = inputs(*heads, 64, (70, 3), 128, dtype)
    agrees(attend(x, implementation)[0], x, dtype)


@pytest.mark.parametrize(
    "heads", first_quick([(28, 4), (40, 8), (24, 8), (4, 1)]), ids=str
)
def test_the_plain_forward_pass_does_so_too(heads: tuple[int, int]) -> None:
    x = inputs(*heads, 64, (70, 3), 128, jnp.float32)
    new, past = (
        Past(k, v) for k, v in ((x.k[:, None], x.v[:, None]), (x.k_old, x.v_old))
    )
    start = jnp.array(x.lengths)
    out = attention(x.q[:, None], new, past, start, scale=64**-0.5)
    agrees(np.asarray(out).reshape(x.q.shape), x, jnp.float32)


@everywhere
@pytest.mark.parametrize("parts", first_quick([3, 1, 2]))
def test_lengths_around_every_block(
    parts: int, implementation: Any, dtype: Any
) -> None:
    x = inputs(3, 1, 64, AROUND, 192, dtype)
    found, cache = attend(x, implementation, parts=parts)
    agrees(found, x, dtype)
    for new, one in ((cache.k, x.k), (cache.v, x.v)):
        new = new.reshape(x.k_old.shape)
        for row, n in enumerate(AROUND):
            assert (new[row, :, n] == one[row]).all()
            assert jnp.isnan(new[row, :, n + 1 :]).all()


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("parts", [1, 7])
def test_long_contexts(parts: int, implementation: Any, dtype: Any) -> None:
    for lengths in (LONG[:3], LONG[3:6], LONG[6:]):
        x = inputs(3, 1, 64, lengths, 32768, dtype)
        agrees(attend(x, implementation, parts=parts)[0], x, dtype)


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("window", [1, 2, 16, 64, 65, 512])
def test_a_window_includes_the_current_token(
    window: int, implementation: Any, dtype: Any
) -> None:
    lengths = (0, window - 1, window, 600)
    x = inputs(4, 1, 64, lengths, 640, dtype)
    found, _ = attend(x, implementation, window=window)
    agrees(found, x, dtype, window=window)
    # One token further back changes no bit, whatever it is.
    beyond = 600 - window
    hidden = x.k_old.at[3, :, beyond].set(jnp.nan), x.v_old.at[3, :, beyond].set(9)
    again, _ = attend(
        replace(x, k_old=hidden[0], v_old=hidden[1]), implementation, window=window
    )
    np.testing.assert_array_equal(again, found)
    if window > 1:
        seen = x.v_old.at[3, :, beyond + 1].add(100)
        other, _ = attend(replace(x, v_old=seen), implementation, window=window)
        assert (other[3] != found[3]).any()


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("far", [1.0, 2.0])
@pytest.mark.parametrize("size", [1e3, 1e31])
def test_no_score_is_below_the_mask(
    size: float, far: float, parts: int, implementation: Any, dtype: Any
) -> None:
    x = low_scores(size, far, dtype)
    agrees(attend(x, implementation, parts=parts)[0], x, dtype)


@everywhere
def test_a_part_without_rows_adds_nothing(implementation: Any, dtype: Any) -> None:
    """Most of sixteen parts have none of these few rows."""
    x = inputs(2, 1, 64, (0, 1, 65), 1024, dtype)
    agrees(attend(x, implementation, parts=16)[0], x, dtype)


@everywhere
@pytest.mark.parametrize("parts", first_quick([4, 1]))
def test_sums_are_not_rounded_on_the_way(
    parts: int, implementation: Any, dtype: Any
) -> None:
    """A sum of 4096 ones in bfloat16, one by one, stops at 256."""
    n = 4096
    x = inputs(1, 1, 64, (n,), n + 64, dtype)
    v = jnp.where(jnp.arange(n + 64) < n // 2, 0, 1).astype(dtype)
    x = replace(x, q=x.q * 0, v_old=x.v_old * 0 + v[None, None, :, None])
    x = replace(x, v=x.v * 0, v_old=jnp.where(jnp.isnan(x.v_old), 0, x.v_old))
    found, _ = attend(x, implementation, parts=parts)
    np.testing.assert_allclose(found, n / 2 / (n + 1), rtol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize("heads", [(40, 8), (24, 8), (28, 4), (4, 1)], ids=str)
def test_it_lowers_for_cuda(heads: tuple[int, int], parts: int) -> None:
    from mkdsl.lower.machine import H200
    from tests.lower.emit.lowered import kernels

    x = inputs(*heads, 64, (5, 6), 1024, jnp.bfloat16)
    step = megakernel(x.sizes, "mosaic_gpu", parts=parts, machine=H200)
    traced = jax.jit(step).trace(x.q, x.k, x.v, x.cache)
    assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1
