"""One step of decoding, and the prefill before it.

    step = DecodeStep(config, batch, max_length)
    params = decode_params(config, params)
    logits, cache = prefill(config, params, init_cache(..), ids, lengths)
    tokens, cache = step(params, cache, tokens)     # again and again

A step is a pure function of arrays. It may be called from inside of `jax.jit`, also in
a loop there; its cache is donated, so the one that was passed in is gone.
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
