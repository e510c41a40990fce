"""Decode steps of Llama to lower for CUDA without a GPU."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import mkdsl as mk
from mkdsl.lower.machine import H200
from models.cache import init_cache
from models.llama import LlamaConfig, decode_params, decode_program
from models.registry import SHAPES, random_params
from tests.tiny_llama import TINY

__all__ = ["LLAMA_1B", "LLAMA_1B_2_LAYERS", "TINY", "arguments", "lowered_step"]

LLAMA_1B = SHAPES["llama-3.2-1b"]
assert isinstance(LLAMA_1B, LlamaConfig)
LLAMA_1B_2_LAYERS = replace(LLAMA_1B, num_layers=2)


def arguments(config: LlamaConfig, batch: int, slots: int) -> tuple[Any, Any, Any]:
    """Shapes of the arguments of a step."""

    def make() -> tuple[Any, Any, Any]:
        params = decode_params(config, random_params(config, jax.random.key(0)))
        cache = init_cache(config, batch, slots)
        return params, cache, jnp.zeros(batch, jnp.int32)

    return jax.eval_shape(make)


def lowered_step(
    config: LlamaConfig, batch: int, slots: int, **options: Any
) -> tuple[Any, Any]:
    """(a step as jax.jit lowers it for an H200, the megakernel in it)."""
    step = mk.megakernel(
        decode_program(config, batch, slots, **options),
        donate_argnums=1,
        implementation="mosaic_gpu",
        machine=H200,
    )
    traced = jax.jit(step).trace(*arguments(config, batch, slots))
    return traced.lower(lowering_platforms=("cuda",)), step
