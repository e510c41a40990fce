"""A run of tasks that some wait for whole gets one event, where that delays nobody.

What it does: lets a task that waits for some tasks of a run (one call at one layer)
wait for all of them, so that normalize can join their events.
Needs: an EventGraph.
Guarantees: every gate waits for what it waited for, and perhaps for more; events and
signals are untouched. A run is left alone unless some gate waits for all of its events
and every gate that does not waits, too, for a call of a later stage than the run.
Why it is correct: more waits order more, and nothing is taken away. The waits that are
added are for tasks of a run that ends before the waiting task, so there is no cycle:
dependences still point to lower ids. That nobody is delayed is a matter of speed: at
the time when a later stage is done, the run should have been, too.
Cost: linear in the distinct lists of waits, and in the tasks.
Why: the sum of a residual stream and a normed branch is kept tile by tile beside the
stage that needs it whole. The next sum reads its own tile alone, so each tile had an
event of its own, and every task of the stage 10 waits more (Gemma 3 270M).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mkdsl.lower.ir import GATES, EventGraph, Gate, Wait
from mkdsl.lower.schedule import call_depths

Run = tuple[int, int]
Waits = tuple[Wait, ...]


def widen_waits(graph: EventGraph) -> EventGraph:
    """The graph with waits for whole runs."""
    runs = _runs(graph)
    if not runs.events:
        return graph
    wide = _read_whole(graph, runs)
    first = {waits: task for task, waits in reversed(list(enumerate(graph.waits)))}
    for waits, task in first.items():
        wide -= {run for run, _ in _narrow(waits, runs, wide, task)}
    if not wide:
        return graph
    made = {
        waits: _widened(graph, waits, tuple(_narrow(waits, runs, wide)), runs)
        for waits in first
    }
    return replace(graph, waits=tuple(made[w] for w in graph.waits))


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs that are divided into several events, all of them of the run alone.

    Attributes:
        events: of each such run.
        of: the run of each of these events.
        stage: per event, the latest stage of the calls of its members.
        last: the last task of each run.
    """

    events: Mapping[Run, frozenset[int]]
    of: Mapping[int, Run]
    stage: tuple[int, ...]
    last: Mapping[Run, int]


def _runs(graph: EventGraph) -> _Runs:
    tasks = graph.graph.tasks
    depths = call_depths(graph)
    stage = tuple(max(depths[m] for m in e.members) for e in graph.events)
    found: dict[Run, set[int]] = {}
    mixed: set[Run] = set()
    last: dict[Run, int] = {}
    for number, event in enumerate(graph.events):
        here = {(tasks[m].kind, tasks[m].layer) for m in event.members}
        for run in here:
            found.setdefault(run, set()).add(number)
            last[run] = max(last.get(run, -1), event.members[-1])
        if len(here) > 1:
            mixed |= here
    events = {
        run: frozenset(numbers)
        for run, numbers in found.items()
        if len(numbers) > 1 and run not in mixed
    }
    of = {number: run for run, numbers in events.items() for number in numbers}
    return _Runs(events, of, stage, last)


def _of_gate(waits: Waits, gate: Gate) -> frozenset[int]:
    return frozenset(w.event for w in waits if w.gate == gate)


def _read_whole(graph: EventGraph, runs: _Runs) -> set[Run]:
    """The runs of which some gate waits for every event."""
    whole: set[Run] = set()
    for waits in dict.fromkeys(graph.waits):
        for gate in GATES:
            mine = _of_gate(waits, gate)
            named = {runs.of[e] for e in mine if e in runs.of}
            whole |= {run for run in named if runs.events[run] <= mine}
    return whole


def _narrow(
    waits: Waits, runs: _Runs, wide: set[Run], task: int | None = None
) -> Iterator[tuple[Run, Gate]]:
    """The runs of `wide` that a gate waits for in part.

    Args:
        task: that waits; then only those that it must not wait for as a whole.
    """
    for gate in GATES:
        mine = _of_gate(waits, gate)
        latest = max((runs.stage[e] for e in mine), default=-1)
        for run in sorted({runs.of[e] for e in mine if e in runs.of} & wide):
            numbers = runs.events[run]
            if numbers <= mine:
                continue
            stage = max(runs.stage[e] for e in numbers)
            if task is None or latest <= stage or runs.last[run] >= task:
                yield run, gate


def _widened(
    graph: EventGraph, waits: Waits, narrow: tuple[tuple[Run, Gate], ...], runs: _Runs
) -> Waits:
    known = {(w.gate, w.event) for w in waits}
    new = [
        Wait(e, graph.events[e].threshold, gate)
        for run, gate in narrow
        for e in runs.events[run]
        if (gate, e) not in known
    ]
    return tuple(sorted((*waits, *new), key=lambda w: (GATES.index(w.gate), w.event)))
