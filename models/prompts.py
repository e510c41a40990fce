"""Prompts as arrays: int32, one row each, padded with -1 on the right."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.config import ModelConfig

type HostInts = np.ndarray[Any, np.dtype[np.int32]]

PAD = -1


def pad(
    config: ModelConfig, rows: Sequence[Sequence[int]]
) -> tuple[HostInts, HostInts]:
    """Make int32 [B, T], padded with -1, and int32 [B] lengths.

    Raises:
        ValueError: A row is empty or has an id that is no token.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    if not len(rows) or lengths.min() == 0:
        raise ValueError("there is nothing to read: every row needs a token")
    ids = np.full((len(rows), lengths.max()), PAD, np.int32)
    for at, row in enumerate(rows):
        bad = [i for i in row if not 0 <= i < config.vocab_size]
        if bad:
            raise ValueError(
                f"row {at} has ids {bad[:8]}, but tokens are 0 to "
                f"{config.vocab_size - 1}; padding (-1) is on the right alone"
            )
        ids[at, : len(row)] = row
    return ids, lengths
