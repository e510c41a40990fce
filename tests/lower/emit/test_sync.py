"""Memory order in the lowered kernel: only release signals, only fenced waits.

What the H200 does with the other order is measured in tests/gpu/test_handoff.py.
"""

import pytest

from tests.lower.emit.lowered import kernels, ptx
from tests.lower.emit.models import TINY, lowered_step

SIGNAL = "red.release.gpu.global.add.u32"
POLL = "ld.relaxed.gpu.global.b32"
STORES_DONE = "cp.async.bulk.wait_group group = 0 : i32"
WARPGROUP = "bar.sync $0, 128;"


@pytest.fixture(scope="module")
def program() -> list[str]:
    """Inline PTX and NVVM operations of a whole decode step."""
    lowered, _ = lowered_step(TINY, 3, 256)
    (kernel,) = kernels(lowered)
    return ptx(kernel)


def places(program: list[str], what: str) -> list[int]:
    return [i for i, line in enumerate(program) if what in line]


def touches_device_memory_in_order(line: str) -> bool:
    """Atomics, reductions, and loads and stores with an order or a scope."""
    names = ("red.", "atom.", "ld.", "st.", "multimem.")
    return any(word.startswith(names) for word in line.replace(";", " ").split())


def test_the_only_ordered_accesses_are_signals_and_polls(program: list[str]) -> None:
    found = {line for line in program if touches_device_memory_in_order(line)}
    assert found == {f"@$2 {SIGNAL} [$0], $1;", f"{POLL} $0, [$1];"}


def test_a_signal_follows_completed_stores(program: list[str]) -> None:
    signals = places(program, SIGNAL)
    assert signals
    for at in signals:
        done = max(i for i in places(program, STORES_DONE) if i < at)
        between = program[done + 1 : at]
        # All threads have seen the stores complete before one of them signals.
        assert WARPGROUP in between
        assert not any("cp.async.bulk" in line for line in between)


def test_every_wait_for_stores_is_for_their_completion(program: list[str]) -> None:
    # `wait_group.read` returns once shared memory has been read: too early.
    waits = {line for line in program if line.startswith("cp.async.bulk.wait_group")}
    assert waits == {STORES_DONE}


def test_a_wait_acquires_and_fences_the_async_proxy(program: list[str]) -> None:
    polls = places(program, POLL)
    assert polls
    order = ["fence.acquire.gpu;", WARPGROUP, "fence.proxy.async.global;"]
    for at in polls:
        assert program[at + 1 : at + 4] == order


def test_nothing_polls_but_the_loader_and_the_fetcher(program: list[str]) -> None:
    """A consumer or storer that waited for other SMs could block its own ring."""
    first = program.index("setmaxnreg.inc.sync.aligned.u32 240;")
    roles = [i for i in places(program, "setmaxnreg.") if i >= first]
    consumer, _, _, storer = roles
    for at in places(program, POLL):
        assert not consumer < at < roles[1]
        assert at < storer
