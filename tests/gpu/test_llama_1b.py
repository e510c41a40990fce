"""Llama-3.2-1B at its real size: one kernel a step, the same bits, the right tokens.

Weights are random, cache rows standard normal. One executable for each batch size runs
every length: how many tokens are cached and how many to decode are arrays. On a CPU
the same tests run on a small shape with implementation="xla".
"""

import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache
from models.llama import LlamaConfig, decode_params
from models.registry import SHAPES, random_params
from tests.gpu import decoding
from tests.gpu.decoding import greedy_loop, make_step, same_bits

Array = Any

STEPS = 64
# How far from float32 the kernel may be, as a multiple of plain JAX in bf16.
ALLOWED = 1.25
LLAMA_1B = SHAPES["llama-3.2-1b"]
assert isinstance(LLAMA_1B, LlamaConfig)
SMALL = replace(
    LLAMA_1B,
    vocab_size=509,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)

pytestmark = pytest.mark.timeout(200, method="thread")


@dataclass(frozen=True)
class Size:
    """What is tested where.

    Attributes:
        lengths: tokens cached before the loop, in the first row.
        repeats: of a loop, all to give the same bits.
    """

    config: LlamaConfig
    slots: int
    lengths: tuple[int, ...]
    repeats: int
    implementation: str

    def cached(self, batch: int, length: int) -> list[int]:
        """Tokens cached per row: other rows hold fewer than the first."""
        return [max(1, length - 37 * row) for row in range(batch)]

    def steps(self, length: int) -> int:
        """Tokens of a loop, so that they fit in the cache."""
        return min(STEPS, self.slots - length)


SIZES = {
    "1b": Size(LLAMA_1B, 2048, (1, 1024, 1984, 2047), 50, "mosaic_gpu"),
    "small": Size(SMALL, 160, (1, 96, 159), 3, "xla"),
}
BATCHES = (1, 8)
sized = pytest.mark.parametrize(
    "size",
    [
        pytest.param("small", marks=pytest.mark.slow),
        pytest.param("1b", marks=pytest.mark.gpu),
    ],
)
batched = pytest.mark.parametrize("batch", BATCHES)


@dataclass(frozen=True, eq=False)
class Compiled:
    """The loop of one batch size: (params, cache, tokens, n) -> (tokens, cache)."""

    step: Any
    run: Any


@functools.cache
def parameters(size: str) -> Any:
    config = SIZES[size].config
    return decode_params(config, random_params(config, jax.random.key(0)))


def first_tokens(size: str, batch: int) -> Array:
    return (jnp.arange(batch, dtype=jnp.int32) * 7 + 5) % SIZES[size].config.vocab_size


def initial_cache(size: str, batch: int, length: int) -> KVCache:
    s = SIZES[size]
    cached = s.cached(batch, length)
    return decoding.filled_cache(s.config, cached, s.slots, jax.random.key(1))


def compile_loop(size: str, batch: int) -> Compiled:
    s = SIZES[size]
    step = make_step(s.config, batch, s.slots, s.implementation)
    args = (
        parameters(size),
        initial_cache(size, batch, 1),
        first_tokens(size, batch),
        jnp.int32(0),
    )
    return Compiled(step, greedy_loop(step, STEPS).lower(*args).compile())


_started: dict[tuple[str, int], Future[Compiled]] = {}
_lock = threading.Lock()


def compiled(size: str, batch: int) -> Compiled:
    """The loop of a batch size; those of all sizes are compiled at the same time."""
    with _lock:
        if (size, batch) not in _started:
            parameters(size)
            pool = ThreadPoolExecutor(len(BATCHES))
            for b in BATCHES:
                _started[size, b] = pool.submit(compile_loop, size, b)
            pool.shutdown(wait=False)
    return _started[size, batch].result()


def decode(size: str, batch: int, length: int) -> tuple[Array, KVCache]:
    """Tokens [n, B] of a loop from `length`, and the cache after it."""
    n = SIZES[size].steps(length)
    cache = initial_cache(size, batch, length)
    tokens, cache = compiled(size, batch).run(
        parameters(size), cache, first_tokens(size, batch), jnp.int32(n)
    )
    return tokens[:n], cache


def plain_jax(
    size: str, batch: int, length: int, chosen: Array, dtype: Any
) -> tuple[Array, KVCache]:
    """Logits and cache of the oracle on the tokens that the loop read."""
    n, config = len(chosen), SIZES[size].config
    ids = decoding.inputs_of(first_tokens(size, batch), chosen)
    # Always the same number of steps, for one compilation. Those too many come last,
    # and the cache drops what has no slot.
    ids = jnp.pad(ids, ((0, STEPS - n), (0, 0)))
    start = initial_cache(size, batch, length)
    logits, cache = decoding.oracle_loop(config, parameters(size), start, ids, dtype)
    return logits[:n], replace(cache, lengths=start.lengths + n)


@batched
@sized
def test_tokens_and_cache_agree_with_plain_jax(size: str, batch: int) -> None:
    """Against float32, with the error of plain JAX in bf16 as the measure."""
    s = SIZES[size]
    # The small one is a few numbers on a CPU, whose XLA has no bf16 product of all
    # shapes: it is its own measure, rounded.
    low = jnp.bfloat16 if s.implementation == "mosaic_gpu" else jnp.float32
    for length in s.lengths:
        chosen, cache = decode(size, batch, length)
        assert ((chosen >= 0) & (chosen < s.config.vocab_size)).all()
        start = initial_cache(size, batch, length)
        oracle = functools.partial(plain_jax, size, batch, length, chosen=chosen)
        exact, exact_cache = oracle(dtype=jnp.float32)
        rounded, rounded_cache = oracle(dtype=low)
        noise = float(jnp.abs(rounded - exact).max()) or 0.02 * float(exact.std())
        # Two logits change places if both are off by the error allowed.
        gap = float(decoding.logit_gap(exact, chosen).max())
        assert gap <= 2 * ALLOWED * noise, f"{length=}: {gap=} {noise=}"
        new, *rows = decoding.new_rows(cache, start.lengths)
        _, *exact_rows = decoding.new_rows(exact_cache, start.lengths)
        _, *rounded_rows = decoding.new_rows(rounded_cache, start.lengths)
        error = float(decoding.relative_error(rows, exact_rows))
        theirs = float(decoding.relative_error(rounded_rows, exact_rows)) or 0.01
        assert error <= ALLOWED * theirs, f"{length=}: {error=} {theirs=}"
        assert decoding.same_outside(cache, start)
        assert int(new.sum()) == batch * len(chosen)
        print(f"{size} {batch=} {length=}: {gap=:.4f} {noise=:.4f} {error=:.2e}")


@batched
@sized
def test_repeats_give_the_same_bits(size: str, batch: int) -> None:
    for length in SIZES[size].lengths:
        first = decode(size, batch, length)
        same = [
            same_bits(decode(size, batch, length), first)
            for _ in range(SIZES[size].repeats)
        ]
        assert np.all(same), f"{length=}: {np.sum(~np.array(same))} repeats differ"


@batched
@sized
def test_loop_and_single_calls_give_the_same_bits(size: str, batch: int) -> None:
    s = SIZES[size]
    length = s.lengths[1]
    expected, expected_cache = decode(size, batch, length)
    cache = initial_cache(size, batch, length)
    token, params = first_tokens(size, batch), parameters(size)
    run, tokens = compiled(size, batch).run, []
    for _ in range(s.steps(length)):
        chosen, cache = run(params, cache, token, jnp.int32(1))
        token = chosen[0]
        tokens.append(token)
    assert same_bits((jnp.stack(tokens), cache), (expected, expected_cache))


@batched
@sized
def test_unused_slots_change_no_bit(size: str, batch: int) -> None:
    """Caches are NaN from their length on; with zeros there, tokens are the same."""
    s = SIZES[size]
    length = s.lengths[1]
    tokens, _ = decode(size, batch, length)
    cached = s.cached(batch, length)
    clean = decoding.filled_cache(s.config, cached, s.slots, jax.random.key(1), 0.0)
    n = jnp.int32(s.steps(length))
    first = first_tokens(size, batch)
    again, _ = compiled(size, batch).run(parameters(size), clean, first, n)
    assert same_bits(again[: len(tokens)], tokens)


@batched
@sized
def test_one_trace_serves_every_length(size: str, batch: int) -> None:
    for length in SIZES[size].lengths:
        decode(size, batch, length)
    assert compiled(size, batch).step.traces == 1


@pytest.mark.gpu
@batched
def test_a_step_is_one_kernel_and_moves_no_cache(batch: int) -> None:
    hlo = compiled("1b", batch).run.as_text()
    ((computation, body),) = decoding.kernel_calls(hlo)
    assert not computation.startswith("ENTRY")
    size = initial_cache("1b", batch, 1).k.size
    # Nothing as large as a cache is made in a step, but by the kernel, in place.
    assert [code for code, _ in decoding.large(body, size)] == ["custom-call"]
    moved = decoding.large(hlo.splitlines(), size)
    assert [line for code, line in moved if code.startswith("copy")] == []


def test_hlo_is_read_right() -> None:
    hlo = """\
HloModule jit_run, entry_computation_layout={(bf16[2,8]{1,0})->bf16[2,8]{1,0}}

%body (p: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %p = (s32[], bf16[2,8]{1,0}) parameter(0)
  %c = bf16[2,8]{1,0} get-tuple-element(%p), index=1
  %copy-start.1 = (bf16[2,8]{1,0}, bf16[2,8]{1,0}, u32[]) copy-start(%c)
  %custom-call.2 = (f32[2]{0}, bf16[2,8]{1,0}) custom-call(%c), \
custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(run)/custom-call"}
}

ENTRY %main (x: bf16[2,8]) -> bf16[2,8] {
  %x = bf16[2,8]{1,0} parameter(0)
  %copy.3 = bf16[2,8]{0,1} copy(%x)
  ROOT %w = (s32[], bf16[2,8]{1,0}) while(%copy.3), body=%body
}
"""
    ((computation, body),) = decoding.kernel_calls(hlo)
    assert computation.startswith("%body")
    assert [c for c, _ in decoding.large(body, 16)] == ["copy-start", "custom-call"]
    codes = [c for c, _ in decoding.large(hlo.splitlines(), 16)]
    assert codes == ["copy-start", "custom-call", "copy"]
    assert decoding.large(body, 17) == []


@pytest.mark.slow
@batched
def test_the_loop_lowers_for_cuda(batch: int) -> None:
    from mkdsl.lower.machine import H200
    from tests.lower.emit.lowered import kernels
    from tests.lower.emit.models import arguments

    slots = SIZES["1b"].slots
    step = make_step(LLAMA_1B, batch, slots, "mosaic_gpu", machine=H200)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    traced = greedy_loop(step, STEPS).trace(*arguments(LLAMA_1B, batch, slots), count)
    assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1
    assert step.traces == 1
