"""Which SM waited longest, for which event, and why: a timeline in words."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mkdsl.runtime.timeline import CAUSES, CONSUMER, TaskRun, Timeline

# Of the chain of producers that explains a wait.
MOST_LINKS = 8


@dataclass(frozen=True, slots=True)
class Held:
    """The SM that waited longest.

    Attributes:
        wait_ns: of its consumer, all waits together.
        event: the one that it waited for longest, all its waits together.
        event_ns: for that event.
        run: the task that waited longest for it.
        chain: the producer that was late, the one that it had waited for, and so on.
    """

    sm: int
    wait_ns: int
    event: int
    event_ns: int
    run: TaskRun
    chain: tuple[TaskRun, ...]


def longest_held(timeline: Timeline) -> Held | None:
    """The SM that waited longest, or None if none has waited."""
    waits: Counter[int] = Counter()
    for run in timeline.runs:
        waits[run.sm] += run.wait_ns
    # Of equals the lowest SM.
    sm = min(waits, key=lambda s: (-waits[s], s), default=-1)
    if sm < 0 or not waits[sm]:
        return None
    mine = [r for r in timeline.runs if r.sm == sm and r.event is not None]
    events: Counter[int] = Counter()
    for run in mine:
        assert run.event is not None
        events[run.event] += run.wait_ns
    event = min(events, key=lambda e: (-events[e], e))
    of_it = [r for r in mine if r.event == event]
    run = max(of_it, key=lambda r: r.wait_ns)
    return Held(sm, waits[sm], event, events[event], run, _producers(timeline, run))


def _producers(timeline: Timeline, run: TaskRun) -> tuple[TaskRun, ...]:
    """Who was late, and who made it late, while each was held up by another."""
    chain: list[TaskRun] = []
    while run.producer is not None and len(chain) < MOST_LINKS:
        run = timeline.runs[run.producer]
        chain.append(run)
    return tuple(chain)


def report(timeline: Timeline) -> str:
    """The timeline in words, some lines."""
    return "\n".join(_lines(timeline)) + "\n"


def _lines(timeline: Timeline) -> Iterator[str]:
    end = timeline.end_ns
    yield (
        f"{timeline.name} ({timeline.source}): {_us(end)}, {timeline.sms} SMs, "
        f"{len(timeline.runs)} tasks"
    )
    whole = max(1, end * timeline.sms)
    shares = (
        f"{cause} {timeline.total_ns(CONSUMER, cause) / whole:.0%}"
        for cause in CAUSES[:3]
    )
    yield f"consumers of all SMs: {', '.join(shares)} of their time"
    path = timeline.critical_path()
    hops = sum(a.sm != b.sm for a, b in itertools.pairwise(path))
    yield f"critical path: {len(path)} tasks, {hops} hand-offs between SMs"
    held = longest_held(timeline)
    if held is None:
        yield "no SM has waited for an event"
        return
    run = held.run
    yield (
        f"SM {held.sm} waited longest, {_us(held.wait_ns)} in all, and longest for "
        f"event e{held.event}: {_us(held.event_ns)}"
    )
    yield f"  {run.name} was held from {_us(run.free_ns)} to {_us(run.waited_ns)}"
    for late in held.chain:
        yield (
            f"  because {late.name} on SM {late.sm} signalled at "
            f"{_us(late.signalled_ns)}: {_why(late)}"
        )
    if held.chain:
        yield f"  {_end(held.chain[-1])}"


def _why(run: TaskRun) -> str:
    """Where the time of a producer went."""
    parts = [
        f"operands {_us(run.landed_ns - max(run.waited_ns, run.free_ns))}",
        f"pages and body {_us(run.computed_ns - run.landed_ns)}",
        f"signal {_us(run.signalled_ns - run.computed_ns)}",
    ]
    if run.event is not None:
        parts.insert(0, f"waited {_us(run.wait_ns)} for e{run.event}")
    return ", ".join(parts)


def _end(run: TaskRun) -> str:
    if run.event is not None:
        return "and so on"
    if run.previous is None:
        return "which was the first task of its SM"
    return f"which waited for no event; its SM was free at {_us(run.free_ns)}"


def _us(ns: float) -> str:
    return f"{ns / 1e3:.1f} us"
