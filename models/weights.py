"""Load a Hugging Face folder of safetensors into stacked arrays.

Everything is checked before anything is read: one error lists every key that is
missing, unknown or of the wrong shape. Then one leaf after the other is stacked on the
host, put on the device and freed, so that the peak is the model plus its largest leaf.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Also makes numpy know bfloat16, without which safetensors cannot read such a tensor.
import ml_dtypes
import numpy as np
from safetensors import safe_open

from models.config import ModelConfig
from models.params import Leaf, Params, build_tree

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_STORED = ("F32", "BF16", "F16")
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
# The image half of multimodal checkpoints, and a buffer that old Llama files carry.
_IGNORED = ("vision_tower.", "multi_modal_projector.")
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"

type HostArray = np.ndarray[Any, Any]

log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that does not fit its configuration."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor is: its open shard and its key there."""

    shard: Any
    raw_key: str

    def shape(self) -> tuple[int, ...]:
        return tuple(self.shard.get_slice(self.raw_key).get_shape())

    def stored(self) -> str:
        return self.shard.get_slice(self.raw_key).get_dtype()

    def read(self) -> HostArray:
        return self.shard.get_tensor(self.raw_key)

    def rows(self, start: int, stop: int) -> HostArray:
        return self.shard.get_slice(self.raw_key)[start:stop]


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


def load(
    folder: str | Path, dtype: str | None = None, *, device: Any = None
) -> tuple[ModelConfig, Params]:
    """Load a checkpoint folder.

    Args:
        folder: Holds config.json and model.safetensors, or shards with their index.
        dtype: `"float32"` or `"bfloat16"`; that of the checkpoint where None.
        device: A `jax.Device` or sharding for every array; the default device if None.

    Returns:
        The configuration and the parameters, see `params.py`.

    Raises:
        ConfigError: The configuration is not supported.
        CheckpointError: Files, keys or shapes do not fit the configuration.
    """
    import jax

    from models.registry import family_of, read_config

    config = read_config(folder)
    leaves = family_of(config).leaves(config)

    def place() -> Iterator[tuple[Leaf, jax.Array]]:
        for leaf, array in load_leaves(folder, config, leaves, dtype):
            # Waiting lets the host copy go before the next leaf is read.
            yield leaf, jax.block_until_ready(jax.device_put(array, device))

    return config, build_tree(place())


def load_leaves(
    folder: str | Path,
    config: ModelConfig,
    leaves: tuple[Leaf, ...],
    dtype: str | None = None,
) -> Iterator[tuple[Leaf, HostArray]]:
    """Load one leaf at a time onto the host; see `load`."""
    target = _target_dtype(dtype or config.dtype)
    folder = Path(folder)
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        _check(folder, config, leaves, tensors)
        parts = sum(len(leaf.keys()) for leaf in leaves)
        advance = stack.enter_context(_progress(f"loading {folder.name}", parts))
        for leaf in leaves:
            array = np.empty(leaf.shape, target)
            for index, key in enumerate(leaf.keys()):
                array[index if leaf.stacked else ...] = tensors[key].read()
                advance()
            yield leaf, array


def _target_dtype(name: str) -> np.dtype[Any]:
    if name not in _DTYPES:
        raise CheckpointError(
            f"dtype {name!r} is not supported; pass dtype='float32' or dtype='bfloat16'"
        )
    return _DTYPES[name]


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


def _open(folder: Path, stack: ExitStack) -> dict[str, _Tensor]:
    """Open every shard and find every tensor.

    Raises:
        CheckpointError: Shards, or keys that the index promises, are not there.
    """
    weight_map = _weight_map(folder)
    problems = _Problems()
    shards: dict[str, Any] = {}
    for name in sorted(set(weight_map.values())):
        # A name with folders in it could lead out of the checkpoint.
        if Path(name).name != name or not (folder / name).is_file():
            problems.add("missing files", name)
        else:
            shards[name] = stack.enter_context(_open_shard(folder / name))
    held = {name: frozenset(shard.keys()) for name, shard in shards.items()}
    tensors: dict[str, _Tensor] = {}
    for raw_key, name in sorted(weight_map.items()):
        key = _canonical(raw_key)
        if name not in shards:
            problems.add("keys in missing files", f"{raw_key} in {name}")
        elif raw_key not in held[name]:
            problems.add("keys not in the file that the index names", raw_key)
        elif key in tensors:
            problems.add("keys given twice", f"{raw_key}, {tensors[key].raw_key}")
        elif key is not None:
            tensors[key] = _Tensor(shards[name], raw_key)
    problems.raise_if_any(folder, "download the checkpoint again, with every shard")
    return tensors


def _check(
    folder: Path,
    config: ModelConfig,
    leaves: tuple[Leaf, ...],
    tensors: Mapping[str, _Tensor],
) -> None:
    """Compare keys, shapes and dtypes with what the configuration asks for."""
    problems = _Problems()
    expected = {key: leaf.part_shape for leaf in leaves for key in leaf.keys()}
    for key, shape in expected.items():
        if key not in tensors:
            problems.add("missing keys", f"{key} {list(shape)}")
    for key in sorted(tensors.keys() - expected.keys()):
        if not (config.tied and key == _HEAD):
            problems.add("unknown keys", f"{key} {list(tensors[key].shape())}")
    for key in expected.keys() & tensors.keys():
        shape, stored = tensors[key].shape(), tensors[key].stored()
        if shape != expected[key]:
            found = f"{key} is {list(shape)}, expected {list(expected[key])}"
            problems.add("wrong shapes", found)
        if stored not in _STORED:
            found = f"{key} is {stored}, supported: {', '.join(_STORED)}"
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


def _same(a: _Tensor, b: _Tensor) -> bool:
    """Compare two matrices a few rows at a time."""
    if a.shape() != b.shape() or a.stored() != b.stored():
        return False
    rows, step = a.shape()[0], 4096
    spans = ((start, min(start + step, rows)) for start in range(0, rows, step))
    return all(np.array_equal(a.rows(*span), b.rows(*span)) for span in spans)


@contextmanager
def _progress(title: str, total: int) -> Generator[Callable[[], None]]:
    """Show a bar on a terminal if `rich` is installed; yields what advances it."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
