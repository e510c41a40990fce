"""Loading: files, shards, prefixes, heads, and everything that does not fit at once."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.config import ConfigError
from models.registry import family_of
from models.weights import CheckpointError, load, open_checkpoint

TIED, UNTIED, QWEN = "llama_rope3_tied", "llama_untied_nohd", "qwen3_untied"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"

type Read = Callable[[str], Any]


def write_shards(checkpoint: Any, folder: Path, count: int = 3) -> dict[str, str]:
    """Write a sharded checkpoint and return its index."""
    keys = sorted(checkpoint.tensors)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {key: names[i % count] for i, key in enumerate(keys)}
    for name in names:
        part = {k: checkpoint.tensors[k] for k in keys if weight_map[k] == name}
        save_file(part, folder / name)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_equal_trees(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_leaves_are_the_stacked_tensors(fixtures: Path, read_checkpoint: Read) -> None:
    config, params = load(fixtures / UNTIED)
    tensors = read_checkpoint(UNTIED).tensors
    assert params["layers"]["q"].dtype == jnp.bfloat16
    for leaf in family_of(config).leaves(config):
        array = params
        for name in leaf.path:
            array = array[name]
        assert array.shape == leaf.shape
        for index, key in enumerate(leaf.keys()):
            part = array[index] if leaf.stacked else array
            np.testing.assert_array_equal(part, tensors[key])


def test_float32_is_the_same_numbers(fixtures: Path) -> None:
    _, exact = load(fixtures / TIED, "float32")
    _, rounded = load(fixtures / TIED, "bfloat16")
    assert_equal_trees(exact, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_other_stored_dtypes(
    read_checkpoint: Read, tmp_path: Path, stored: Any
) -> None:
    checkpoint = read_checkpoint(TIED)
    for key, value in checkpoint.tensors.items():
        checkpoint.tensors[key] = value.astype(stored)
    _, params = load(checkpoint.write(tmp_path), "bfloat16")
    expected = checkpoint.tensors[EMBED].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(params["embed"], expected)


def test_shards_equal_one_file(
    fixtures: Path, read_checkpoint: Read, tmp_path: Path
) -> None:
    write_shards(read_checkpoint(UNTIED), tmp_path)
    assert_equal_trees(load(tmp_path)[1], load(fixtures / UNTIED)[1])


def test_the_index_decides_not_the_files(
    fixtures: Path, read_checkpoint: Read, tmp_path: Path
) -> None:
    write_shards(read_checkpoint(UNTIED), tmp_path)
    # Left over from an earlier download: same keys, other numbers.
    stale = {key: t * 0 for key, t in read_checkpoint(UNTIED).tensors.items()}
    save_file(stale, tmp_path / "model-00001-of-00002.safetensors")
    save_file(stale, tmp_path / "model.safetensors")
    assert_equal_trees(load(tmp_path)[1], load(fixtures / UNTIED)[1])


def test_missing_shards_are_listed_with_their_keys(
    read_checkpoint: Read, tmp_path: Path
) -> None:
    weight_map = write_shards(read_checkpoint(UNTIED), tmp_path)
    gone = sorted(set(weight_map.values()))[1:]
    for name in gone:
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=r"missing files \(2\)") as error:
        load(tmp_path)
    text = str(error.value)
    assert all(name in text for name in gone)
    lost = [key for key, name in weight_map.items() if name in gone]
    assert lost
    assert all(key in text for key in lost)


def test_a_key_that_its_shard_lacks(read_checkpoint: Read, tmp_path: Path) -> None:
    weight_map = write_shards(read_checkpoint(UNTIED), tmp_path)
    names = sorted(set(weight_map.values()))
    weight_map[EMBED] = next(name for name in names if name != weight_map[EMBED])
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=f"(?s)the index names.*{EMBED}"):
        load(tmp_path)


def test_an_index_may_not_leave_the_folder(
    fixtures: Path, read_checkpoint: Read, tmp_path: Path
) -> None:
    weight_map = write_shards(read_checkpoint(UNTIED), tmp_path)
    weight_map[EMBED] = str(fixtures / UNTIED / "model.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="missing files"):
        load(tmp_path)


def test_a_broken_index(read_checkpoint: Read, tmp_path: Path) -> None:
    write_shards(read_checkpoint(UNTIED), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a weight index"):
        load(tmp_path)


def test_a_folder_without_weights(read_checkpoint: Read, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_checkpoint(TIED).config))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"has neither.*pytorch_model\.bin"):
        load(tmp_path)


def test_a_truncated_file(fixtures: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        content = (fixtures / TIED / name).read_bytes()
        (tmp_path / name).write_bytes(content if "json" in name else content[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


def test_everything_wrong_is_listed_at_once(
    read_checkpoint: Read, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(UNTIED)
    tensors, layer = checkpoint.tensors, "model.layers.{}.{}.weight".format
    del tensors[layer(0, "mlp.up_proj")], tensors[layer(1, "input_layernorm")]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((4, 4), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(4, np.float32)
    key = layer(1, "self_attn.k_proj")
    tensors[key] = np.ascontiguousarray(tensors[key].T)
    key = layer(0, "mlp.gate_proj")
    tensors[key] = tensors[key].astype(np.int8)
    with pytest.raises(CheckpointError) as error:
        load(checkpoint.write(tmp_path))
    text = str(error.value)
    for part in (
        "missing keys (2)",
        "model.layers.0.mlp.up_proj.weight [256, 256]",
        "model.layers.1.input_layernorm.weight [256]",
        "unknown keys (2)",
        "model.layers.2.mlp.up_proj.weight [4, 4]",
        "model.layers.0.self_attn.q_proj.bias [4]",
        "wrong shapes (1)",
        "k_proj.weight is [256, 128], expected [128, 256]",
        "wrong dtypes (1)",
        "gate_proj.weight is I8, supported: F32, BF16, F16",
        "hint:",
    ):
        assert part in text


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("heading", "change", "words"),
    [
        ("missing keys (2)", lambda t: None, "{} [128]"),
        ("unknown keys (2)", lambda t: t, "{}.old [128]"),
        ("wrong shapes (2)", lambda t: t[:3], "{} is [3], expected [128]"),
        ("wrong dtypes (2)", lambda t: t.astype(np.int32), "{} is I32, supported: F32"),
    ],
)
def test_two_of_a_kind_are_both_listed(
    read_checkpoint: Read,
    tmp_path: Path,
    heading: str,
    change: Callable[[Any], Any],
    words: str,
    sharded: bool,
) -> None:
    checkpoint = read_checkpoint(QWEN)
    tensors = checkpoint.tensors
    keys = [f"model.layers.{i}.self_attn.k_norm.weight" for i in (0, 1)]
    for key in keys:
        found = change(tensors[key])
        if found is None:
            del tensors[key]
        else:
            tensors[key + ".old" if ".old" in words else key] = found
    if sharded:
        write_shards(checkpoint, tmp_path)
    else:
        checkpoint.write(tmp_path)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    text = str(error.value)
    assert heading in text
    assert text.count("):\n") == 1, "only what is wrong is listed"
    assert all(words.format(key) in text for key in keys)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shipped", [True, False])
def test_four_cases_of_the_head(
    read_checkpoint: Read, tmp_path: Path, tied: bool, shipped: bool
) -> None:
    checkpoint = read_checkpoint(TIED)
    checkpoint.config["tie_word_embeddings"] = tied
    if shipped:
        checkpoint.tensors[HEAD] = checkpoint.tensors[EMBED].copy()
    folder = checkpoint.write(tmp_path)
    if not tied and not shipped:
        with pytest.raises(CheckpointError, match=f"(?s){HEAD}.*tie_word_embeddings"):
            load(folder)
        return
    config, params = load(folder)
    assert config.tied == tied
    assert ("head" in params) == (not tied)
    ids, lengths = np.array([[3, 4, 5]]), np.array([3])
    logits = family_of(config).forward(config, params, ids, lengths)
    reference = load(Path(__file__).parents[1] / "fixtures" / TIED)
    expected = family_of(config).forward(*reference, ids, lengths)
    np.testing.assert_array_equal(logits, expected)


def test_a_head_that_contradicts_the_config_is_ignored_loudly(
    read_checkpoint: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = read_checkpoint(TIED)
    checkpoint.tensors[HEAD] = checkpoint.tensors[EMBED] * 2
    with caplog.at_level(logging.WARNING, "models.checkpoint"):
        _, params = load(checkpoint.write(tmp_path))
    assert "head" not in params
    assert "differs from model.embed_tokens.weight and is ignored" in caplog.text


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: "language_model." + key,
        lambda key: key.replace("model.", "model.language_model.", 1),
    ],
    ids=["language_model", "model.language_model"],
)
def test_prefixes_of_multimodal_files(
    fixtures: Path, read_checkpoint: Read, tmp_path: Path, rename: Callable[[str], str]
) -> None:
    checkpoint = read_checkpoint("gemma3_window16")
    tensors = {rename(key): value for key, value in checkpoint.tensors.items()}
    image = np.zeros(3, np.float32)
    tensors["vision_tower.encoder.weight"] = image
    tensors["model.multi_modal_projector.weight"] = image
    checkpoint.tensors.clear()
    checkpoint.tensors.update(tensors)
    _, params = load(checkpoint.write(tmp_path))
    assert_equal_trees(params, load(fixtures / "gemma3_window16")[1])


def test_a_key_given_twice(read_checkpoint: Read, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(TIED)
    checkpoint.tensors["language_model." + EMBED] = checkpoint.tensors[EMBED]
    with pytest.raises(CheckpointError, match="given twice"):
        load(checkpoint.write(tmp_path))


def test_dtypes_that_cannot_be_loaded(fixtures: Path, read_checkpoint: Read) -> None:
    with pytest.raises(CheckpointError, match="'float16' is not supported; pass dtype"):
        load(fixtures / TIED, "float16")


def test_a_checkpoint_of_another_family(read_checkpoint: Read, tmp_path: Path) -> None:
    other = read_checkpoint(TIED)
    config = {**other.config, "model_type": "mistral"}
    folder = replace(other, config=config).write(tmp_path)
    with pytest.raises(ConfigError, match="'mistral'"):
        load(folder)


LATE = """
import os, sys
from pathlib import Path

import mkdsl
from models import registry, weights

# What a backend reads when it starts is still open: nothing here has started one.
config = registry.read_config({folder!r})
found = weights.open_checkpoint({folder!r})
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jax

# jax reads its own variables when it is imported, which mkdsl does; from then on its
# settings are changed so:
jax.config.update("jax_platforms", "cpu")
_, params = weights.load({folder!r})
print(found.config == config, params["embed"].dtype, jax.device_count())
"""


def test_a_process_that_has_not_imported_jax(fixtures: Path) -> None:
    """The user's settings of the backend hold until the first array is made."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS",)}
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(folder=str(fixtures / TIED))],
        cwd=fixtures.parents[1],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True bfloat16 3\n"
    assert done.stderr.count("\n") <= 1  # no progress bar where nobody looks
