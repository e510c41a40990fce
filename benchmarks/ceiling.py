"""The read bandwidth that this card was measured to give: the roofline of decode."""

import importlib.util
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Far above any cache: the L2 of an H200 holds 60 MB.
BUFFER_BYTES = 2**32


def _sum_as_bf16(x: jax.Array) -> jax.Array:
    """Sum of uint16 read as bf16, the top exponent bits cleared: no infinity or NaN."""
    bits = x & np.uint16(0x3FFF)
    return jnp.sum(lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32))


def _measure_jax(nbytes: int, repeats: int) -> dict[str, float]:
    columns = 8192
    x = jax.jit(
        lambda key: jax.random.bits(key, (nbytes // 2 // columns, columns), jnp.uint16)
    )(jax.random.key(0))
    found: dict[str, float] = {}
    calls = 4  # a few in flight, so that dispatch hides
    for name, read in (("jax_sum_bf16", _sum_as_bf16), ("jax_max_u16", jnp.max)):
        run = jax.jit(read)
        jax.block_until_ready(run(x))
        seconds: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready([run(x) for _ in range(calls)])
            seconds.append((time.perf_counter() - start) / calls)
        found[name] = x.nbytes / statistics.median(seconds) / 1e12
    return found


def _has_triton() -> bool:
    names = ("torch", "triton")
    return jax.default_backend() == "gpu" and all(
        importlib.util.find_spec(name) is not None for name in names
    )


def measure_reads(nbytes: int = BUFFER_BYTES, repeats: int = 20) -> dict[str, float]:
    """TB/s of every way to read `nbytes` that was tried: median of `repeats`.

    Raises:
        Exception: whatever the Triton kernel raises where torch and triton are
            installed. A ceiling that silently left out the fastest reader would
            flatter every result.
    """
    found = _measure_jax(nbytes, repeats)
    if _has_triton():
        from benchmarks import triton_read

        found |= triton_read.measure(nbytes, repeats)
    return found


def read_ceiling(nbytes: int = BUFFER_BYTES, repeats: int = 20) -> float:
    """Best measured read bandwidth in TB/s."""
    return max(measure_reads(nbytes, repeats).values())
