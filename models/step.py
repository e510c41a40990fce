"""One step of decoding, and the prefill before it.

    step = DecodeStep(config, batch, max_length)
    params = decode_params(config, params)
    logits, cache = prefill(config, params, init_cache(..), ids, lengths)
    tokens, cache = step(params, cache, tokens)     # again and again

A step is a pure function of arrays. It may be called from inside of `jax.jit`, also in
a loop there; its cache is donated, so the one that was passed in is gone. Rows that
have ended, or that only fill a batch, are those that are not `active`.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import replace
from functools import cache as memoize
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

import mkdsl as mk
from models.cache import KVCache, check_room, init_cache
from models.config import ModelConfig
from models.params import Params, build_tree
from models.registry import family_of


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
    """`step(params, cache, tokens, active=None) -> (next tokens, cache)`.

    Row b reads its token at position `cache.lengths[b]`, and its length grows by one.
    The length of a row that is not active stays: what it writes goes to its first
    unused slot, again and again, and nowhere if it has none.
    A row whose slots are used up: an error if lengths can be read, so nothing is lost.
    Under `jax.jit` they cannot: then its key and value are dropped, its length goes
    beyond `cache.max_length`, and its results are void from there on.

    Attributes:
        batch: Rows (B).
        max_length: Slots of the cache per row.
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
        self.batch, self.max_length = batch, max_length
        self._config = config
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
        self,
        params: Params,
        cache: KVCache,
        tokens: jax.Array,
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Decode one token of every row.

        Args:
            params: Of `decode_params`.
            cache: Donated.
            tokens: int32 [B].
            active: bool [B], which rows grow; all where None. The results of the
                others have no meaning.

        Raises:
            ValueError: The cache is full, and lengths are not traced; or an argument
                has another shape or dtype than the step is for.
        """
        self._check(params, cache, tokens, active)
        check_room(cache, jnp.ones_like(cache.lengths) if active is None else active)
        return self.unchecked(params, cache, tokens, active)

    def unchecked(
        self,
        params: Params,
        cache: KVCache,
        tokens: jax.Array,
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Call without a look at the lengths, which would wait for the device."""
        self._check(params, cache, tokens, active)
        if self._eager or isinstance(cache.lengths, Tracer):
            return self._step(params, cache, tokens, active)
        return self._jitted(params, cache, tokens, active)

    def why(self) -> str:
        """Which implementation runs on the default backend, and why."""
        return self.kernel.why()

    def _step(
        self,
        params: Params,
        cache: KVCache,
        tokens: jax.Array,
        active: jax.Array | None,
    ) -> tuple[jax.Array, KVCache]:
        out, cache = self.kernel(params, cache, tokens)
        more = 1 if active is None else active.astype(jnp.int32)
        return out, replace(cache, lengths=cache.lengths + more)

    def _check(self, params: Params, cache: KVCache, tokens: Any, active: Any) -> None:
        check_cache(self._config, params, cache, self.batch, self.max_length)
        _check_rows("tokens", tokens, jnp.int32, self.batch)
        if active is not None:
            _check_rows("active", active, jnp.bool_, self.batch)


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


def check_cache(
    config: ModelConfig, params: Params, cache: KVCache, batch: int, max_length: int
) -> None:
    """Raise if a cache is for another batch, length, model or dtype of parameters.

    Raises:
        ValueError: It says what the cache is and what it should be.
    """
    dtype = params["embed"].dtype
    want = (config.num_layers, batch, config.num_kv_heads, max_length, config.head_dim)
    make = f"make it by init_cache(config, {batch}, {max_length}, {dtype.name!r})"
    for name, array in (("k", cache.k), ("v", cache.v)):
        if array.shape != want:
            raise ValueError(
                f"cache.{name} is {list(array.shape)}, but this step reads {list(want)}"
                f" (layers, rows, key-value heads, slots, features); {make}"
            )
        if array.dtype != dtype:
            raise ValueError(
                f"cache.{name} is {array.dtype}, but the parameters are {dtype}; {make}"
            )
    _check_rows("cache.lengths", cache.lengths, jnp.int32, batch)


def _check_rows(name: str, values: Any, dtype: Any, batch: int) -> None:
    """Raise if this is no array [B] of a dtype; int64 of numpy is int32 in JAX."""
    shape, found = jnp.shape(values), jnp.result_type(values)
    if shape != (batch,) or found != dtype:
        raise ValueError(
            f"{name} must be {jnp.dtype(dtype).name} [{batch}], one for each row, not "
            f"{found} {list(shape)}"
        )


@memoize
def _jitted_prefill(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(
        "Callable[..., Any]", jax.jit(function, static_argnums=0, donate_argnums=2)
    )
