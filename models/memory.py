"""How much memory a model needs and a device has, said before any is taken.

What is counted: parameters and cache. Activations of a decode step are small beside
them; those of a prefill grow with the prompt and are not counted.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.params import Leaf

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROC, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class NotEnoughMemory(RuntimeError):
    """A device, or the host, visibly has less memory than is needed."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a model takes.

    Attributes:
        weights: All parameters.
        cache: Keys and values.
    """

    weights: int
    cache: int = 0

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.cache

    def __str__(self) -> str:
        return (
            f"{gib(self.total)}: weights {gib(self.weights)}, cache {gib(self.cache)}"
        )


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes that can be taken, and where: `"the host"` or a device."""

    bytes: int
    where: str


def gib(count: int) -> str:
    """Bytes as text, in GiB, or in MiB below 0.1 GiB."""
    if count < 0.1 * 2**30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:.2f} GiB"


def parameter_count(leaves: Iterable[Leaf]) -> int:
    """Numbers that the parameters are."""
    return sum(math.prod(leaf.shape) for leaf in leaves)


def weight_bytes(leaves: Iterable[Leaf], dtype: str) -> int:
    """Bytes of the parameters."""
    return parameter_count(leaves) * ITEM_BYTES[dtype]


def position_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of keys and values of one token, all layers."""
    features = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return features * ITEM_BYTES[dtype]


def cache_bytes(config: ModelConfig, batch: int, max_length: int, dtype: str) -> int:
    """Bytes of a cache of `batch` rows with `max_length` slots each."""
    return batch * max_length * position_bytes(config, dtype)


def free_memory(device: Any = None) -> Free | None:
    """What is free on a device.

    Args:
        device: A `jax.Device`; the default one where None.

    Returns:
        None where it cannot be known: a sharding, or a device that does not say.
    """
    import jax

    if device is None:
        named: Any = jax.config.jax_default_device
        device = named if isinstance(named, jax.Device) else jax.local_devices()[0]
    if not isinstance(device, jax.Device):
        return None
    if device.platform == "cpu":
        count = host_free()
        return None if count is None else Free(count, "the host")
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return Free(free, str(device))


def host_free(meminfo: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that the host can give this process; None where it does not say (no Linux).

    The kernel's MemAvailable (man 5 proc_meminfo), or less where a control group
    limits the process: memory.max less memory.current, of which the file cache
    (inactive_file) can be had back (Linux admin-guide/cgroup-v2).
    """
    try:
        found = [_field(meminfo, "MemAvailable:") * 1024]
    except (OSError, ValueError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        found.append(limit - used + _field(cgroup / "memory.stat", "inactive_file"))
    except (OSError, ValueError):  # no such group, or "max"
        pass
    return max(0, min(found))


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    raise ValueError(f"{path} has no {name}")


def check_memory(need: Need, device: Any = None) -> None:
    """Raise if a device visibly has less than is needed.

    Args:
        need: What will be taken.
        device: See `free_memory`.

    Raises:
        NotEnoughMemory: It has less.
    """
    free = free_memory(device)
    if free is None or need.total <= free.bytes:
        return
    raise NotEnoughMemory(
        f"the model needs {need}; {free.where} has {gib(free.bytes)} free. Load it in "
        "bfloat16 if it is in float32, take fewer rows or a shorter cache, or end what "
        "else holds memory there"
    )
