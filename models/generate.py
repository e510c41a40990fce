"""Continue prompts, all rows of a batch one token at a time.

found = generate(config, params, prompts, 100, temperature=0.8, key=key)
for tokens in found:        # int32 [B] as soon as they are there, -1 for no token
    ...
for row in found.rows:      # and at the end, or whenever
    print(row.tokens, row.reason)
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from models.batches import Decoder, decoder_of, fill
from models.cache import KVCache
from models.config import ModelConfig
from models.params import Params
from models.prompts import PAD, HostInts, pad
from models.sampling import PerRow, check_key, per_row, sample_unchecked
from models.step import DecodeStep, decode_params

type Reason = Literal["eos", "max_tokens", "cache full"]
# (scores [B, V], positions [B]) -> tokens [B].
type Choose = Callable[[jax.Array, jax.Array], jax.Array]

# The reason of number n; 0 is a row that goes on.
REASONS: tuple[Reason | None, ...] = (None, "eos", "max_tokens", "cache full")
# Without a given length, caches have one of this multiple, so that few are compiled.
_LENGTH_STEP = 64


@dataclass
class Row:
    """What one row has become.

    Attributes:
        tokens: New ones so far, without the one that ended the text.
        reason: Why it stopped; None while it goes on. "eos": it came to a token of
            `eos_ids`. "max_tokens": it has as many. "cache full": its last token has no
            slot in the cache any more, so none can follow.
    """

    tokens: list[int] = field(default_factory=list[int])
    reason: Reason | None = None


@dataclass(frozen=True)
class _Batch:
    """What stays the same from token to token."""

    params: Params
    step: DecodeStep
    choose: Choose
    eos: jax.Array
    greedy: bool
    max_tokens: int


class Generation(Iterator[HostInts]):
    """An iterator over the tokens of all rows, int32 [B]; -1 for a row without one.

    Attributes:
        rows: What each row has become so far.
        cache: After the last step that was started, of the class of the batch; see
            `export_cache`. It may be one token ahead of `rows`.
    """

    def __init__(
        self, batch: _Batch, rows: int, scores: jax.Array, cache: KVCache
    ) -> None:
        """Start behind the prompts, whose scores these are."""
        self.rows = [Row() for _ in range(rows)]
        self.cache = cache
        self._run = self._tokens(batch, scores)

    def __next__(self) -> HostInts:
        """The next token of each row."""
        return next(self._run)

    def _tokens(self, batch: _Batch, scores: jax.Array) -> Iterator[HostInts]:
        size = batch.step.batch
        # Rows that fill the batch have ended before they begin.
        ended = jnp.asarray(fill(np.zeros(len(self.rows), np.int32), size, 1))
        tokens = batch.choose(scores, self.cache.lengths)
        for count in range(1, batch.max_tokens + 1):
            last = count == batch.max_tokens
            ended, active, tokens = _end(
                ended, tokens, self.cache, batch.eos, np.bool_(last)
            )
            now = tokens, ended
            if not last:
                # The device works on the next token while the caller has this one.
                out, self.cache = batch.step.unchecked(
                    batch.params, self.cache, tokens, active
                )
                lengths = self.cache.lengths
                tokens = out if batch.greedy else batch.choose(out, lengths)
            found = self._note(*jax.device_get(now))
            if (found != PAD).any():
                yield found
            if all(row.reason for row in self.rows):
                return

    def _note(self, tokens: HostInts, ended: HostInts) -> HostInts:
        """Hand tokens to the rows that had not ended."""
        found = np.full(len(self.rows), PAD, np.int32)
        for at, row in enumerate(self.rows):
            if row.reason:
                continue
            row.reason = REASONS[ended[at]]
            if row.reason != "eos":
                found[at] = tokens[at]
                row.tokens.append(int(tokens[at]))
        return found


def generate(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    max_length: int | None = None,
    eos_ids: Sequence[int] | None = None,
    temperature: PerRow = 0.0,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    key: jax.Array | None = None,
    implementation: Any = None,
) -> Generation:
    """Continue prompts, greedily or with the draws of `sample`.

    The batch runs in the smallest class that holds the prompts. What it compiles is
    kept for further calls with this configuration, class and length of cache.

    Args:
        config: Of the model.
        params: Its parameters.
        prompts: Token ids of each row, at least one each, at most 16 rows.
        max_tokens: Most tokens per row, at least 1.
        max_length: Slots of the cache per row: prompt and new tokens, all but the last.
            None for enough.
        eos_ids: Tokens that end a row; those of the model where None.
        temperature, top_k, top_p: See `sample`; a number, or one for each row.
        key: Of `jax.random.key`; needed where a temperature is above 0.
        implementation: See `mk.megakernel`.

    Returns:
        An iterator, which keeps what became of each row. The prompts are read before
        this returns.

    Raises:
        ValueError: A prompt is empty, longer than the cache, or has an id that is no
            token; there are too many; or another argument is out of range.
    """
    ids, lengths = pad(config, prompts)
    if max_tokens < 1:
        raise ValueError(f"{max_tokens=}: a row gets at least one token")
    slots = max_length
    if slots is None:
        slots = _round_up(ids.shape[1] + max_tokens)
    long = np.flatnonzero(lengths > slots).tolist()
    if long:
        raise ValueError(
            f"the prompts of rows {long} have {lengths[long].tolist()} tokens, but the "
            f"cache has {slots} slots; shorten them or raise max_length"
        )
    decoder = decoder_of(config, slots, implementation)
    sampling = [
        per_row(name, value, len(prompts))
        for name, value in (
            ("temperature", temperature),
            ("top_k", top_k),
            ("top_p", top_p),
        )
    ]
    greedy = not sampling[0].any()
    step = decoder.step(len(prompts), logits=not greedy)
    batch = _Batch(
        decode_params(config, params),
        step,
        _best if greedy else _draw(step.batch, sampling, key),
        _eos(config, eos_ids),
        greedy,
        max_tokens,
    )
    return Generation(batch, len(prompts), *_read(decoder, batch.params, prompts))


def _read(
    decoder: Decoder, params: Params, prompts: Sequence[Sequence[int]]
) -> tuple[jax.Array, KVCache]:
    cache = decoder.init_cache(len(prompts), params["embed"].dtype)
    return decoder.prefill(params, cache, prompts)


def _eos(config: ModelConfig, eos_ids: Sequence[int] | None) -> jax.Array:
    """The tokens that end a row, int32 [E]."""
    ids = config.eos_ids if eos_ids is None else eos_ids
    bad = [i for i in ids if not 0 <= i < config.vocab_size]
    if bad:
        raise ValueError(
            f"eos_ids {bad} are no tokens of the model, which are 0 to "
            f"{config.vocab_size - 1}"
        )
    return jnp.asarray(np.asarray(ids, np.int32))


def _draw(batch: int, sampling: list[Any], key: jax.Array | None) -> Choose:
    """Draws for a class of batches; rows that fill it are greedy."""
    if key is None:
        raise ValueError(
            "a temperature above 0 needs a key: key=jax.random.key(seed); the same key "
            "gives the same tokens"
        )
    check_key(key)
    temperature, top_k, top_p = (
        jnp.asarray(fill(values, batch, value))
        for values, value in zip(sampling, (0.0, 0, 1.0), strict=True)
    )

    def choose(scores: jax.Array, position: jax.Array) -> jax.Array:
        return sample_unchecked(scores, key, temperature, top_k, top_p, position)

    return choose


@jax.jit
def _best(scores: jax.Array, position: jax.Array) -> jax.Array:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


@jax.jit
def _end(
    ended: jax.Array, tokens: jax.Array, cache: KVCache, eos: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which rows end with these tokens, and why.

    Returns:
        Numbers of `REASONS`, int32 [B]; which rows go on, bool [B]; the tokens, 0 for
        rows that had ended.
    """
    full = jnp.where(cache.lengths >= cache.max_length, 3, 0)
    why = jnp.where(jnp.isin(tokens, eos), 1, jnp.where(last, 2, full))
    tokens = jnp.where(ended == 0, tokens, 0)
    ended = jnp.where(ended == 0, why, ended)
    return ended, ended == 0, tokens


def _round_up(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
