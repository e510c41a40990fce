"""What a schedule costs on a machine: bytes, critical path, bounds, estimated time.

What it does: weighs every task with the cost model of the machine and says how long a
step must take, and about how long it will.
Needs: a Schedule; a KernelPlan says how many pages the ring has, else it has all of the
shared memory.
Guarantees: numbers alone; nothing is planned with them. The same schedule gives the
same numbers.

Bytes: streamed by all tasks, at the expected share of run-time extents. Operands that
stay resident come from L2 (many tasks share them) and are not counted.
Critical path: the longest chain of tasks along waits. A task counts with what no
prefetch can hide: its body's fixed time and computed operands, and its streamed pages
beyond those of a full ring, at its SM's share of the bandwidth. A wait counts with
signal, poll and arrival of operands.
Lower bound: the greater of bytes over bandwidth and critical path. It is a bound of the
model: an SM that streams alone is faster than its share.
Estimate: every SM runs its queue with a loader that is ahead as far as the ring allows,
one task at a time with resident operands, and a storer that signals in order.

Why it is correct: dependences point to lower ids and queues ascend, so one pass in id
order sees every time after those that it depends on.
Cost: linear in tasks and members of events.
Source: docs/plans.md compares it with measured steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mkdsl.lang.program import Dot
from mkdsl.lower.ir import FETCH_GATES, Gate, KernelPlan, Kind, Schedule, Wait
from mkdsl.lower.machine import Machine
from mkdsl.lower.pages import (
    kind_streams,
    round_up,
    stream_item_bytes,
    stream_operands,
    stream_page,
)
from mkdsl.lower.schedule import ScheduleOptions, call_depths, streamed_bytes

SHARE = ScheduleOptions().run_time_share


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes that a stage streams.

    Attributes:
        calls: names of its calls.
        layer: of the first of them.
        total, most: of all SMs, and of the one that streams most.
        balance: most over the mean of all SMs of the machine, 1 at best.
    """

    calls: tuple[str, ...]
    layer: int
    total: int
    most: int
    balance: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a schedule costs.

    Attributes:
        read_bytes: streamed by all tasks.
        read_ns: their time at the bandwidth of the machine.
        critical_ns: the longest chain.
        step_ns: from launch to the last store, estimated.
        stages: those that stream anything.
    """

    read_bytes: int
    read_ns: float
    critical_ns: float
    step_ns: float
    stages: tuple[StageBytes, ...]

    @property
    def lower_bound_ns(self) -> float:
        """No schedule of these tasks is faster, if the cost model is right."""
        return max(self.read_ns, self.critical_ns)

    def worst_balance(self, least_bytes: int) -> StageBytes | None:
        """The least balanced stage of those that stream so many bytes per SM."""
        large = [s for s in self.stages if s.most / s.balance > least_bytes]
        return max(large, key=lambda s: s.balance, default=None)


@dataclass(frozen=True, slots=True)
class Work:
    """What one task of a kind costs.

    Attributes:
        size_bytes: that it streams.
        slots: pages that they take.
        page_ns: between its pages, while all SMs stream.
        body_ns: of its body before the first page.
        resident: whether it has operands to wait for besides the streams.
    """

    size_bytes: int
    slots: int
    page_ns: float
    body_ns: float
    resident: bool

    def beyond_ns(self, ring: int) -> float:
        """Time of the pages that a full ring does not hold."""
        return max(0, self.slots - ring) * self.page_ns


def estimate(
    plan: Schedule | KernelPlan, machine: Machine, share: float = SHARE
) -> Estimate:
    """What a plan costs.

    Args:
        share: expected part of a block whose extent is known only at run time.
    """
    schedule, ring = plan, machine.smem_bytes // machine.page_bytes
    if isinstance(plan, KernelPlan):
        schedule, ring = plan.schedule, plan.ring
    assert isinstance(schedule, Schedule)
    graph = schedule.events.graph
    works = [
        work_of(kind, streamed_bytes(kind, schedule.events, share), machine)
        for kind in graph.kinds
    ]
    work = [works[t.kind] for t in graph.tasks]
    read_bytes = sum(w.size_bytes for w in work)
    return Estimate(
        read_bytes,
        read_bytes * 1e9 / machine.read_bytes_per_s,
        _critical_ns(schedule, work, machine, ring),
        machine.launch_ns + _step_ns(schedule, work, machine, ring),
        _stage_bytes(schedule, work, machine),
    )


def work_of(kind: Kind, size_bytes: int, machine: Machine) -> Work:
    """What one task of a kind costs that streams so many bytes."""
    streams = kind_streams(kind)
    pages = [
        math.prod(stream_page(kind, s, machine.page_bytes))
        * stream_item_bytes(kind.task, s)
        for s in streams
    ]
    slots = math.ceil(size_bytes / min(pages)) if pages else 0
    computed = [s.depth for s in streams if isinstance(s, Dot) and s.lhs is None]
    columns = 1 if kind.pieces else round_up(kind.task.columns, 8)
    streamed = {i for s in streams for i in stream_operands(s)}
    return Work(
        size_bytes,
        slots,
        machine.read_ns(size_bytes) / slots if slots else 0.0,
        machine.task_ns + machine.computed_ns * columns * max(computed, default=0),
        bool(set(kind.operands) - streamed) or len(kind.ins) > len(kind.operands),
    )


# ------------------------------------------------------------------- critical path


def _critical_ns(
    schedule: Schedule, work: Sequence[Work], machine: Machine, ring: int
) -> float:
    """The longest chain of task times and hand-offs."""
    events = schedule.events
    reached = [0.0] * len(events.events)
    longest = 0.0
    for task, waits in enumerate(events.waits):
        begin = max((reached[w.event] for w in waits), default=0.0)
        one = work[task]
        end = begin + one.body_ns + one.beyond_ns(ring)
        longest = max(longest, end + machine.signal_ns)
        signal = events.signals[task]
        if signal >= 0:
            reached[signal] = max(reached[signal], end + machine.hand_off_ns)
    return longest


# ------------------------------------------------------------------ estimated time


@dataclass(slots=True)
class _Sm:
    """When each role of an SM is free, and when slots of its ring were.

    consumed[i] is (slots used up by its first i + 1 tasks, when the last was).
    """

    loader: float = 0.0
    consumer: float = 0.0
    storer: float = 0.0
    slots: int = 0
    consumed: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    first: int = 0

    def free_at(self, slots: int) -> float:
        """When the consumer has used up so many slots."""
        while self.first < len(self.consumed) and self.consumed[self.first][0] < slots:
            self.first += 1
        if slots <= 0 or self.first == len(self.consumed):
            return 0.0
        return self.consumed[self.first][1]


def _step_ns(
    schedule: Schedule, work: Sequence[Work], machine: Machine, ring: int
) -> float:
    """When the last task has stored, from the start of the kernel."""
    events = schedule.events
    sms = [_Sm() for _ in schedule.queues]
    sm_of = {t: sm for sm, queue in enumerate(schedule.queues) for t in queue}
    signalled = [0.0] * len(events.events)
    for task, waits in enumerate(events.waits):
        sm, one = sms[sm_of[task]], work[task]

        def seen(gate: Gate, waits: tuple[Wait, ...] = waits) -> float:
            # One after the other; each costs its poll, also where it is satisfied.
            at = 0.0
            for w in waits:
                if w.gate == gate:
                    at = max(at, signalled[w.event]) + machine.wait_ns
            return at

        end = _run(sm, one, seen, machine, ring)
        sm.storer = max(sm.storer, end)
        signal = events.signals[task]
        if signal >= 0:
            sm.storer += machine.signal_ns
            signalled[signal] = max(signalled[signal], sm.storer)
    return max((max(s.storer, s.consumer) for s in sms), default=0.0)


def _run(
    sm: _Sm, one: Work, seen: Callable[[Gate], float], machine: Machine, ring: int
) -> float:
    """When the body of the next task of an SM ends."""
    # Resident operands have one slot: they are loaded when the body before is done.
    landed = max(sm.consumer, seen("resident"))
    if one.resident:
        landed += machine.operands_ns
    body = landed + one.body_ns
    if one.slots:
        before = sm.free_at(sm.slots + min(one.slots, ring) - ring)
        begin = max(sm.loader, seen("stream"), before)
        ahead = begin + one.slots * one.page_ns
        sm.loader = max(ahead, body + one.beyond_ns(ring))
        sm.slots += one.slots
    # What follows a block can start no sooner than its last wait; the earlier part of
    # the body is done by then.
    late = max((seen(gate) for gate in FETCH_GATES[1:]), default=0.0)
    body = max(body, late + machine.operands_ns if late else 0.0)
    sm.consumer = max(body, sm.loader if one.slots else 0.0)
    sm.consumed.append((sm.slots, sm.consumer))
    return sm.consumer


# ------------------------------------------------------------------------- balance


def _stage_bytes(
    schedule: Schedule, work: Sequence[Work], machine: Machine
) -> tuple[StageBytes, ...]:
    graph = schedule.events.graph
    depths = call_depths(schedule.events)
    sm_of = {t: sm for sm, queue in enumerate(schedule.queues) for t in queue}
    stages: dict[int, dict[int, int]] = {}
    calls: dict[int, dict[str, None]] = {}
    layers: dict[int, int] = {}
    for task, depth in enumerate(depths):
        if not work[task].size_bytes:
            continue
        loads = stages.setdefault(depth, {})
        loads[sm_of[task]] = loads.get(sm_of[task], 0) + work[task].size_bytes
        calls.setdefault(depth, {})[graph.kinds[graph.tasks[task].kind].call] = None
        layers.setdefault(depth, graph.tasks[task].layer)
    made: list[StageBytes] = []
    for depth in sorted(stages):
        total, most = sum(stages[depth].values()), max(stages[depth].values())
        balance = most * machine.sms / total
        made.append(
            StageBytes(tuple(calls[depth]), layers[depth], total, most, balance)
        )
    return tuple(made)
