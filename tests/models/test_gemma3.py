"""What Gemma 3 does and Llama does not, each with numbers worked out by hand."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from models import gemma3
from models.cache import KVCache
from models.config import ModelConfig
from models.decode import DecodeStep, decode_params
from models.params import Params
from models.programs import Step
from models.registry import SHAPES
from models.tasks import sample, sandwich
from models.weights import load
from tests.gpu.decoding import filled_cache


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("name", "factor"), [("gemma-3-270m", 25.25), ("gemma-3-1b", 34.0)]
)
def test_embeddings_are_multiplied_by_a_rounded_root(
    name: str, factor: float, dtype: Any
) -> None:
    """sqrt(640) is 25.298.. and sqrt(1152) 33.941.., in bfloat16 25.25 and 34."""
    config = SHAPES[name]
    if dtype == jnp.float32:
        factor = config.hidden_size**0.5
    step = Step(config, 2, 64, dtype)
    embed = partial(sample.embed_branch, scale=config.hidden_size**0.5)
    table = jnp.ones((4, config.hidden_size), dtype)
    run = mk.megakernel(partial(step.embed, embed, 2), implementation="xla")
    x, y = run(table, jnp.array([3, 0], jnp.int32))
    np.testing.assert_allclose(x.astype(jnp.float32), factor, rtol=1e-6)
    assert not y.any()


def test_norms_multiply_by_one_plus_the_gain() -> None:
    x = jnp.array([[3.0, -4.0, 0.0, 0.0]])
    gain = jnp.array([0.0, 1.0, 5.0, 5.0])
    # The root of the mean square is 2.5.
    want = [[1.2, -3.2, 0.0, 0.0]]
    config = SHAPES["gemma-3-270m"]
    found = gemma3._norm(config, x, gain)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    # Of the branch, before it is added; a gain of -1 takes it away.
    added = sandwich.add_branch(x, x, x, gain, eps=1e-6)
    np.testing.assert_allclose(added, x + jnp.array(want), rtol=1e-5)
    np.testing.assert_allclose(sandwich.add_branch(x, x, x, gain * 0 - 1, eps=1e-6), x)


@pytest.fixture(scope="module")
def model() -> tuple[ModelConfig, Params]:
    folder = Path(__file__).parents[1] / "fixtures" / "gemma3_window16"
    return load(folder, "float32")


def cache(config: ModelConfig) -> KVCache:
    """One of its own for every call, in float32."""
    made = filled_cache(config, (9, 30), 64, jax.random.key(0))
    return replace(made, k=made.k.astype(jnp.float32), v=made.v.astype(jnp.float32))


def logits(config: ModelConfig, params: Params) -> np.ndarray:
    step = DecodeStep(config, 2, 64, logits=True, implementation="xla")
    out, _ = step(decode_params(config, params), cache(config), jnp.array([3, 4]))
    return np.asarray(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["input_norm", "post_norm", "pre_ffn_norm", "post_ffn_norm", "q_norm", "k_norm"],
)
def test_every_gain_of_the_program_has_its_place(
    model: tuple[ModelConfig, Params], name: str
) -> None:
    """The plain forward pass moves by as much when one gain of one layer changes."""
    config, params = model
    layers = params["layers"]
    changed = layers[name].at[config.num_layers - 1].add(0.5)
    other = {**params, "layers": {**layers, name: changed}}
    moved = logits(config, other) - logits(config, params)
    assert np.abs(moved).max() > 0.02
    expected = plain(config, other) - plain(config, params)
    np.testing.assert_allclose(moved, expected, atol=1e-3, rtol=0)


def plain(config: ModelConfig, params: Params) -> np.ndarray:
    ids, one = jnp.array([[3], [4]]), jnp.ones(2, jnp.int32)
    return np.asarray(gemma3.prefill(config, params, cache(config), ids, one)[0])
