"""Scores of given tokens, by the decode step."""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from typing import Any

import jax.numpy as jnp
import numpy as np

from models.cache import init_cache
from models.config import ModelConfig
from models.params import Params
from models.prompts import PAD, HostInts, pad
from models.step import DecodeStep, decode_params

type HostFloats = np.ndarray[Any, np.dtype[np.float32]]


def teacher_forced(
    config: ModelConfig,
    params: Params,
    ids: HostInts,
    *,
    implementation: Any = None,
    machine: Any = None,
) -> HostFloats:
    """Score every position, token by token through the decode step.

    Args:
        config: Of the model.
        params: Its parameters.
        ids: int [B, T], rows padded with -1 on the right.
        implementation, machine: See `mk.megakernel`.

    Returns:
        float32 [B, T, V]; row t is what follows token t, and zero for padding.

    Raises:
        ValueError: A row is empty, or has an id that is no token, or padding inside.
    """
    rows = [row[: _real(row)].tolist() for row in np.asarray(ids)]
    ids, lengths = pad(config, rows)
    batch, count = ids.shape
    step = DecodeStep(
        config,
        batch,
        count,
        logits=True,
        implementation=implementation,
        machine=machine,
    )
    params = decode_params(config, params)
    cache = init_cache(config, batch, count, params["embed"].dtype)
    out = np.zeros((batch, count, config.vocab_size), np.float32)
    for t in range(count):
        real = t < lengths
        tokens = jnp.asarray(np.where(real, ids[:, t], 0))
        scores, cache = step.unchecked(params, cache, tokens, jnp.asarray(real))
        out[real, t] = np.asarray(scores)[real]
    return out


def _real(row: HostInts) -> int:
    """Ids before the padding at the end."""
    return len(row) - int(np.argmax(row[::-1] != PAD)) if (row != PAD).any() else 0
