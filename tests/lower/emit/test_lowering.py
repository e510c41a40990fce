"""A decode step lowers for CUDA to one kernel, quickly, whatever its depth."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lower.emit.lowered import kernels
from tests.lower.emit.models import LLAMA_1B, LLAMA_1B_2_LAYERS, TINY, lowered_step

# Measured 2026-11-29 on two cores: 4.6 s at batch 1.
MOST_SECONDS = 20


@pytest.mark.slow
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_custom_call_that_writes_the_cache_in_place(
    batch: int, logits: bool
) -> None:
    slots = 128
    lowered, _ = lowered_step(TINY, batch, slots, logits=logits)
    (kernel,) = kernels(lowered)
    rows = TINY.num_layers * batch * TINY.num_kv_heads
    cache = f"tensor<{rows}x{slots}x{TINY.head_dim}xbf16>"
    assert kernel.operands.count(cache) == kernel.results.count(cache) == 2
    aliased = {(kernel.operands[i], kernel.results[o]) for i, o in kernel.aliases}
    assert (cache, cache) in aliased
    assert sum(kernel.results[o] == cache for _, o in kernel.aliases) == 2


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_llama_1b_lowers_in_time(batch: int) -> None:
    start = time.perf_counter()
    lowered, step = lowered_step(LLAMA_1B, batch, 2048)
    assert time.perf_counter() - start < MOST_SECONDS
    assert len(kernels(lowered)) == 1
    assert step.traces == 1


@pytest.mark.slow
def test_code_does_not_grow_with_layers() -> None:
    (deep,) = kernels(lowered_step(LLAMA_1B, 1, 2048)[0])
    (shallow,) = kernels(lowered_step(LLAMA_1B_2_LAYERS, 1, 2048)[0])
    deep_text, shallow_text = deep.as_text(), shallow.as_text()
    assert deep_text.count("wgmma.mma_async") == shallow_text.count("wgmma.mma_async")
    # Instruction words come to shared memory in pieces of 256, so a longer queue has
    # a few copies more at the start: 515 of 123,883 operations for 14 layers.
    assert deep_text.count("\n") < 1.01 * shallow_text.count("\n")


KERNEL = """
import hashlib
from tests.lower.emit.lowered import kernels
from tests.lower.emit.models import TINY, lowered_step
(kernel,) = kernels(lowered_step(TINY, 3, 256)[0])
print(hashlib.sha256(kernel.bytecode).hexdigest())
"""


@pytest.mark.slow
def test_two_processes_lower_the_same_bytes() -> None:
    """So a compiled kernel is found again, whatever the seed of hashes."""
    digests = [
        subprocess.run(
            [sys.executable, "-c", KERNEL],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert len(digests[0]) == 64
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_lowering_twice_gives_the_same_kernel() -> None:
    def text() -> str:
        (kernel,) = kernels(lowered_step(TINY, 3, 256)[0])
        # Mosaic numbers the modules of a process, to name the files of a dump, so the
        # second one has other bytes and another hash: jax 0.11.2, lowering.py, the
        # call of get_or_set_dump_options in lower_jaxpr_to_module of mosaic_gpu.
        return re.sub(r'dump_basename = "[^"]*"', "", kernel.as_text(), count=1)

    assert text() == text()
