"""Numbers that show where something is rounded, padded or chosen in a wrong way."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.pipeline import Options
from models.config import Rope
from models.llama import LlamaConfig
from models.programs import Step
from models.tasks import linear

Array = Any
BF16 = jnp.bfloat16

pytestmark = pytest.mark.timeout(90, method="thread")
everywhere = pytest.mark.parametrize(
    "implementation",
    ["xla", "simulate", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)


def step_of(hidden: int, vocab: int = 512, batch: int = 3) -> Step:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        norm_eps=1e-6,
        tied=True,
        max_length=64,
        rope=Rope(1e4),
    )
    return Step(config, batch, 64, BF16)


def run(f: Any, implementation: Any, *args: Array, parts: int = 1) -> Any:
    splits = (("y", parts),) if parts > 1 else ()
    options = Options(decompose=DecomposeOptions(split=False, splits=splits))
    return mk.megakernel(f, implementation=implementation, options=options)(*args)


# ---------------------------------------------------------------------------- sums


@pytest.mark.parametrize("parts", [1, 4])
@everywhere
def test_a_dot_of_ones_counts_them(parts: int, implementation: Any) -> None:
    """A running sum in bfloat16 stops at 256."""
    step, k = step_of(8192), 8192

    def f(x: Array, w: Array) -> Array:
        return step.by_rows(linear.product, "y", 128, (x,), w)

    x, w = jnp.ones((3, k), BF16), jnp.ones((128, k), BF16)
    assert (run(f, implementation, x, w, parts=parts) == k).all()


@everywhere
def test_a_mean_square_is_that_of_all_features(implementation: Any) -> None:
    step, k = step_of(8192), 8192

    def f(x: Array, gain: Array, w: Array) -> Array:
        project = partial(linear.project, eps=1e-6)
        return step.by_rows(project, "y", 128, (x, gain), w, normed=True)

    x = jnp.full((3, k), 3, BF16)
    found = run(f, implementation, x, jnp.ones(k, BF16), jnp.ones((128, k), BF16))
    # Every feature of the norm is 1.
    assert (found == k).all()


# ------------------------------------------------------------------------- choices


def choose(x: Array, table: Array, implementation: Any) -> tuple[list[int], Any]:
    vocab, hidden = table.shape
    step = step_of(hidden, vocab, x.shape[0])

    def f(x: Array, gain: Array, table: Array) -> Any:
        return step.greedy(x, gain, table, unit_offset=False)

    gain = jnp.ones(hidden, BF16)
    token, score = run(f, implementation, x, gain, table)
    return token.tolist(), np.asarray(score)


@pytest.mark.parametrize("vocab", [300, 509, 777])
@everywhere
def test_rows_that_pad_the_vocabulary_never_win(
    vocab: int, implementation: Any
) -> None:
    """Every true score is below zero, that of the padding."""
    best = np.array([0, vocab - 1, vocab // 2])
    table = np.full((vocab, 128), -0.5, np.float32)
    x = np.zeros((3, 128), np.float32)
    for row, token in enumerate(best):
        x[row, row * 32 : row * 32 + 32] = 1
        table[token, row * 32 : row * 32 + 32] = -0.25
    args = jnp.asarray(x, BF16), jnp.asarray(table, BF16)
    tokens, scores = choose(*args, implementation)
    assert tokens == best.tolist()
    # 32 features of norm 2.
    np.testing.assert_allclose(scores, -0.25 * 32 * 2, rtol=1e-2)


@everywhere
def test_of_equal_scores_the_lowest_token_wins(implementation: Any) -> None:
    """In one tile, in two tiles, and everywhere."""
    table = np.zeros((777, 128), np.float32)
    x = np.zeros((3, 128), np.float32)
    x[0, :32], x[1, 32:64], x[2, 64:96] = 1, 1, 1
    table[[70, 75], :32] = 1
    table[[500, 776, 130], 32:64] = 1
    args = jnp.asarray(x, BF16), jnp.asarray(table, BF16)
    tokens, _ = choose(*args, implementation)
    assert tokens == [70, 130, 0]


# ------------------------------------------------------------------------- lowering


def test_they_lower_for_cuda() -> None:
    from mkdsl.lower.machine import H200
    from tests.lower.emit.lowered import kernels

    step = step_of(8192)

    def f(x: Array, w: Array) -> Array:
        return step.by_rows(linear.product, "y", 128, (x,), w)

    for parts in (1, 4):
        splits = (("y", parts),) if parts > 1 else ()
        options = Options(decompose=DecomposeOptions(split=False, splits=splits))
        kernel = mk.megakernel(
            f, implementation="mosaic_gpu", machine=H200, options=options
        )
        args = jnp.ones((3, 8192), BF16), jnp.ones((128, 8192), BF16)
        traced = jax.jit(kernel).trace(*args)
        assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1
