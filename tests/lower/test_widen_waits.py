"""Waits for a whole run: never less order, never later than a later stage."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import Gate, TaskGraph
from mkdsl.lower.normalize import normalize
from mkdsl.lower.verify import verify_events
from mkdsl.lower.widen_waits import widen_waits
from tests.lower.graphs import by_waits, covered, graph_of, graphs

Needs = list[tuple[tuple[int, ...], Gate]]


def layered(graph: TaskGraph, layers: list[int]) -> TaskGraph:
    """The graph with every task in a layer, so that a layer is a run."""
    pairs = zip(graph.tasks, layers, strict=True)
    return replace(graph, tasks=tuple(replace(t, layer=n) for t, n in pairs))


@given(st.data(), graphs(20))
def test_every_need_stays_in_order_and_nothing_hangs(data, graph):
    count = len(graph.tasks)
    steps = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    events = fuse_events(layered(graph, list(accumulate(data.draw(steps)))))
    widened = widen_waits(events)
    verify_events(widened)
    assert (widened.events, widened.signals) == (events.events, events.signals)
    for few, many in zip(events.waits, widened.waits, strict=True):
        assert set(few) <= set(many)
    smallest = normalize(widened)
    verify_events(smallest)
    assert covered(smallest, by_waits(smallest))


def residual(gate: Gate = "resident", later: bool = True) -> TaskGraph:
    """Three tiles (0..2); a task that reads all (3), and another one (4) of its stage;
    sums of one tile each (5..7).

    Args:
        gate: of the sums for their tile.
        later: whether the sums read what task 4 writes, too.
    """
    tail: Needs = [((4,), "resident")] if later else []
    sums: list[Needs] = [[((i,), gate), *tail] for i in range(3)]
    tasks: list[Needs] = [[], [], [], [((0, 1, 2), "resident")], [], *sums]
    return layered(graph_of(tasks), [0, 0, 0, 1, 1, 2, 2, 2])


def test_tiles_that_some_read_whole_get_one_event():
    fused = fuse_events(residual())
    assert [len(w) for w in normalize(fused).waits] == [0, 0, 0, 3, 0, 2, 2, 2]
    events = normalize(widen_waits(fused))
    assert events.events[0].members == (0, 1, 2)
    assert [len(waits) for waits in events.waits] == [0, 0, 0, 1, 0, 2, 2, 2]


@pytest.mark.parametrize(
    "graph",
    [residual(later=False), residual(gate="stream")],
    ids=["nothing later", "another gate"],
)
def test_a_task_that_would_be_delayed_keeps_its_own_tile(graph):
    events = fuse_events(graph)
    assert widen_waits(events) == events


def test_tiles_that_nobody_reads_whole_keep_their_events():
    needs: list[Needs] = [[], [], [((0,), "resident")], [((1,), "resident")]]
    events = fuse_events(layered(graph_of(needs), [0, 0, 1, 1]))
    assert widen_waits(events) == events
    assert len(events.events) == 2
