"""Plans that hang, made from good ones, and where each of their SMs gets stuck.

Nothing but the plan is needed for that: counters only grow, so whatever the order in
which SMs advance, they end in the same place.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mkdsl.lower.hang import REPORT_WORDS, ROLES
from mkdsl.lower.ir import KernelPlan, loader_of


class Blocked(NamedTuple):
    """The first unmet wait of a role; `row` of hang.ROLES."""

    sm: int
    row: int
    position: int
    event: int
    expected: int
    seen: int


def widest_event(plan: KernelPlan) -> int:
    """The event that most tasks signal."""
    events = plan.schedule.events.events
    return max(range(len(events)), key=lambda e: len(events[e].members))


def waiter(plan: KernelPlan, event: int) -> int:
    """The first task that waits for an event."""
    waits = plan.schedule.events.waits
    return next(t for t, of in enumerate(waits) if any(w.event == event for w in of))


def without_signal(plan: KernelPlan, task: int) -> KernelPlan:
    """The plan without the signal of one task."""
    signals = list(plan.schedule.events.signals)
    signals[task] = -1
    return _with(plan, signals=tuple(signals))


def without_waits(plan: KernelPlan, task: int) -> KernelPlan:
    """The plan without the waits of one task: a race, not a hang."""
    waits = list(plan.schedule.events.waits)
    waits[task] = ()
    return _with(plan, waits=tuple(waits))


def dropped_signal(plan: KernelPlan) -> KernelPlan:
    """One of the members of the widest event does not signal."""
    event = plan.schedule.events.events[widest_event(plan)]
    return without_signal(plan, event.members[-1])


def dropped_first_signal(plan: KernelPlan) -> KernelPlan:
    """The first task that somebody waits for does not signal."""
    return without_signal(plan, plan.schedule.events.events[0].members[0])


def raised_threshold(plan: KernelPlan) -> KernelPlan:
    """A task waits for one signal more than there are."""
    event = widest_event(plan)
    task, waits = waiter(plan, event), list(plan.schedule.events.waits)
    waits[task] = tuple(
        replace(w, threshold=w.threshold + (w.event == event)) for w in waits[task]
    )
    return _with(plan, waits=tuple(waits))


def circle(plan: KernelPlan) -> KernelPlan:
    """A task stands in a queue behind one that waits for its signal."""
    event = widest_event(plan)
    late, early = plan.schedule.events.events[event].members[0], waiter(plan, event)
    queues = [[t for t in q if t != late] for q in plan.schedule.queues]
    queue = next(q for q in queues if early in q)
    queue.insert(queue.index(early) + 1, late)
    schedule = replace(plan.schedule, queues=tuple(map(tuple, queues)))
    return replace(plan, schedule=schedule)


HANGS: tuple[Callable[[KernelPlan], KernelPlan], ...] = (
    dropped_signal,
    dropped_first_signal,
    raised_threshold,
    circle,
)


def blocked(plan: KernelPlan) -> list[Blocked]:
    """Where every SM ends that does not reach the end of its queue."""
    events, queues = plan.schedule.events, plan.schedule.queues
    counts, at = [0] * len(events.events), [0] * len(queues)

    def unmet(sm: int) -> list[Blocked]:
        waits = events.waits[queues[sm][at[sm]]]
        return [
            Blocked(sm, row, at[sm], w.event, w.threshold, counts[w.event])
            for row, (gate, _) in enumerate(ROLES)
            for w in [
                w
                for w in waits
                if loader_of(w.gate) == gate and counts[w.event] < w.threshold
            ][:1]
        ]

    moved = True
    while moved:
        moved = False
        for sm, queue in enumerate(queues):
            while at[sm] < len(queue) and not unmet(sm):
                event = events.signals[queue[at[sm]]]
                at[sm], moved = at[sm] + 1, True
                if event >= 0:
                    counts[event] += 1
    held = [sm for sm, queue in enumerate(queues) if at[sm] < len(queue)]
    return [one for sm in held for one in unmet(sm)]


def report_of(plan: KernelPlan, stuck: list[Blocked]) -> list[list[list[int]]]:
    """The words that a device would write: the first gave up, the others followed."""
    words = [[[0] * REPORT_WORDS for _ in ROLES] for _ in plan.schedule.queues]
    for i, one in enumerate(stuck):
        row = [2 if i else 1, one.position, one.event, one.expected, one.seen]
        words[one.sm][one.row][:6] = [*row, 200_000_000 - i]
    return words


def _with(plan: KernelPlan, **changed: object) -> KernelPlan:
    events = replace(plan.schedule.events, **changed)  # type: ignore[arg-type]
    return replace(plan, schedule=replace(plan.schedule, events=events))
