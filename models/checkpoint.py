"""The tensors of a Hugging Face folder, checked before anything is read.

One error lists every key that is missing, unknown or of the wrong shape. A file is
opened for each read and closed again: its pages, which safetensors maps into memory,
do not stay there.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Makes numpy know bfloat16, without which safetensors cannot read such a tensor.
import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport]
import numpy as np
from safetensors import safe_open

from models.config import ModelConfig
from models.params import Leaf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED = ("F32", "BF16", "F16")
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
# The image half of multimodal checkpoints, and a buffer that old Llama files carry.
_IGNORED = ("vision_tower.", "multi_modal_projector.")
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"

type HostArray = np.ndarray[Any, Any]

log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that does not fit its configuration."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor is, and what it is.

    Attributes:
        path: Of its file.
        raw_key: Its key there.
        shape: Its shape.
        stored: Its dtype, as safetensors spells it.
    """

    path: Path
    raw_key: str
    shape: tuple[int, ...]
    stored: str

    def read(self) -> HostArray:
        """Read it whole."""
        with _open_shard(self.path) as shard:
            return shard.get_tensor(self.raw_key)


@dataclass(slots=True)
class _Problems:
    """Findings under a heading each, to be reported together."""

    found: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, heading: str, item: str) -> None:
        self.found.setdefault(heading, []).append(item)

    def raise_if_any(self, folder: Path, hint: str) -> None:
        if not self.found:
            return
        lines = [f"{folder} does not hold the model that its config.json describes"]
        for heading, items in self.found.items():
            lines.append(f"  {heading} ({len(items)}):")
            lines += [f"    {item}" for item in items]
        raise CheckpointError("\n".join([*lines, f"  hint: {hint}"]))


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder by its key, as a text-only checkpoint names it.

    Raises:
        CheckpointError: Shards, or keys that the index promises, are not there.
    """
    weight_map = _weight_map(folder)
    problems = _Problems()
    shards: dict[str, dict[str, Tensor]] = {}
    for name in sorted(set(weight_map.values())):
        # A name with folders in it could lead out of the checkpoint.
        if Path(name).name != name or not (folder / name).is_file():
            problems.add("missing files", name)
        else:
            shards[name] = _tensors_in(folder / name)
    tensors: dict[str, Tensor] = {}
    for raw_key, name in sorted(weight_map.items()):
        key = _canonical(raw_key)
        if name not in shards:
            problems.add("keys in missing files", f"{raw_key} in {name}")
        elif raw_key not in shards[name]:
            problems.add("keys not in the file that the index names", raw_key)
        elif key in tensors:
            problems.add("keys given twice", f"{raw_key}, {tensors[key].raw_key}")
        elif key is not None:
            tensors[key] = shards[name][raw_key]
    problems.raise_if_any(folder, "download the checkpoint again, with every shard")
    return tensors


def check_tensors(
    folder: Path,
    config: ModelConfig,
    leaves: Sequence[Leaf],
    tensors: Mapping[str, Tensor],
) -> None:
    """Compare keys, shapes and dtypes with what the configuration asks for.

    Raises:
        CheckpointError: They do not fit; it lists all that is wrong.
    """
    problems = _Problems()
    expected = {key: leaf.part_shape for leaf in leaves for key in leaf.keys()}
    for key, shape in expected.items():
        if key not in tensors:
            problems.add("missing keys", f"{key} {list(shape)}")
    for key in sorted(tensors.keys() - expected.keys()):
        if not (config.tied and key == _HEAD):
            problems.add("unknown keys", f"{key} {list(tensors[key].shape)}")
    for key in sorted(expected.keys() & tensors.keys()):
        shape, stored = tensors[key].shape, tensors[key].stored
        if shape != expected[key]:
            found = f"{key} is {list(shape)}, expected {list(expected[key])}"
            problems.add("wrong shapes", found)
        if stored not in STORED:
            found = f"{key} is {stored}, supported: {', '.join(STORED)}"
            problems.add("wrong dtypes", found)
    hint = "check that config.json and the weights are of the same model"
    if not config.tied and _HEAD not in tensors:
        hint = f"without {_HEAD}, config.json should say tie_word_embeddings: true"
    problems.raise_if_any(folder, hint)
    if config.tied and _HEAD in tensors and not _same(tensors[_HEAD], tensors[_EMBED]):
        log.warning(
            "%s: %s differs from %s and is ignored, because config.json says "
            "tie_word_embeddings: true; set it to false to use the head",
            folder,
            _HEAD,
            _EMBED,
        )


def _canonical(raw_key: str) -> str | None:
    """Name a key as a text-only checkpoint does; None for one that is ignored."""
    key = raw_key
    if key.startswith("model.language_model."):
        key = "model." + key.removeprefix("model.language_model.")
    key = key.removeprefix("language_model.")
    if key.removeprefix("model.").startswith(_IGNORED):
        return None
    return None if key.endswith(_IGNORED_SUFFIX) else key


def _weight_map(folder: Path) -> dict[str, str]:
    """Map each key of the checkpoint to its file; the index decides if there is one."""
    index = folder / INDEX
    if index.is_file():
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            return {str(k): str(v) for k, v in content["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a weight index: {error!r}") from None
    if not (folder / SINGLE).is_file():
        others = sorted(path.name for path in folder.glob("*") if path.is_file())
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}; it has {others}"
        )
    with _open_shard(folder / SINGLE) as shard:
        return dict.fromkeys(shard.keys(), SINGLE)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="numpy")
    except Exception as error:  # SafetensorError, or OSError for an empty file
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _tensors_in(path: Path) -> dict[str, Tensor]:
    """All tensors of a file."""
    found: dict[str, Tensor] = {}
    with _open_shard(path) as shard:
        for key in shard.keys():
            part = shard.get_slice(key)
            found[key] = Tensor(path, key, tuple(part.get_shape()), part.get_dtype())
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    """Compare two matrices a few rows at a time."""
    if a.shape != b.shape or a.stored != b.stored:
        return False
    rows, step = a.shape[0], 4096
    with _open_shard(a.path) as of_a, _open_shard(b.path) as of_b:
        left, right = of_a.get_slice(a.raw_key), of_b.get_slice(b.raw_key)
        spans = (slice(i, min(i + step, rows)) for i in range(0, rows, step))
        return all(np.array_equal(left[span], right[span]) for span in spans)
