"""Check queues: deadlock-freedom and race-freedom of a Schedule.

The model and the argument are on the page in verify.py: queue order and waits must have
a linear extension, and along it what each (SM, role) has seen must cover every need.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import NoReturn

from mkdsl.errors import VerifyError
from mkdsl.lower.ir import FETCH_GATES, GATES, Gate, Need, Schedule
from mkdsl.lower.machine import Machine
from mkdsl.lower.verify import (
    INTERNAL,
    MemberBits,
    check_counters,
    fail,
    fail_race,
    task_name,
)


def verify_schedule(
    schedule: Schedule, machine: Machine, stage: str = "schedule"
) -> None:
    """Check queues, deadlock-freedom and race-freedom of a Schedule.

    Raises:
        VerifyError: it may hang or race.
    """
    verify_queues(schedule, machine, stage)
    events = schedule.events
    proved: set[tuple[int, Need]] = set()
    required = MemberBits(events.graph.dep_sets)
    for task, sm, seen in knowledge(schedule, stage):
        for need in events.graph.needs[task] if events.graph.needs else ():
            # Knowledge only grows: what held once for this loader holds for good.
            if (sm, need) in proved:
                continue
            missing = required[need.deps] & ~seen[need.gate]
            if missing:
                first = (missing & -missing).bit_length() - 1
                fail_race(stage, events, task, need, first)
            proved.add((sm, need))


def verify_queues(
    schedule: Schedule, machine: Machine, stage: str = "schedule"
) -> None:
    """Check counters, and that every task is in one queue; a deadlock is found by
    `knowledge` alone.

    Raises:
        VerifyError: they are not well formed, or the machine has fewer SMs.
    """
    check_counters(stage, schedule.events)
    if len(schedule.queues) > machine.sms:
        raise VerifyError(
            stage,
            f"{len(schedule.queues)} queues but {machine.name} has {machine.sms} SMs: "
            "not all CTAs are co-resident, the kernel would hang",
            hint="compile for the machine that runs the kernel",
        )
    _check_queues(stage, schedule)


def _check_queues(stage: str, schedule: Schedule) -> None:
    tasks = len(schedule.events.graph.tasks)
    times = [0] * tasks
    for task in (t for queue in schedule.queues for t in queue):
        if not 0 <= task < tasks:
            raise VerifyError(stage, f"no task t{task}", hint=INTERNAL)
        times[task] += 1
    for task, count in enumerate(times):
        if count != 1:
            name = task_name(schedule.events.graph, task)
            what = f"{name} is in the queues {count} times"
            fail(schedule.events, task, what, stage, "put each task in one queue, once")


def _linear_extension(stage: str, schedule: Schedule) -> list[int]:
    """An order of all tasks that agrees with queues and waits."""
    events = schedule.events
    awaited = [{w.event for w in waits} for waits in events.waits]
    waiters: dict[int, list[int]] = {}
    for task, of in enumerate(awaited):
        for event in of:
            waiters.setdefault(event, []).append(task)
    pending = [len(of) for of in awaited]
    signals_left = [len(event.members) for event in events.events]
    follower: dict[int, int] = {}
    for queue in schedule.queues:
        for task, then in pairwise(queue):
            follower[task] = then
            pending[then] += 1
    ready = deque(t for t, count in enumerate(pending) if count == 0)
    order: list[int] = []
    while ready:
        task = ready.popleft()
        order.append(task)
        freed = [follower[task]] if task in follower else []
        event = events.signals[task]
        if event >= 0:
            signals_left[event] -= 1
            freed += waiters.get(event, ()) if signals_left[event] == 0 else ()
        for then in freed:
            pending[then] -= 1
            if pending[then] == 0:
                ready.append(then)
    if len(order) < len(pending):
        _deadlock(stage, schedule, set(order))
    return order


def _deadlock(stage: str, schedule: Schedule, done: set[int]) -> NoReturn:
    """Report a circle of waits: each queue head waits for a task behind the next."""
    events = schedule.events
    heads = [next((t for t in q if t not in done), -1) for q in schedule.queues]
    head_of = {t: heads[sm] for sm, q in enumerate(schedule.queues) for t in q}
    at = next(t for t in heads if t >= 0)
    seen: dict[int, str] = {}
    while at not in seen:
        event, member = next(
            (w.event, m)
            for w in events.waits[at]
            for m in events.events[w.event].members
            if m not in done
        )
        head = head_of[member]
        behind = "" if head == member else f" (in its queue behind t{head})"
        seen[at] = (
            f"{task_name(events.graph, at)} waits for e{event}, "
            f"signalled by {task_name(events.graph, member)}{behind}"
        )
        at = head
    circle = list(seen)[list(seen).index(at) :]
    lines = "\n".join(f"    {seen[t]}" for t in circle[:8])
    fail(
        events,
        at,
        f"deadlock: a circle of {len(circle)} waits\n{lines}",
        stage,
        "put into each queue what others wait for before what waits: the order of "
        "task ids always works",
    )


def knowledge(
    schedule: Schedule, stage: str = "schedule"
) -> Iterator[tuple[int, int, dict[Gate, int]]]:
    """Per task, in an order that agrees with queues and waits, what its loaders know.

    Yields:
        the task, its SM, and per gate the tasks whose stores that loader sees. The
        dictionary is the same one for all tasks of an SM.

    Raises:
        VerifyError: there is no such order.
    """
    events = schedule.events
    sm_of = {t: sm for sm, q in enumerate(schedule.queues) for t in q}
    loaders: list[dict[Gate, int]] = [dict.fromkeys(GATES, 0) for _ in schedule.queues]
    last = FETCH_GATES[-1]
    # The consumer is between the loaders and the storer, so both know as much.
    storers = [0] * len(schedule.queues)
    complete = [0] * len(events.events)
    for task in _linear_extension(stage, schedule):
        sm = sm_of[task]
        seen = loaders[sm]
        own = {gate: 0 for gate in GATES}
        for wait in events.waits[task]:
            own[wait.gate] |= complete[wait.event]
            storers[sm] |= complete[wait.event]
        # The activation loader passes its gates in order, task after task.
        known = seen[last]
        for gate in FETCH_GATES:
            known |= own[gate]
            seen[gate] = known
        seen["stream"] |= own["stream"]
        yield task, sm, seen
        storers[sm] |= 1 << task
        if events.signals[task] >= 0:
            complete[events.signals[task]] |= storers[sm]
