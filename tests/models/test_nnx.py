"""The families as flax.nnx modules: Hugging Face's logits, and their state's way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import nnx_decoder
from models.config import ModelConfig
from models.decode import teacher_forced
from models.nnx import default_names, from_nnx, to_nnx
from models.nnx_decoder import Decoder
from models.registry import family_of
from models.weights import CheckpointError, load
from tests.fidelity import mean_kl
from tests.tiers import first_quick

NAMES = ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16", "qwen3_untied"]
TOLERANCE = 1e-3  # of f32 logits, as in test_forward.py
FOLDER = Path(__file__).parents[1] / "fixtures"
each = pytest.mark.parametrize("name", first_quick(NAMES))


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ----------------------------------------------------------------------- forward


@each
def test_float32_sequence(name: str) -> None:
    oracle = np.load(FOLDER / name / "oracle.npz")
    model = nnx_decoder.load(*load(FOLDER / name, "float32"))
    ids = np.concatenate([oracle["prompt_ids"], oracle["teacher_ids"]])
    logits = model(jnp.asarray(ids)[None])[0]
    np.testing.assert_allclose(logits, oracle["logits_f32"], atol=TOLERANCE, rtol=0)


@each
def test_float32_rows_of_three_lengths(name: str) -> None:
    oracle = np.load(FOLDER / name / "oracle.npz")
    model = nnx_decoder.load(*load(FOLDER / name, "float32"))
    logits = model(jnp.asarray(oracle["batch_ids"]))
    last = logits[np.arange(3), oracle["batch_lens"] - 1]
    np.testing.assert_allclose(last, oracle["batch_logits_f32"], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@each
def test_bfloat16_loses_no_more_than_hugging_face(name: str) -> None:
    oracle = np.load(FOLDER / name / "oracle.npz")
    model = nnx_decoder.load(*load(FOLDER / name, "bfloat16"))
    ids = np.concatenate([oracle["prompt_ids"], oracle["teacher_ids"]])
    logits = np.asarray(model(jnp.asarray(ids)[None])[0])
    exact, theirs = oracle["logits_f32"], oracle["logits_bf16"]
    assert np.abs(logits - exact).max() <= 1.25 * np.abs(theirs - exact).max()
    assert mean_kl(exact, logits) <= 1.25 * mean_kl(exact, theirs)


# ------------------------------------------------------------------------- state


@each
def test_parameters_come_back_as_they_were(name: str) -> None:
    config, params = load(FOLDER / name)
    model = nnx_decoder.load(config, params)
    same(from_nnx(config, model), params)
    same(from_nnx(config, nnx.state(model)), params)
    same(from_nnx(config, nnx.to_pure_dict(nnx.state(model))), params)


@pytest.mark.slow
@each
def test_a_program_decodes_with_the_state_of_a_module(name: str) -> None:
    config, _ = load(FOLDER / name)
    model = Decoder(config, nnx.Rngs(1))
    ids = np.arange(3, 15)[None].astype(np.int32)
    want = model(jnp.asarray(ids))
    found = teacher_forced(config, from_nnx(config, model), ids, implementation="xla")
    np.testing.assert_allclose(found, want, atol=TOLERANCE, rtol=0)
    assert np.std(want) > 0.1


class Stacked(nnx.Module):
    """The same parameters, layers stacked by nnx.vmap."""

    def __init__(self, config: ModelConfig) -> None:
        count = config.num_layers

        @nnx.split_rngs(splits=count)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx_decoder.Layer:
            return nnx_decoder.Layer(config, 0, rngs)

        self.blocks = layers(nnx.Rngs(2))
        self.tok = nnx.Embed(config.vocab_size, config.hidden_size, rngs=nnx.Rngs(3))
        self.out = nnx_decoder.Norm(config.hidden_size, config)


def test_stacked_layers_are_taken_as_they_are() -> None:
    config, params = load(FOLDER / "llama_rope3_tied")
    names = {
        name: path.replace("model.layers.{}", "blocks")
        .replace("model.embed_tokens", "tok")
        .replace("model.norm", "out")
        for name, path in default_names(config).items()
    }
    model = Stacked(config)
    made = from_nnx(config, model, names)
    want = jax.tree.map(jnp.shape, params)
    assert jax.tree.map(jnp.shape, made) == want
    np.testing.assert_array_equal(
        made["layers"]["up"][1], model.blocks.mlp.up_proj.kernel[...][1].T
    )
    # A leaf that needs no change is the model's own array.
    assert (
        made["layers"]["post_norm"] is model.blocks.post_attention_layernorm.scale[...]
    )
    to_nnx(config, params, model, names)
    same(from_nnx(config, model, names), params)


def test_arrays_are_freed_as_they_are_copied() -> None:
    config, params = load(FOLDER / "llama_rope3_tied")
    model = nnx_decoder.load(config, jax.tree.map(jnp.copy, params))
    kernels = [layer.mlp.up_proj.kernel[...] for layer in model.model.layers]
    same(from_nnx(config, model, free=True), params)
    assert all(kernel.is_deleted() for kernel in kernels)


def test_another_dtype() -> None:
    config, params = load(FOLDER / "llama_rope3_tied", "float32")
    model = nnx_decoder.load(config, params)
    found = from_nnx(config, model, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}


# ------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers.q": None}, "layers.q: `names` does not say where it is"),
        ({"layers.wq": "x"}, "layers.wq: no parameter of this family"),
        (
            {"norm": "model.nrm.scale"},
            r"norm: model.nrm.scale is not in the model(.|\n)*hint: it has model.embed",
        ),
        (
            {"layers.gate": "model.layers.{}.mlp.gate_proj.kernel"},
            r"layers.gate: model.layers.1.mlp.gate_proj.kernel is \[128, \d+\], "
            r"expected \[\d+, 128\](.|\n)*needs \.T at the end",
        ),
        (
            {"layers.q": "model.layers.q"},
            r"layers.q: model.layers.q is not in the model",
        ),
    ],
)
def test_all_that_does_not_fit_is_listed(change: dict[str, Any], words: str) -> None:
    config, params = load(FOLDER / "llama_rope3_tied")
    model = nnx_decoder.load(config, params)
    names = {**default_names(config), **change}
    names = {name: path for name, path in names.items() if path is not None}
    check: Callable[..., Any]
    for check in (
        lambda: from_nnx(config, model, names),
        lambda: to_nnx(config, params, model, names),
    ):
        with pytest.raises(CheckpointError, match=words):
            check()


@pytest.mark.slow
def test_an_id_is_scored_without_those_behind_it() -> None:
    config, params = load(FOLDER / "gemma3_window16", "float32")
    model = nnx_decoder.load(config, params)
    ids = jnp.array([[3, 4, 5, 6]])
    short = model(ids[:, :2])
    np.testing.assert_allclose(model(ids)[:, :2], short, atol=1e-4)
    want = family_of(config).forward(config, params, ids, jnp.array([4]))
    np.testing.assert_allclose(model(ids), want, atol=1e-4)
