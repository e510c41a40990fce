"""Batches in classes: one program for each of few sizes, for any number of rows.

A batch of n rows runs in the smallest class that holds them. The rows that fill it are
empty and never active, and change no bit of the others: a row has the bits that it has
in a full batch of its class.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.cache import KVCache, check_room, init_cache
from models.config import ModelConfig
from models.params import Params
from models.prompts import pad
from models.registry import family_of
from models.step import DecodeStep, check_cache

CLASSES = (1, 2, 4, 8, 16)
# Prompts are read in pieces of so many tokens: one shape for prompts of all lengths,
# and the bits of a row do not depend on the longest prompt of its batch.
PIECE = 64


def class_of(rows: int, classes: Sequence[int] = CLASSES) -> int:
    """The smallest class that holds so many rows.

    Raises:
        ValueError: None does, or there is no row.
    """
    if rows < 1:
        raise ValueError(f"a batch needs at least one row, not {rows}")
    fitting = [size for size in classes if size >= rows]
    if not fitting:
        most = max(classes)
        raise ValueError(
            f"{rows} rows are more than the largest class of batches holds ({most}); "
            f"decode at most {most} rows at a time"
        )
    return min(fitting)


def fill(values: Any, batch: int, value: Any) -> np.ndarray[Any, Any]:
    """Put [n, ..] in front of an array [batch, ..] whose other rows hold `value`."""
    values = np.asarray(values)
    more = np.full((batch - len(values), *values.shape[1:]), value, values.dtype)
    return np.concatenate([values, more])


class Decoder:
    """Steps and caches for batches of any number of rows, up to the largest class.

    A step is traced and compiled by the first batch of its class, and kept.

    Attributes:
        config: Of the model.
        max_length: Slots of the cache per row.
        classes: Sizes of batches.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_length: int,
        *,
        classes: Sequence[int] = CLASSES,
        implementation: Any = None,
        machine: Any = None,
        options: Any = None,
    ) -> None:
        """Trace and compile nothing yet.

        Args:
            config: Of the model.
            max_length: Slots of the cache per row.
            classes: Sizes of batches.
            implementation, machine, options: See `mk.megakernel`.

        Raises:
            ValueError: A size of cache or batch is below 1.
        """
        if max_length < 1:
            raise ValueError(f"{max_length=} slots: a cache needs at least one")
        if not classes or min(classes) < 1:
            raise ValueError(f"{classes=}: sizes of batches are 1 and more")
        self.config, self.max_length = config, max_length
        self.classes = tuple(sorted(classes))
        self._settings = {
            "implementation": implementation,
            "machine": machine,
            "options": options,
        }
        self._steps: dict[tuple[int, bool], DecodeStep] = {}

    def step(self, rows: int, *, logits: bool = False) -> DecodeStep:
        """The step for so many rows; its arrays have `step.batch` of them.

        Args:
            rows: Real rows.
            logits: Whether it returns scores, float32 [B, V], instead of tokens.
        """
        key = class_of(rows, self.classes), logits
        if key not in self._steps:
            self._steps[key] = DecodeStep(
                self.config, key[0], self.max_length, logits=logits, **self._settings
            )
        return self._steps[key]

    def init_cache(self, rows: int, dtype: DTypeLike = jnp.bfloat16) -> KVCache:
        """An empty cache of the class that holds so many rows."""
        batch = class_of(rows, self.classes)
        return init_cache(self.config, batch, self.max_length, dtype)

    def prefill(
        self, params: Params, cache: KVCache, prompts: Sequence[Sequence[int]]
    ) -> tuple[jax.Array, KVCache]:
        """Read prompts behind what the cache holds, in plain JAX.

        Args:
            params: Of the model.
            cache: Of `init_cache`, donated.
            prompts: Tokens of each real row, at least one each.

        Returns:
            Logits after the last token of each row, float32 [B, V] (zero for rows that
            fill the batch), and the cache.

        Raises:
            ValueError: A prompt is empty, has an id that is no token, or has no room;
                or the cache is another one than `init_cache` makes. Nothing is lost.
        """
        ids, lengths = pad(self.config, prompts)
        batch = class_of(len(prompts), self.classes)
        check_cache(self.config, params, cache, batch, self.max_length)
        lengths = fill(lengths, batch, 0)
        check_room(cache, jnp.asarray(lengths))
        pieces = -(-ids.shape[1] // PIECE)
        wide = np.zeros((batch, pieces * PIECE), np.int32)
        wide[: len(ids), : ids.shape[1]] = ids
        scores = jnp.zeros((batch, self.config.vocab_size), jnp.float32)
        for start in range(0, wide.shape[1], PIECE):
            count = np.clip(lengths - start, 0, PIECE).astype(np.int32)
            piece = jnp.asarray(wide[:, start : start + PIECE])
            scores, cache = _read(
                self.config, params, cache, scores, piece, jnp.asarray(count)
            )
        return scores, cache


@lru_cache(maxsize=4)
def decoder_of(config: ModelConfig, max_length: int, implementation: Any) -> Decoder:
    """A decoder that is kept with what it compiled, so that calls share it."""
    return Decoder(config, max_length, implementation=implementation)


@partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _read(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    scores: jax.Array,
    ids: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Read one piece; a row without tokens in it keeps its scores."""
    new, cache = family_of(config).prefill(config, params, cache, ids, lengths)
    return jnp.where(lengths[:, None] > 0, new, scores), cache
