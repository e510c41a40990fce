"""What a task costs: bytes, and a roofline with measured overheads.

What it does: counts the bytes that a task of each kind streams, loads and writes, and
estimates the time of a task on its SM and of a stage of tasks on all SMs.
Needs: kinds as decompose makes them; a Machine.
Guarantees: bytes are upper bounds (a run-time extent counts as its largest value).
Why it is correct: decoding is bound by reading, so a task takes the time to read its
streams and operands at its SM's share of the read bandwidth. Operands that many tasks
share come from L2, but through the same port of the SM; that they count in full is an
assumption, consistent with the measured 593 us of a step whose weights alone need 537.
Cost: linear in the accesses of a kind; n log(sms) for a stage.
Source: gpu_facts.md, measured on an NVIDIA H200, 2026-11-29.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mkdsl.lang.program import Access, Buffer
from mkdsl.lower.ir import Kind
from mkdsl.lower.machine import Machine


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one task of a kind, at the largest run-time extents.

    Attributes:
        streamed_bytes: through the page ring.
        loaded_bytes: operands that are resident while the task runs.
        written_bytes: results.
        ns: time on its SM while all SMs read.
    """

    streamed_bytes: int
    loaded_bytes: int
    written_bytes: int
    ns: float


def access_bytes(access: Access, buffer: Buffer) -> int:
    """Bytes of the block of an access, at the largest run-time extent."""
    return math.prod(axis.size for axis in access.axes) * buffer.item_bytes


def kind_cost(kind: Kind, buffers: Mapping[str, Buffer], machine: Machine) -> Cost:
    """The cost of one task of a kind."""
    streamed = loaded = 0
    for i, access in enumerate(kind.ins):
        size = access_bytes(access, buffers[access.buffer])
        # Operands beyond `operands` are the accumulators that a combine loads.
        named = i < len(kind.operands)
        if named and kind.task.params[kind.operands[i]].use == "stream":
            streamed += size
        else:
            loaded += size
    written = sum(access_bytes(a, buffers[a.buffer]) for a in kind.outs)
    ns = machine.task_ns + machine.read_ns(streamed + loaded)
    return Cost(streamed, loaded, written, ns)


def stage_ns(tasks: Iterable[tuple[int, float]], machine: Machine) -> float:
    """Time of independent tasks on all SMs, longest first to the emptiest SM.

    Args:
        tasks: (number, time of each in ns) of every sort of task.
    """
    ends = [0.0] * machine.sms
    for number, ns in sorted(tasks, key=lambda t: -t[1]):
        # While all SMs are level, whole rounds keep them so.
        level = ends[0] == max(ends)
        rounds, rest = divmod(number, machine.sms) if level else (0, number)
        ends = [end + rounds * ns for end in ends]
        for _ in range(rest):
            heapq.heapreplace(ends, ends[0] + ns)
    return max(ends)
