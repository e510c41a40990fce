"""Folded graphs: every pair, event and wait is counted once, whatever the layers."""

from collections import Counter
from typing import Any

import pytest

from mkdsl.lower.fold import fold_events, fold_program, fold_tasks
from mkdsl.lower.ir import EventGraph, TaskGraph
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import run_passes
from tests.lower import programs


@pytest.fixture(scope="module")
def stages() -> dict[str, Any]:
    program = programs.llama(layers=3)
    return {s.name: s.value for s in run_passes(program, simulated(8))}


def test_every_task_is_in_a_node(stages: dict[str, Any]) -> None:
    graph: TaskGraph = stages["dependences"]
    folded = fold_tasks(graph)
    assert len(folded.tasks) == len(graph.kinds)
    assert sum(t.tasks for t in folded.tasks) == len(graph.tasks)
    layers = {t.name: t.layers for t in folded.tasks}
    assert layers["down, combine"] == 3
    assert {1, 3} == set(layers.values())


def test_every_pair_is_in_an_edge(stages: dict[str, Any]) -> None:
    graph: TaskGraph = stages["dependences"]
    want: Counter[tuple[int, int]] = Counter()
    for t, needs in enumerate(graph.needs):
        for need in needs:
            for m in graph.dep_sets[need.deps].members:
                want[graph.tasks[m].kind, graph.tasks[t].kind] += 1
    edges = fold_tasks(graph).edges
    assert {(e.source, e.target): e.pairs for e in edges} == want
    assert all(e.buffers for e in edges)
    assert {e.why for e in edges} <= {"RAW", "WAR", "WAW", "RAW+WAW", "WAW+RAW"}


def test_a_loop_goes_to_the_next_layer(stages: dict[str, Any]) -> None:
    folded = fold_tasks(stages["dependences"])
    names = [t.name for t in folded.tasks]
    loops = {(names[e.source], names[e.target]) for e in folded.edges if e.loops}
    assert loops
    assert {a for a, _ in loops} == {"down, combine"}


def test_nothing_depends_before_the_pass(stages: dict[str, Any]) -> None:
    assert fold_tasks(stages["tasks"]).edges == ()


@pytest.mark.parametrize("stage", ["events", "normalized"])
def test_every_event_and_wait_is_in_a_group(stages: dict[str, Any], stage: str) -> None:
    events: EventGraph = stages[stage]
    groups = fold_events(events).groups
    assert sum(g.events for g in groups) == len(events.events)
    assert sum(g.waits for g in groups) == sum(map(len, events.waits))
    assert all(1 <= least <= most for least, most in (g.thresholds for g in groups))
    keys = [(g.sources, g.targets) for g in groups]
    assert len(set(keys)) == len(keys)


def test_calls_of_a_program_and_the_arrays_between_them() -> None:
    folded = fold_program(programs.mlp())
    first, second = folded.tasks
    assert (first.name, first.tasks, first.layers) == ("gate_up", 8, 1)
    assert first.streams == ("w_gate[64 x 256]", "w_up[64 x 256]")
    assert second.writes == ("y[8 x 64]",)
    (edge,) = folded.edges
    assert (edge.source, edge.target, edge.pairs, edge.buffers) == (0, 1, 1, ("h",))


def test_a_cache_is_read_by_its_own_layer() -> None:
    folded = fold_program(programs.llama(layers=3))
    names = [t.name for t in folded.tasks]
    loops = {names[e.source] for e in folded.edges if e.loops}
    assert loops == {"down"}
