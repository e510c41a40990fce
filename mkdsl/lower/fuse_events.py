"""Needs become counters: one event for all producers with the same consumers.

What it does: gives every task at most one event to signal, and every task the waits
that its needs ask for.
Needs: a TaskGraph with dependences.
Guarantees: a gate of a task waits for exactly the members of its pruned needs
(prune_needs), nothing more; the members of an event are in the same DepSets.
Why it is correct: tasks are divided by the DepSets that contain them, so every DepSet
is a union of events, and waiting for all of them to be complete is waiting for all
of its members.
Cost: linear in the members of the DepSets that are in use, after prune_needs.
Source: partition refinement, one pass (Paige and Tarjan 1987); counters with
thresholds instead of one flag per edge: Hazy Research's megakernels, MPK.
"""

from collections.abc import Iterable

from mkdsl.lower.ir import GATES, DepSet, Event, EventGraph, Need, TaskGraph, Wait
from mkdsl.lower.prune_needs import prune_needs


def fuse_events(graph: TaskGraph) -> EventGraph:
    """The graph with events, signals and waits."""
    needs = prune_needs(graph)
    used = sorted({need.deps for task in needs for need in task})
    signals, events = _events(graph.dep_sets, used, len(graph.tasks))
    parts = {d: _unique(signals[m] for m in graph.dep_sets[d].members) for d in used}
    made: dict[tuple[Need, ...], tuple[Wait, ...]] = {}
    for task in needs:
        if task not in made:
            made[task] = _waits(task, parts, events)
    waits = tuple(made[task] for task in needs)
    return EventGraph(graph, events, signals, waits)


def _events(
    dep_sets: tuple[DepSet, ...], used: list[int], tasks: int
) -> tuple[tuple[int, ...], tuple[Event, ...]]:
    """The event of each task (or -1) and the members of each event."""
    inside: dict[int, list[int]] = {}
    for deps in used:
        for member in dep_sets[deps].members:
            inside.setdefault(member, []).append(deps)
    classes: dict[tuple[int, ...], list[int]] = {}
    for task in sorted(inside):
        classes.setdefault(tuple(inside[task]), []).append(task)
    signals = [-1] * tasks
    for event, members in enumerate(classes.values()):
        for member in members:
            signals[member] = event
    return tuple(signals), tuple(Event(tuple(m)) for m in classes.values())


def _waits(
    needs: tuple[Need, ...],
    parts: dict[int, tuple[int, ...]],
    events: tuple[Event, ...],
) -> tuple[Wait, ...]:
    return tuple(
        Wait(event, events[event].threshold, gate)
        for gate in GATES
        for event in _unique(e for n in needs if n.gate == gate for e in parts[n.deps])
    )


def _unique(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))
