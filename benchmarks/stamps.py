"""Stamps of a decode step on the device, for `python -m mkdsl timeline --stamps`.

    python -m benchmarks.stamps --out stamps.npy --model llama-3.2-1b --batch 1
    python -m mkdsl timeline --stamps stamps.npy --model llama-3.2-1b --batch 1

Both commands plan the same step for an H200. Weights and cache are random, as in
bench_decode.py. The kernel that writes stamps is slower than the one that does not: the
shape of a timeline is that of a step, its length is not a result.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mkdsl.lower.emit.kernel import Launcher
from mkdsl.lower.machine import H200
from models.cache import KVCache, init_cache
from models.config import ModelConfig
from models.decode import DecodeStep, argument_shapes, decode_params
from models.registry import SHAPES, random_params

# Launches before the one that counts.
WARM_UP = 3


def launcher_of(config: ModelConfig, batch: int, slots: int) -> Launcher:
    """The kernel of a decode step with stamps."""
    step = DecodeStep(config, batch, slots, implementation="mosaic_gpu", machine=H200)
    shapes = argument_shapes(config, batch, slots)
    plan = step.kernel.lower(*shapes, platforms=("cuda",)).plan
    return Launcher(plan, timestamps=True)


def arguments(config: ModelConfig, batch: int, slots: int, context: int) -> Any:
    """Random parameters and a cache that is full up to the context."""
    key, other = jax.random.split(jax.random.key(0))
    params = decode_params(config, random_params(config, key))
    empty = init_cache(config, batch, slots)
    k, v = (
        jax.random.normal(one, empty.k.shape, empty.k.dtype)
        for one in jax.random.split(other)
    )
    cache: KVCache = replace(
        empty, k=k, v=v, lengths=jnp.full((batch,), context, jnp.int32)
    )
    return params, cache, jnp.arange(5, 5 + batch, dtype=jnp.int32)


def measure(launcher: Launcher, args: Any) -> np.ndarray[Any, Any]:
    """Stamps of one launch, int32 [SMs, longest queue, stamps], after some others."""
    run, leaves = jax.jit(launcher.run), jax.tree.leaves(args)
    for _ in range(WARM_UP):
        jax.block_until_ready(run(*leaves).outputs)
    return np.asarray(run(*leaves).stamps)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stamps")
    parser.add_argument("--out", type=Path, required=True, help=".npy to write")
    parser.add_argument("--model", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args(argv)
    config = SHAPES[args.model]
    launcher = launcher_of(config, args.batch, args.max_length)
    inputs = arguments(config, args.batch, args.max_length, args.context)
    np.save(args.out, measure(launcher, inputs))


if __name__ == "__main__":
    main()
