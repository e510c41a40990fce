"""Load a Hugging Face folder of safetensors into stacked arrays.

Everything is checked before anything is read, see `checkpoint.py`. Then one leaf after
the other is stacked on the host, put on the device and freed, so that the peak is the
model plus its largest leaf.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoint import (
    CheckpointError,
    HostArray,
    Tensor,
    check_tensors,
    find_tensors,
)
from models.config import ModelConfig
from models.memory import Need, check_memory, weight_bytes
from models.params import Leaf, Params, build_tree
from models.progress import progress
from models.registry import family_of, read_config

__all__ = ["Checkpoint", "CheckpointError", "load", "open_checkpoint"]

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose keys and shapes fit its configuration; nothing is read yet.

    Attributes:
        folder: Where it is.
        config: The configuration.
        leaves: Its parameters.
        tensors: Where each is, by key.
    """

    folder: Path
    config: ModelConfig
    leaves: tuple[Leaf, ...]
    tensors: dict[str, Tensor]

    @property
    def stored(self) -> tuple[str, ...]:
        """Dtypes of its tensors, as safetensors spells them."""
        return tuple(sorted({t.stored for t in self.tensors.values()}))

    def arrays(self, dtype: str | None = None) -> Iterator[tuple[Leaf, HostArray]]:
        """Load one leaf at a time onto the host; see `load`."""
        target = _DTYPES[_dtype(self.config, dtype)]
        size = sum(_bytes(tensor) for tensor in self._parts())
        with progress(f"loading {self.folder.name}", size) as advance:
            for leaf in self.leaves:
                array = np.empty(leaf.shape, target)
                for index, key in enumerate(leaf.keys()):
                    tensor = self.tensors[key]
                    array[index if leaf.stacked else ...] = tensor.read()
                    advance(_bytes(tensor))
                yield leaf, array
                # Not two of them: the next one is made before the name is taken.
                del array

    def _parts(self) -> Iterator[Tensor]:
        return (self.tensors[key] for leaf in self.leaves for key in leaf.keys())


def _bytes(tensor: Tensor) -> int:
    size = 4 if tensor.stored == "F32" else 2
    return size * int(np.prod(tensor.shape))


def _dtype(config: ModelConfig, dtype: str | None) -> str:
    name = dtype or config.dtype
    if name not in _DTYPES:
        raise CheckpointError(
            f"dtype {name!r} is not supported; pass dtype='float32' or dtype='bfloat16'"
        )
    return name


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Check a folder against its configuration, without reading a weight.

    Raises:
        ConfigError: The configuration is not supported.
        CheckpointError: Files, keys or shapes do not fit the configuration.
    """
    folder = Path(folder)
    config = read_config(folder)
    leaves = family_of(config).leaves(config)
    tensors = find_tensors(folder)
    check_tensors(folder, config, leaves, tensors)
    return Checkpoint(folder, config, leaves, tensors)


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
        NotEnoughMemory: The device has less memory free than the parameters take.
    """
    import jax

    found = open_checkpoint(folder)
    need = Need(weight_bytes(found.leaves, _dtype(found.config, dtype)))
    log.info("loading %s takes %s", folder, need)
    check_memory(need, device)

    def place() -> Iterator[tuple[Leaf, jax.Array]]:
        for leaf, array in found.arrays(dtype):
            # Waiting lets the host copy go before the next leaf is read.
            placed = jax.block_until_ready(jax.device_put(array, device))
            del array
            yield leaf, placed

    return found.config, build_tree(place())
