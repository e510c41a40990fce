"""Memory order between SMs: every signal and wait of the kernel is made here.

signal: the storer's bulk stores have completed (cp.async.bulk.wait_group 0, whose
    completion makes the writes visible to the waiting thread), then one thread issues
    red.release.gpu: all that it has observed happens before the increment.
    (PTX ISA 9.0, "Data Movement and Conversion Instructions: cp.async.bulk.wait_group";
    "Memory Consistency Model: Release and Acquire Patterns".)
wait: one thread polls with ld.relaxed.gpu, then fence.acquire.gpu, then a barrier of
    its warpgroup; then fence.proxy.async.global, since the loads that follow are bulk
    copies and their data may have been written by ordinary stores.
    (PTX ISA, "Memory Consistency Model: Proxies".)

A debug build bounds its waits; they order memory in the same way (bounded.py).

There is no relaxed signal: a completed bulk store followed by a relaxed increment was
measured to be a race on the H200 (2026-11-29: stale data in 1721 of 2000 launches of
the hand-off stress test; none with release).
"""

# pyright: reportCallIssue=false
# (Pallas is typed in part.)

from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower.emit.bounded import Place, Watch

Ref = Any
Scalar = Any


class Counters(NamedTuple):
    """The events in device memory; a `watch` bounds all waits, in a debug build."""

    events: Ref
    watch: Watch | None = None

    def signal(self, event: Scalar) -> None:
        """Raise an event by one; the caller's stores have completed."""
        plgpu.semaphore_signal(self.events.at[event], 1, memory_scope="gpu")

    def wait(
        self, event: Scalar, threshold: Scalar, where: Place | None = None
    ) -> None:
        """Return once an event has reached the threshold.

        Args:
            where: who waits; a watch needs it.
        """
        counter = self.events.at[event]
        if self.watch is None or where is None:
            plgpu.semaphore_wait(
                counter, threshold, decrement=False, memory_scope="gpu"
            )
        else:
            self.watch.wait(counter, event, threshold, where)
        _proxy_fence()


def _proxy_fence() -> None:
    @plgpu.inline_mgpu(arg_types=())
    def fence(ctx: Any) -> None:
        del ctx
        mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()
