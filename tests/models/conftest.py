"""Checkpoints of the fixtures, and the oracles that Hugging Face computed from them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy has to know bfloat16 for load_file)
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, to be changed and written elsewhere."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def write(self, folder: Path) -> Path:
        """Write a single-file checkpoint."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


@pytest.fixture
def fixtures() -> Path:
    """The folder of all fixtures."""
    return FIXTURES


@pytest.fixture
def read_checkpoint() -> Callable[[str], Checkpoint]:
    """Read a fixture into memory by its name."""

    def read(name: str) -> Checkpoint:
        folder = FIXTURES / name
        config = json.loads((folder / "config.json").read_text())
        return Checkpoint(config, load_file(folder / "model.safetensors"))

    return read
