"""Where the time of a step went: one form for the device and for the simulator.

    Timeline ::= TaskRun*, Span*
    TaskRun  ::= when a task passed its stages, and what held it back
    Span     ::= one role of one SM, busy with one task: wait | load | compute | store

Both come from stamps (lower/stamps.py): the kernel writes them with
`Launcher(plan, timestamps=True)`, virtual_time.py makes them from the cost model.

    wait     for an event: a task of another SM (or of another role) is not done
    load     operands or pages are on their way
    compute  the body
    store    results leave, and the signal is released; of a consumer, it waits for
             the results before these to leave

Spans of one role of an SM never overlap; the gaps are time in which it had nothing to
do. The consumer's spans are those that matter: it waits with its activation loader, so
the wait is shown in both. Where it waits for a later block of an operand, its span is
`load`, as for pages. A task whose stamps lack those of its pages has one compute span
from its operands to its end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mkdsl.errors import LaunchError
from mkdsl.lower.ir import FETCH_GATES, Gate, KernelPlan, TaskGraph
from mkdsl.lower.stamps import (
    BEGAN,
    BEGAN_PAGES,
    COMPUTED,
    ENDED_PAGES,
    FETCHED,
    FIRST_PAGE,
    LANDED,
    SIGNALLED,
    STAMPS,
    STORED,
    WAITED,
)
from mkdsl.runtime.agents import ROLES, Role

Cause = Literal["wait", "load", "compute", "store"]
CAUSES: tuple[Cause, ...] = ("wait", "load", "compute", "store")
LOADER, FETCHER, CONSUMER, STORER = ROLES
NEEDED = (WAITED, FETCHED, LANDED, COMPUTED, BEGAN, SIGNALLED)
Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """What a role of an SM did for a task.

    Attributes:
        task: its id in the plan.
        start_ns, end_ns: from the first stamp of the step.
        event: that a wait was for, the last of them to be reached; else None.
    """

    sm: int
    role: Role
    task: int
    cause: Cause
    start_ns: int
    end_ns: int
    event: int | None = None

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class TaskRun:
    """When a task passed its stages, in ns.

    Attributes:
        task: its id in the plan.
        free_ns: when its SM had computed the task before it.
        waited_ns: its resident waits were over.
        landed_ns: its resident operands were there.
        computed_ns: its body was done.
        signalled_ns: its results were visible to others.
        previous: the task before it on its SM, or None.
        event, producer: the event that it waited for to the last, and the member whose
            signal completed it; None if nothing held it up but its own SM.
    """

    task: int
    name: str
    call: str
    layer: int
    sm: int
    free_ns: int
    waited_ns: int
    landed_ns: int
    computed_ns: int
    signalled_ns: int
    previous: int | None
    event: int | None
    producer: int | None

    @property
    def wait_ns(self) -> int:
        """How long its SM was held up by the event."""
        return 0 if self.event is None else max(0, self.waited_ns - self.free_ns)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step.

    Attributes:
        name: of the program.
        source: who measured: "simulator" or "device", or what the caller says.
        sms: SMs that have a queue.
        runs: of every task, by its id.
        spans: by SM, role and time.
    """

    name: str
    source: str
    sms: int
    runs: tuple[TaskRun, ...]
    spans: tuple[Span, ...]

    @property
    def end_ns(self) -> int:
        """When the last signal was out."""
        return max((r.signalled_ns for r in self.runs), default=0)

    def total_ns(self, role: Role, cause: Cause, sm: int | None = None) -> int:
        """Time that a role spent so, on an SM or on all."""
        return sum(
            s.ns
            for s in self.spans
            if s.role == role and s.cause == cause and sm in (None, s.sm)
        )

    def critical_path(self) -> tuple[TaskRun, ...]:
        """The chain of tasks that held one another up to the end, in order.

        From the task that was done last, back to the producer whose signal it waited
        for, or, where it did not wait, to the task before it on its SM.
        """
        path: list[TaskRun] = []
        run = max(self.runs, key=lambda r: r.signalled_ns, default=None)
        while run is not None:
            path.append(run)
            back = run.previous if run.producer is None else run.producer
            run = None if back is None else self.runs[back]
        return tuple(reversed(path))


def from_stamps(plan: KernelPlan, stamps: Any, source: str = "device") -> Timeline:
    """The timeline of one step.

    Args:
        plan: that ran.
        stamps: int32, uint32 or int64 [SMs, longest queue, 8 or more], ns; see
            lower/stamps.py. 32-bit clocks may wrap once.
        source: for titles.

    Raises:
        LaunchError: they are not those of a whole run of this plan.
    """
    times = _times(plan, np.asarray(stamps))
    graph = plan.schedule.events.graph
    runs: list[TaskRun | None] = [None] * len(graph.tasks)
    reached = _Reached(plan, times)
    spans: list[Span] = []
    for sm, queue in enumerate(plan.schedule.queues):
        previous: int | None = None
        for i, task in enumerate(queue):
            free = int(times[sm, i - 1, COMPUTED]) if i else 0
            run = _run(graph, reached, task, sm, times[sm, i], free, previous)
            runs[task], previous = run, task
        spans += _spans(sm, [r for t in queue if (r := runs[t])], times[sm], reached)
    done = [run for run in runs if run is not None]
    if len(done) != len(runs):
        raise LaunchError(f"{len(runs) - len(done)} tasks of the plan are in no queue")
    return Timeline(graph.program.name, source, len(times), tuple(done), tuple(spans))


def task_name(graph: TaskGraph, task: int) -> str:
    """A task for a picture or a report."""
    one = graph.tasks[task]
    kind = graph.kinds[one.kind]
    mode = {"full": "", "combine": " combine", "partial": f" part {one.part}"}[
        kind.mode
    ]
    return f"{kind.call}{mode} layer {one.layer} {list(one.pid)}"


# -------------------------------------------------------------------------- stamps


def _times(plan: KernelPlan, stamps: NDArray[Any]) -> Times:
    """ns from the first stamp, [SMs, positions, len(STAMPS)]; -1: not noted."""
    queues = plan.schedule.queues
    want = len(queues), max(map(len, queues), default=0)
    if stamps.ndim != 3 or stamps.shape[:2] != want or stamps.shape[2] <= SIGNALLED:
        raise LaunchError(
            f"stamps are {list(stamps.shape)}; this plan has {want[0]} SMs and queues "
            f"of up to {want[1]} tasks, each with {SIGNALLED + 1} stamps or more",
            hint="give the stamps of a launch of the same plan: `Results.stamps`",
        )
    there = stamps != 0
    if not there.any():
        raise LaunchError(
            "stamps are all zeros: nothing was noted",
            hint="build the kernel with Launcher(plan, timestamps=True)",
        )
    times = stamps.astype(np.int64)
    if stamps.dtype.itemsize == 4:
        # The low halves of a clock: differences are right whether it wrapped or not.
        first = times[there][0]
        times = (times - first).astype(np.uint32).view(np.int32).astype(np.int64)
    times -= times[there].min()
    times[~there] = -1
    more = len(STAMPS) - stamps.shape[2]
    times = np.pad(times, ((0, 0), (0, 0), (0, max(0, more))), constant_values=-1)
    for sm, queue in enumerate(queues):
        missing = np.argwhere(times[sm, : len(queue)][:, NEEDED] < 0)
        if len(missing):
            i, what = missing[0].tolist()
            raise LaunchError(
                f"SM {sm}, task {i} of its queue has no stamp "
                f"'{STAMPS[NEEDED[what]]}': the step did not end, or ran another plan",
                hint="a kernel that hangs is reported by the debug build "
                "(docs/debug_a_hang.md)",
            )
    return times


class _Reached:
    """When each wait of a task was satisfied, and by whom."""

    def __init__(self, plan: KernelPlan, times: Times) -> None:
        self.events = plan.schedule.events
        self.staging_slots = plan.staging_slots
        signalled = {
            task: int(times[sm, i, SIGNALLED])
            for sm, queue in enumerate(plan.schedule.queues)
            for i, task in enumerate(queue)
        }
        self._order = [
            sorted((signalled.get(m, 0), m) for m in event.members)
            for event in self.events.events
        ]

    def last(self, task: int, *gates: Gate) -> tuple[int, int, int] | None:
        """(ns, event, member) of the wait at these gates that was over last."""
        found = [
            (*self._order[w.event][w.threshold - 1], w.event)
            for w in self.events.waits[task]
            if w.gate in gates
        ]
        if not found:
            return None
        ns, member, event = max(found)
        return ns, event, member


def _run(
    graph: TaskGraph,
    reached: _Reached,
    task: int,
    sm: int,
    at: Times,
    free_ns: int,
    previous: int | None,
) -> TaskRun:
    # What waits for a block of an operand is held up where its body has begun without.
    landed_ns = int(at[LANDED])
    last = reached.last(task, "resident")
    held = last is not None and last[0] > free_ns
    later = reached.last(task, *FETCH_GATES[1:])
    if later is not None and later[0] > landed_ns:
        last, held = later, True
    one = graph.tasks[task]
    return TaskRun(
        task,
        task_name(graph, task),
        graph.kinds[one.kind].call,
        one.layer,
        sm,
        free_ns,
        int(at[WAITED]),
        landed_ns,
        int(at[COMPUTED]),
        int(at[SIGNALLED]),
        previous,
        last[1] if last and held else None,
        last[2] if last and held else None,
    )


# --------------------------------------------------------------------------- spans


def _spans(
    sm: int, runs: Sequence[TaskRun], times: Times, reached: _Reached
) -> Iterator[Span]:
    """What every role did for the tasks of a queue."""
    for role, parts in PARTS.items():
        busy = 0
        for i, run in enumerate(runs):
            for cause, start, end, event in parts(run, i, times, reached):
                start = max(start, busy)
                if end > start:
                    yield Span(sm, role, run.task, cause, start, end, event)
                    busy = end


Part = tuple[Cause, int, int, int | None]


def _loader(run: TaskRun, i: int, times: Times, reached: _Reached) -> Iterator[Part]:
    first = int(times[i, FIRST_PAGE])
    if first < 0:
        return
    last = reached.last(run.task, "stream")
    if last is not None:
        yield "wait", 0, first, last[1]
    end = int(times[i, ENDED_PAGES])
    end = run.computed_ns if end < 0 else end
    later = times[i + 1 :, FIRST_PAGE]
    later = later[later >= 0]
    yield "load", first, min(end, int(later[0])) if len(later) else end, None


def _fetcher(run: TaskRun, i: int, times: Times, reached: _Reached) -> Iterator[Part]:
    if run.event is not None:
        yield "wait", run.free_ns, run.waited_ns, run.event
    blocks = reached.last(run.task, *FETCH_GATES[1:])
    fetched = int(times[i, FETCHED])
    if blocks is None:
        yield "load", run.waited_ns, fetched, None
    else:
        yield "wait", run.waited_ns, fetched, blocks[1]


def _consumer(run: TaskRun, i: int, times: Times, reached: _Reached) -> Iterator[Part]:
    if run.event is not None:
        yield "wait", run.free_ns, min(run.waited_ns, run.landed_ns), run.event
    yield "load", run.free_ns, run.landed_ns, None
    began, ended = int(times[i, BEGAN_PAGES]), int(times[i, ENDED_PAGES])
    if min(began, ended) >= 0:
        yield "compute", run.landed_ns, began, None
        yield "load", began, ended, None
        # Results need a staging slot: its last user may not have left yet.
        user = i - reached.staging_slots
        if user >= 0:
            yield "store", ended, int(times[user, STORED]), None
    yield "compute", run.landed_ns, run.computed_ns, None


def _storer(run: TaskRun, i: int, times: Times, reached: _Reached) -> Iterator[Part]:
    yield "store", int(times[i, BEGAN]), run.signalled_ns, None


PARTS: dict[Role, Callable[[TaskRun, int, Times, _Reached], Iterator[Part]]] = {
    LOADER: _loader,
    FETCHER: _fetcher,
    CONSUMER: _consumer,
    STORER: _storer,
}
