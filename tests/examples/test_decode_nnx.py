"""A flax.nnx model of the user's own, decoded by a program, against its own forward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import decode_nnx
from examples.decode_nnx import CONFIG, NAMES, Mine, decode, plain_decode
from models import llama
from models.decode import teacher_forced
from models.nnx import from_nnx

PROMPTS = np.array([[5, 71, 200, 3], [508, 1, 1, 9]], np.int32)
# Of the error of plain JAX in bfloat16, both against the model in float32.
ALLOWED = 1.25


@pytest.fixture(scope="module")
def model() -> Mine:
    return Mine(nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "simulate"])
def test_logits_in_float32(model: Mine, implementation: Any) -> None:
    ids = np.arange(24, dtype=np.int32).reshape(2, 12) * 20
    params = from_nnx(CONFIG, model, NAMES)
    found = teacher_forced(CONFIG, params, ids, implementation=implementation)
    want = model(jnp.asarray(ids))
    assert np.std(want) > 0.5
    np.testing.assert_allclose(found, want, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_greedy_tokens(model: Mine) -> None:
    prompts = jnp.asarray(PROMPTS)
    found, why = decode(model, prompts, 8, implementation="xla")
    assert why == "xla: asked for"
    np.testing.assert_array_equal(found, plain_decode(model, prompts, 8))


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
def test_logits_of_the_kernel(model: Mine) -> None:
    ids = np.arange(24, dtype=np.int32).reshape(2, 12) * 20
    params = from_nnx(CONFIG, model, NAMES, dtype=jnp.bfloat16)
    found = teacher_forced(CONFIG, params, ids, implementation="mosaic_gpu")
    with jax.default_matmul_precision("highest"):
        exact = model(jnp.asarray(ids))
    rounded = llama.forward(CONFIG, params, jnp.asarray(ids), jnp.array([12, 12]))
    assert np.abs(found - exact).max() <= ALLOWED * np.abs(rounded - exact).max()


@pytest.mark.slow
def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    decode_nnx.main()
    first, _, last = capsys.readouterr().out.splitlines()
    assert first.startswith("implementation: xla")
    assert last == "the model itself chooses the same"
