"""Decode token by token: one step, greedy text, and teacher-forced scores.

    step = DecodeStep(config, batch, max_length)
    params = decode_params(config, params)
    logits, cache = prefill(config, params, init_cache(..), ids, lengths)
    tokens, cache = step(params, cache, tokens)     # again and again

A step is a pure function of arrays. It may be called from inside of `jax.jit`, also in
a loop there; its cache is donated, so the one that was passed in is gone.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache as memoize
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

import mkdsl as mk
from models.cache import KVCache, check_room, init_cache
from models.config import ModelConfig
from models.params import Params, build_tree
from models.registry import family_of

type HostInts = np.ndarray[Any, np.dtype[np.int32]]
type HostFloats = np.ndarray[Any, np.dtype[np.float32]]

PAD = -1
# Prompts and caches have lengths of this multiple, so that few shapes are compiled.
_LENGTH_STEP = 64


def decode_params(config: ModelConfig, params: Params) -> Params:
    """Add to the parameters what a decode step needs besides; copies nothing."""
    return family_of(config).decode_params(config, params)


def argument_shapes(
    config: ModelConfig, batch: int, max_length: int, dtype: DTypeLike = jnp.bfloat16
) -> tuple[Params, KVCache, jax.ShapeDtypeStruct]:
    """Shapes of the arguments of a decode step, to trace or lower it without values."""
    leaves = family_of(config).leaves(config)
    params = build_tree(
        (leaf, jax.ShapeDtypeStruct(leaf.shape, dtype)) for leaf in leaves
    )
    return (
        jax.eval_shape(lambda p: decode_params(config, p), params),
        jax.eval_shape(lambda: init_cache(config, batch, max_length, dtype)),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


class DecodeStep:
    """`step(params, cache, tokens) -> (next tokens, cache)`.

    Row b reads its token at position `cache.lengths[b]`, and its length grows by one.
    A row whose slots are used up: an error if lengths can be read, so nothing is lost.
    Under `jax.jit` they cannot: then its key and value are dropped, its length goes
    beyond `cache.max_length`, and its results are void from there on.

    Attributes:
        kernel: The program, see `mk.megakernel`.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_length: int,
        *,
        logits: bool = False,
        implementation: Any = None,
        machine: Any = None,
        options: Any = None,
    ) -> None:
        """Write the program; it is traced and compiled by the first call.

        Args:
            config: Of the model.
            batch: Rows (B).
            max_length: Slots of the cache per row.
            logits: Whether to return scores, float32 [B, V], instead of tokens.
            implementation, machine, options: See `mk.megakernel`.
        """
        program = family_of(config).decode_program
        self.kernel = mk.megakernel(
            program(config, batch, max_length, logits=logits, machine=machine),
            donate_argnums=1,
            implementation=implementation,
            machine=machine,
            options=options,
        )
        # The simulator runs on the host, where it may call JAX itself.
        self._eager = implementation == "simulate"
        self._jitted = jax.jit(self._step, donate_argnums=1)

    def __call__(
        self, params: Params, cache: KVCache, tokens: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """Decode one token of every row.

        Args:
            params: Of `decode_params`.
            cache: Donated.
            tokens: int32 [B].

        Raises:
            ValueError: The cache is full, and lengths are not traced.
        """
        check_room(cache, jnp.ones_like(cache.lengths))
        return self.unchecked(params, cache, tokens)

    def unchecked(
        self, params: Params, cache: KVCache, tokens: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """Call without a look at the lengths, which would wait for the device."""
        if self._eager or isinstance(cache.lengths, Tracer):
            return self._step(params, cache, tokens)
        return self._jitted(params, cache, tokens)

    def why(self) -> str:
        """Which implementation runs on the default backend, and why."""
        return self.kernel.why()

    def _step(
        self, params: Params, cache: KVCache, tokens: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        out, cache = self.kernel(params, cache, tokens)
        return out, replace(cache, lengths=cache.lengths + 1)


def prefill(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    ids: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Read prompts in plain JAX; see `prefill` in `llama.py`. The cache is donated."""
    check_room(cache, lengths)
    return _jitted_prefill(family_of(config).prefill)(
        config, params, cache, ids, lengths
    )


@memoize
def _jitted_prefill(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(
        "Callable[..., Any]", jax.jit(function, static_argnums=0, donate_argnums=2)
    )


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
        scores, cache = step.unchecked(params, cache, tokens)
        # A row that has ended stays where it is: it writes the same slot again.
        cache = replace(cache, lengths=jnp.asarray(np.minimum(lengths, t + 1)))
        out[real, t] = np.asarray(scores)[real]
    return out


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


def _real(row: HostInts) -> int:
    """Ids before the padding at the end."""
    return len(row) - int(np.argmax(row[::-1] != PAD)) if (row != PAD).any() else 0


def _round_up(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
