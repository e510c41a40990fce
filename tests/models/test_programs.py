"""The decode programs against Hugging Face's results, token by token."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.machine import H200
from models import programs
from models.cache import KVCache
from models.config import ModelConfig
from models.decode import (
    DecodeStep,
    argument_shapes,
    decode_params,
    teacher_forced,
)
from models.params import Params
from models.registry import SHAPES, family_of, random_params
from models.weights import load
from tests.fidelity import mean_kl
from tests.tiers import first_quick

NAMES = ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16", "qwen3_untied"]
TOLERANCE = 1e-3  # of f32 logits, as in test_forward.py
IMPLEMENTATIONS = ["xla", pytest.param("simulate", marks=pytest.mark.slow)]


# ------------------------------------------------------------- against Hugging Face


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", first_quick(NAMES))
def test_float32_sequence(fixtures: Path, name: str, implementation: str) -> None:
    oracle = np.load(fixtures / name / "oracle.npz")
    config, params = load(fixtures / name, "float32")
    ids = np.concatenate([oracle["prompt_ids"], oracle["teacher_ids"]])[None]
    logits = teacher_forced(config, params, ids, implementation=implementation)
    np.testing.assert_allclose(logits[0], oracle["logits_f32"], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "simulate"])
@pytest.mark.parametrize("name", NAMES)
def test_float32_rows_of_three_lengths(
    fixtures: Path, name: str, implementation: str
) -> None:
    oracle = np.load(fixtures / name / "oracle.npz")
    config, params = load(fixtures / name, "float32")
    ids, lengths = oracle["batch_ids"], oracle["batch_lens"]
    logits = teacher_forced(config, params, ids, implementation=implementation)
    last = logits[np.arange(3), lengths - 1]
    np.testing.assert_allclose(last, oracle["batch_logits_f32"], atol=TOLERANCE, rtol=0)
    assert not logits[0, lengths[0] :].any()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "simulate"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_loses_no_more_than_hugging_face(
    fixtures: Path, name: str, implementation: str
) -> None:
    oracle = np.load(fixtures / name / "oracle.npz")
    config, params = load(fixtures / name, "bfloat16")
    ids = np.concatenate([oracle["prompt_ids"], oracle["teacher_ids"]])[None]
    logits = teacher_forced(config, params, ids, implementation=implementation)[0]
    exact, theirs = oracle["logits_f32"], oracle["logits_bf16"]
    assert np.abs(logits - exact).max() <= 1.25 * np.abs(theirs - exact).max()
    assert mean_kl(exact, logits) <= 1.25 * mean_kl(exact, theirs)


# ------------------------------------------------------------- the program on its own


@pytest.fixture(scope="module", params=[NAMES[0], *NAMES[2:]])
def model(request: pytest.FixtureRequest) -> tuple[ModelConfig, Params]:
    folder = Path(__file__).parents[1] / "fixtures" / request.param
    config, params = load(folder, "bfloat16")
    return config, decode_params(config, params)


def filled(config: ModelConfig, lengths: list[int], slots: int) -> KVCache:
    """A cache with random tokens, and NaN in unused slots."""
    size = (config.num_layers, len(lengths), config.num_kv_heads, slots)
    size = (*size, config.head_dim)
    used = np.arange(slots) < np.array(lengths)[:, None]
    noise = jax.random.normal(jax.random.key(0), (2, *size), jnp.bfloat16)
    k, v = jnp.where(used[None, None, :, None, :, None], noise, jnp.nan)
    return KVCache(k, v, jnp.array(lengths, jnp.int32))


@pytest.mark.slow
def test_unused_slots_may_hold_nan(model: tuple[ModelConfig, Params]) -> None:
    config, params = model
    step = DecodeStep(config, 3, 64, logits=True, implementation="xla")
    logits, cache = step(params, filled(config, [0, 5, 63], 64), jnp.array([3, 4, 5]))
    assert np.isfinite(logits).all()
    assert cache.lengths.tolist() == [1, 6, 64]
    new = np.isfinite(np.asarray(cache.k, np.float32)).all((0, 2, 4)).sum(1)
    assert new.tolist() == [1, 6, 64]


@pytest.mark.slow
def test_a_row_does_not_depend_on_others(model: tuple[ModelConfig, Params]) -> None:
    config, params = model
    step = DecodeStep(config, 3, 64, logits=True, implementation="xla")
    first, _ = step(params, filled(config, [9, 20, 30], 64), jnp.array([3, 4, 5]))
    other = filled(config, [9, 20, 30], 64)
    other = replace(
        other, k=other.k.at[:, 1].set(jnp.nan), lengths=jnp.array([9, 20, 2])
    )
    second, _ = step(params, other, jnp.array([3, 9, 9]))
    assert step.kernel.traces == 1
    np.testing.assert_array_equal(first[0], second[0])


@pytest.mark.slow
def test_tokens_are_the_largest_scores(
    model: tuple[ModelConfig, Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, params = model
    tokens, cache = jnp.array([3, 4, 5]), filled(config, [9, 20, 30], 64)
    logits, _ = DecodeStep(config, 3, 64, logits=True, implementation="xla")(
        params, cache, tokens
    )
    want = np.argmax(logits, -1)
    # With blocks of 64 tokens and at most 3 candidates: two more rounds.
    monkeypatch.setattr(programs, "MOST_CANDIDATES", 3)
    program = family_of(config).decode_program(config, 3, 64, vocabulary_rows=64)
    kernel = mk.megakernel(program, implementation="xla")
    found, _ = kernel(params, filled(config, [9, 20, 30], 64), tokens)
    np.testing.assert_array_equal(found, want)


@pytest.mark.slow
def test_of_equal_scores_the_lowest_token_wins(
    model: tuple[ModelConfig, Params],
) -> None:
    config, params = model
    name = "embed" if config.tied else "head"
    same = {**params, name: jnp.ones_like(params[name])}
    step = DecodeStep(config, 2, 64, implementation="xla")
    tokens, _ = step(same, filled(config, [3, 4], 64), jnp.array([3, 4]))
    assert tokens.tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-3-270m", "qwen3-0.6b"])
def test_padded_tokens_never_win(name: str) -> None:
    """A vocabulary that no block divides, and every score below zero."""
    config = replace(
        SHAPES[name],
        vocab_size=300,
        hidden_size=128,
        intermediate_size=192,
        num_layers=1,
        head_dim=64,
        tied=False,
        **({"layer_is_global": (False,)} if name.startswith("gemma") else {}),
    )
    params = decode_params(config, random_params(config, jax.random.key(1)))
    step = DecodeStep(config, 1, 64, logits=True, implementation="xla")
    scores, _ = step(params, filled(config, [3], 64), jnp.array([3]))
    sign = jnp.sign(scores[0])[:, None].astype(jnp.bfloat16)
    below = {**params, "head": -params["head"] * sign}
    scores, _ = step(below, filled(config, [3], 64), jnp.array([3]))
    assert float(scores.max()) < 0
    assert scores.shape == (1, 300)
    greedy = DecodeStep(config, 1, 64, implementation="xla")
    token, _ = greedy(below, filled(config, [3], 64), jnp.array([3]))
    assert token.tolist() == [int(jnp.argmax(scores[0]))]


# ------------------------------------------------------------- lowering


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8, 16])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-3-270m", "qwen3-0.6b"])
def test_a_step_is_one_custom_call(name: str, batch: int) -> None:
    config = SHAPES[name]
    step = DecodeStep(config, batch, 2048, machine=H200)
    args = argument_shapes(config, batch, 2048)
    traced = jax.jit(step, donate_argnums=1).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @(\w+)", text)
    assert [c for c in calls if c.startswith("mosaic_gpu")] == ["mosaic_gpu_v2"]


@pytest.mark.slow
def test_float32_weights_are_no_stream_of_the_kernel(
    model: tuple[ModelConfig, Params],
) -> None:
    config, _ = model
    step = DecodeStep(config, 1, 64, implementation="mosaic_gpu", machine=H200)
    args = argument_shapes(config, 1, 64, jnp.float32)
    with pytest.raises(mk.PlanError, match=r"operands of the tensor cores"):
        step.kernel.lower(*args, platforms=("cuda",)).as_text()
