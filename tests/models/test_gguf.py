"""Gemma 3 270M: conversion, tokenizer and forward pass against recorded results."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open

from models import gguf
from models.gemma3 import Gemma3Config
from models.params import Params
from models.registry import SHAPES, family_of
from models.tokenizer import StreamDecoder, load_tokenizer
from models.weights import load

needs_packages = pytest.mark.skipif(
    not gguf.is_installed(), reason="the packages of the extra 'demo' are missing"
)
PROMPTS = ("capital", "once", "german", "long300")


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model, made once in the user's cache folder."""
    return gguf.gemma3_270m()


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Gemma3Config, Params]:
    config, params = load(folder, "float32")
    assert isinstance(config, Gemma3Config)
    return config, params


@pytest.fixture
def oracle(fixtures: Path) -> dict[str, Any]:
    return json.loads((fixtures / "gemma3-270m" / "oracle.json").read_text())


@pytest.mark.slow
@needs_packages
def test_tensors_are_bit_equal(folder: Path, oracle: dict[str, Any]) -> None:
    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        for key in sorted(file.keys()):
            digest.update(key.encode())
            digest.update(file.get_tensor(key).tobytes())
    assert digest.hexdigest() == oracle["tensors_sha256"]


@pytest.mark.slow
@needs_packages
def test_config_is_the_named_shape(model: tuple[Gemma3Config, Params]) -> None:
    assert model[0] == SHAPES["gemma-3-270m"]


@pytest.mark.slow
@needs_packages
@pytest.mark.parametrize("name", PROMPTS)
def test_tokenizer(folder: Path, oracle: dict[str, Any], name: str) -> None:
    prompt = next(p for p in oracle["prompts"] if p["name"] == name)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(prompt["prompt"]).ids == prompt["prompt_ids"]
    text = "".join(StreamDecoder(tokenizer).stream(prompt["greedy_ids_f32"]))
    assert text == prompt["greedy_text_f32"]


@pytest.mark.slow
@needs_packages
@pytest.mark.parametrize("name", PROMPTS)
def test_teacher_forced_logits(
    model: tuple[Gemma3Config, Params], oracle: dict[str, Any], name: str
) -> None:
    config, params = model
    prompt = next(p for p in oracle["prompts"] if p["name"] == name)
    start, greedy = len(prompt["prompt_ids"]), prompt["greedy_ids_f32"]
    ids = np.array(prompt["prompt_ids"] + greedy)
    forward = family_of(config).forward
    logits = forward(config, params, ids[None], np.array([len(ids)]))[0]
    total = np.asarray(jax.nn.logsumexp(logits, axis=-1))
    logits = np.asarray(logits)

    before = np.arange(start - 1)
    log_probs = logits[before, ids[1:start]] - total[before]
    expected = prompt["prompt_logprobs_f32"]
    np.testing.assert_allclose(log_probs, expected, atol=1e-3, rtol=0)
    for step, top in enumerate(prompt["top5_f32"]):
        row = logits[start - 1 + step]
        np.testing.assert_allclose(row[top["ids"]], top["logits"], atol=1e-3, rtol=0)
        assert total[start - 1 + step] == pytest.approx(top["logsumexp"], abs=1e-3)
        assert row.argmax() == greedy[step]


def test_conversion_needs_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "is_installed", lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'mkdsl\[demo\]'"):
        gguf.gemma3_270m(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_converted_folder_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gguf, "is_installed", lambda: False)
    made = tmp_path / "mkdsl" / "models" / gguf.FOLDER
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    assert gguf.gemma3_270m() == made


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_cache_folder_without_a_usable_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert gguf.cache_folder() == Path.home() / ".cache" / "mkdsl" / "models"


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("disk full")

    package = type("Package", (), {"assemble": staticmethod(lambda path: path.touch())})
    monkeypatch.setattr(gguf, "is_installed", lambda: True)
    monkeypatch.setattr(gguf.importlib, "import_module", lambda name: package)
    monkeypatch.setattr(gguf, "convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        gguf.gemma3_270m(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.17.ffn_norm.weight", "model.layers.17.pre_feedforward_layernorm.weight"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_names(name: str, key: str) -> None:
    assert gguf._hf_key(name) == key


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.ssm\.weight'"):
        gguf._hf_key("blk.0.ssm.weight")
