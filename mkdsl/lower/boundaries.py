"""What boundaries between kernels cost a step, and what bounds each of its tasks.

What it does: takes the stages of a plan as kernels, one launched after the other, and
weighs what lies between them: launch, partial last wave, memory bubble, round trips of
activations. And says of every kind of task whether bytes, operations or latency are
the longest part of it.
Needs: a KernelPlan, whose tasks are the tiles of those kernels.
Guarantees: numbers alone; nothing is planned with them.

    gain = boundaries / (work + boundaries)

is the share of such a step that a kernel without boundaries could save at most. `work`
is the roofline of the whole step: bytes over bandwidth or operations over their rate.

Launch: an assumption that the caller makes, LAUNCH_NS if none.
Last wave: tasks of a stage go to the emptiest SM; what the longest SM takes beyond the
mean of all is idle time of the others. An SM that is alone reads faster than its share,
so this is the most that it costs.
Bubble: a kernel has no loads in flight when it starts; its first bytes arrive after
`operands_ns` of the machine.
Round trip: what a stage writes for others, once out and once back in. That many tasks
of the next stage read it is left to L2.
Operations: one multiplication and one addition for each streamed element and column:
exact for mk.dot, and for folds that use each block once.
Cost: linear in tasks.
Source: docs/boundaries.md, with measured values beside the estimates.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mkdsl.lang.program import Buffer
from mkdsl.lower.cost import access_bytes, stage_ns
from mkdsl.lower.estimate import SHARE, work_of
from mkdsl.lower.ir import EventGraph, KernelPlan, Kind
from mkdsl.lower.machine import Machine
from mkdsl.lower.schedule import call_depths, streamed_bytes

Bound = Literal["memory", "compute", "latency"]

# Assumed: from the end of a kernel to the start of the next in a CUDA graph.
LAUNCH_NS = 1000.0


@dataclass(frozen=True, slots=True)
class Waves:
    """How so many blocks fill the SMs, one block each at a time."""

    full: int
    last: int
    idle: int


def waves(blocks: int, sms: int) -> Waves:
    """Full waves, blocks of the last partial one, and SMs without a block then.

    >>> waves(512, 148)
    Waves(full=3, last=68, idle=80)
    >>> waves(264, 132)
    Waves(full=2, last=0, idle=0)
    """
    full, last = divmod(blocks, sms)
    return Waves(full, last, sms - last if last else 0)


def potential_gain(boundary_ns: float, work_ns: float) -> float:
    """Share of a step that boundaries take, if nothing of them is hidden.

    >>> potential_gain(25.0, 75.0)
    0.25
    """
    whole = boundary_ns + work_ns
    return boundary_ns / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Boundary:
    """What comes with a stage if it is a kernel of its own.

    Attributes:
        calls: names of its calls.
        layer: of the first of them.
        blocks: its tasks.
        waves: of them.
        launch_ns, tail_ns, bubble_ns, trip_ns: see the module.
    """

    calls: tuple[str, ...]
    layer: int
    blocks: int
    waves: Waves
    launch_ns: float
    tail_ns: float
    bubble_ns: float
    trip_ns: float

    @property
    def total_ns(self) -> float:
        """The whole boundary."""
        return self.launch_ns + self.tail_ns + self.bubble_ns + self.trip_ns


@dataclass(frozen=True, slots=True)
class TaskBound:
    """What bounds the tasks of a kind, while all SMs run.

    Attributes:
        call, mode: of the kind.
        tasks: how many.
        read_bytes: streamed by one.
        operations: of one, multiplications and additions.
        memory_ns: its bytes at its SM's share of the bandwidth.
        compute_ns: its operations at its SM's share of the peak.
        latency_ns: what it takes without either: fixed time of the body, and the
            hand-off to a task that waits for it.
    """

    call: str
    mode: str
    tasks: int
    read_bytes: int
    operations: int
    memory_ns: float
    compute_ns: float
    latency_ns: float

    @property
    def roofline_ns(self) -> float:
        """The least time of bytes and operations."""
        return max(self.memory_ns, self.compute_ns)

    @property
    def intensity(self) -> float:
        """Operations for a byte."""
        return self.operations / self.read_bytes if self.read_bytes else 0.0

    @property
    def bound(self) -> Bound:
        """The longest of the three."""
        if self.latency_ns > self.roofline_ns:
            return "latency"
        return "memory" if self.memory_ns >= self.compute_ns else "compute"


@dataclass(frozen=True, slots=True)
class Economics:
    """A step as kernels, and its tasks.

    Attributes:
        read_bytes, operations: of all tasks.
        work_ns: the greater of their times on all SMs.
        boundaries: of every stage, in order.
        tasks: of every kind.
    """

    read_bytes: int
    operations: int
    work_ns: float
    boundaries: tuple[Boundary, ...]
    tasks: tuple[TaskBound, ...]

    @property
    def boundary_ns(self) -> float:
        """All boundaries together."""
        return sum(b.total_ns for b in self.boundaries)

    @property
    def gain(self) -> float:
        """Share of the step that boundaries take."""
        return potential_gain(self.boundary_ns, self.work_ns)


def economics(
    plan: KernelPlan,
    machine: Machine,
    share: float = SHARE,
    launch_ns: float = LAUNCH_NS,
) -> Economics:
    """What boundaries cost if the stages of a plan were kernels.

    Args:
        share: expected part of a block whose extent is known only at run time.
        launch_ns: between two kernels.
    """
    events = plan.schedule.events
    graph = events.graph
    counts = Counter(t.kind for t in graph.tasks)
    bounds = tuple(
        _task_bound(kind, counts[i], events, machine, share)
        for i, kind in enumerate(graph.kinds)
    )
    read_bytes = sum(b.tasks * b.read_bytes for b in bounds)
    operations = sum(b.tasks * b.operations for b in bounds)
    work_ns = max(
        read_bytes * 1e9 / machine.read_bytes_per_s,
        operations * 1e9 / machine.flops_per_s,
    )
    boundaries = _boundaries(events, bounds, machine, launch_ns)
    return Economics(read_bytes, operations, work_ns, boundaries, bounds)


def _task_bound(
    kind: Kind, tasks: int, events: EventGraph, machine: Machine, share: float
) -> TaskBound:
    read_bytes = streamed_bytes(kind, events, share)
    items = {b.name: b.item_bytes for b in events.graph.buffers}
    widest = max(
        (
            items[access.buffer]
            for i, access in zip(kind.operands, kind.ins, strict=False)
            if kind.task.params[i].use == "stream"
        ),
        default=1,
    )
    operations = 2 * kind.task.columns * (read_bytes // widest)
    work = work_of(kind, read_bytes, machine)
    return TaskBound(
        kind.call,
        kind.mode,
        tasks,
        read_bytes,
        operations,
        machine.read_ns(read_bytes),
        operations * machine.sms * 1e9 / machine.flops_per_s,
        work.body_ns + machine.hand_off_ns,
    )


def _boundaries(
    events: EventGraph,
    bounds: tuple[TaskBound, ...],
    machine: Machine,
    launch_ns: float,
) -> tuple[Boundary, ...]:
    graph = events.graph
    buffers = {b.name: b for b in graph.buffers}
    written = [_written_bytes(kind, buffers) for kind in graph.kinds]
    stages: dict[int, Counter[int]] = {}
    layers: dict[int, int] = {}
    for task, depth in zip(graph.tasks, call_depths(events), strict=True):
        stages.setdefault(depth, Counter())[task.kind] += 1
        layers.setdefault(depth, task.layer)
    made: list[Boundary] = []
    for depth in sorted(stages):
        kinds = stages[depth]
        times = [(n, bounds[k].roofline_ns) for k, n in kinds.items()]
        mean = sum(n * ns for n, ns in times) / machine.sms
        blocks = sum(kinds.values())
        trip = 2 * sum(n * written[k] for k, n in kinds.items())
        made.append(
            Boundary(
                tuple(dict.fromkeys(graph.kinds[k].call for k in kinds)),
                layers[depth],
                blocks,
                waves(blocks, machine.sms),
                launch_ns,
                stage_ns(times, machine) - mean,
                machine.operands_ns,
                trip * 1e9 / machine.read_bytes_per_s,
            )
        )
    return tuple(made)


def _written_bytes(kind: Kind, buffers: Mapping[str, Buffer]) -> int:
    """Bytes that a task writes for others of the step."""
    outs = [(a, buffers[a.buffer]) for a in kind.outs]
    return sum(access_bytes(a, b) for a, b in outs if b.role == "temp")
