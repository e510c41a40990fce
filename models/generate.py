"""Continue prompts."""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.cache import init_cache
from models.config import ModelConfig
from models.params import Params
from models.prompts import PAD, HostInts, pad
from models.step import DecodeStep, decode_params, prefill

# Prompts and caches have lengths of this multiple, so that few shapes are compiled.
_LENGTH_STEP = 64


def generate(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    eos_ids: Sequence[int] | None = None,
    implementation: Any = None,
) -> Iterator[HostInts]:
    """Continue prompts greedily, one token of every row at a time.

    Args:
        config: Of the model.
        params: Its parameters.
        prompts: Token ids of each row, at least one each.
        max_tokens: Most tokens per row.
        eos_ids: Tokens that end a row; those of the model where None.
        implementation: See `mk.megakernel`.

    Yields:
        int32 [B], the next token of each row; -1 for one that has ended. It ends with
        the last row.

    Raises:
        ValueError: A prompt is empty or has an id that is no token.
    """
    ids, lengths = pad(config, prompts)
    slots = _round_up(ids.shape[1] + max_tokens)
    step = DecodeStep(config, len(prompts), slots, implementation=implementation)
    params = decode_params(config, params)
    cache = init_cache(config, len(prompts), slots, params["embed"].dtype)
    wide = np.full((len(prompts), _round_up(ids.shape[1])), PAD, np.int32)
    wide[:, : ids.shape[1]] = ids
    scores, cache = prefill(
        config, params, cache, jnp.asarray(wide), jnp.asarray(lengths)
    )
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    ends = np.asarray(config.eos_ids if eos_ids is None else eos_ids, np.int32)
    ended = np.zeros(len(prompts), bool)
    for count in range(max_tokens):
        now = tokens
        if count + 1 < max_tokens:
            # The device works on the next token while the caller handles this one.
            tokens, cache = step.unchecked(params, cache, tokens)
        host = np.asarray(now)
        ended |= np.isin(host, ends)
        if ended.all():
            return
        yield np.where(ended, PAD, host).astype(np.int32)


def _round_up(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
