"""fuse_events, normalize and elide_waits keep what happens before what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.lower.elide_waits import elide_waits
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import GATES, Schedule, Wait
from mkdsl.lower.normalize import normalize
from mkdsl.lower.prune_needs import prune_needs
from mkdsl.lower.verify import verify_events
from mkdsl.lower.verify_schedule import verify_schedule
from tests.lower.graphs import (
    MACHINE,
    all_waits,
    by_needs,
    by_waits,
    graph_of,
    graphs,
    queues,
    without_wait,
)


def waits_of(events, task):
    return [(w.event, w.threshold, w.gate) for w in events.waits[task]]


@given(graphs())
def test_fused_events_order_what_the_needs_order_and_nothing_else(graph):
    events = fuse_events(graph)
    verify_events(events)
    assert by_waits(events) == by_needs(graph)


@given(graphs())
def test_normalized_events_order_the_same(graph):
    events = normalize(fuse_events(graph))
    verify_events(events)
    assert by_waits(events) == by_needs(graph)


@given(graphs())
def test_no_wait_of_a_normalized_graph_can_go(graph):
    events = normalize(fuse_events(graph))
    before = by_waits(events)
    for task, index in all_waits(events):
        assert by_waits(without_wait(events, task, index)) != before


@given(graphs())
def test_normalize_is_idempotent_and_canonical(graph):
    events = normalize(fuse_events(graph))
    assert normalize(events) == events
    firsts = [event.members[0] for event in events.events]
    assert firsts == sorted(firsts)
    assert {w.event for waits in events.waits for w in waits} == set(range(len(firsts)))


@given(graphs())
def test_joined_events_have_different_waiters(graph):
    events = normalize(fuse_events(graph))
    waiters = [
        [
            (t, w.gate)
            for t, waits in enumerate(events.waits)
            for w in waits
            if w.event == e
        ]
        for e in range(len(events.events))
    ]
    assert len({tuple(w) for w in waiters}) == len(waiters)


@given(st.data(), graphs())
def test_elided_waits_order_the_same(data, graph):
    events = normalize(fuse_events(graph))
    schedule = Schedule(events, data.draw(queues(len(graph.tasks))))
    elided = elide_waits(schedule)
    assert by_waits(elided.events, schedule.queues) == by_waits(events, schedule.queues)
    assert elided.queues == schedule.queues
    verify_schedule(elided, MACHINE)
    assert elide_waits(elided) == elided


def test_producers_of_one_dep_set_share_an_event():
    events = fuse_events(
        graph_of([[], [], [((0, 1), "resident")], [((0, 1), "stream")]])
    )
    assert [e.members for e in events.events] == [(0, 1)]
    assert events.signals == (0, 0, -1, -1)
    assert waits_of(events, 2) == [(0, 2, "resident")]
    assert waits_of(events, 3) == [(0, 2, "stream")]


def test_overlapping_dep_sets_are_divided_into_events():
    events = fuse_events(
        graph_of([[], [], [], [((0, 1), "resident")], [((1, 2), "resident")]])
    )
    assert [e.members for e in events.events] == [(0,), (1,), (2,)]
    assert waits_of(events, 3) == [(0, 1, "resident"), (1, 1, "resident")]


def test_a_residual_connection_needs_no_event_of_its_own():
    """x (0, 1) -> h (2, 3) reads all of x -> y (4, 5) reads all of h, one tile of x."""
    x, h = ((0, 1), "resident"), ((2, 3), "resident")
    graph = graph_of(
        [[], [], [x], [x], [h, ((0,), "resident")], [h, ((1,), "resident")]]
    )
    events = fuse_events(graph)
    assert [e.members for e in events.events] == [(0, 1), (2, 3)]
    assert waits_of(events, 4) == [(1, 2, "resident")]


def test_a_need_that_only_the_other_gate_implies_stays():
    graph = graph_of([[], [((0,), "resident")], [((1,), "resident"), ((0,), "stream")]])
    assert len(prune_needs(graph)[2]) == 2
    events = normalize(fuse_events(graph))
    assert [w[2] for w in waits_of(events, 2)] == ["resident", "stream"]


def test_a_wait_through_either_gate_of_the_producer_is_known():
    graph = graph_of([[], [((0,), "stream")], [((1,), "resident"), ((0,), "resident")]])
    events = normalize(fuse_events(graph))
    assert waits_of(events, 2) == [(1, 1, "resident")]


def test_events_with_the_same_waiters_are_joined():
    graph = graph_of([[], [], [((0,), "resident"), ((1,), "resident")]])
    assert len(fuse_events(graph).events) == 2
    events = normalize(fuse_events(graph))
    assert [e.members for e in events.events] == [(0, 1)]
    assert waits_of(events, 2) == [(0, 2, "resident")]


def test_a_graph_without_needs_has_no_events():
    events = normalize(fuse_events(graph_of([[], []])))
    assert events.events == ()
    assert events.signals == (-1, -1)
    assert events.waits == ((), ())


def test_the_second_wait_of_a_loader_is_elided_but_not_that_of_the_other():
    graph = graph_of(
        [[], [((0,), "resident")], [((0,), "resident")], [((0,), "stream")]]
    )
    events = normalize(fuse_events(graph))
    elided = elide_waits(Schedule(events, ((0,), (1, 2, 3)))).events
    assert elided.waits[1] == (Wait(0, 1, "resident"),)
    assert elided.waits[2] == ()
    assert elided.waits[3] == (Wait(0, 1, "stream"),)


@pytest.mark.parametrize("gate", GATES)
def test_a_wait_known_through_a_queue_neighbour_is_elided(gate):
    """1 and 2 share a queue, so 2 signals after what 1 waited for."""
    graph = graph_of([[], [((0,), gate)], [], [((2,), "resident"), ((0,), "resident")]])
    events = normalize(fuse_events(graph))
    elided = elide_waits(Schedule(events, ((0,), (1, 2), (3,)))).events
    assert [w.event for w in elided.waits[3]] == [events.signals[2]]


def test_queue_order_alone_does_not_replace_a_wait():
    graph = graph_of([[], [((0,), "resident")]])
    events = normalize(fuse_events(graph))
    schedule = Schedule(events, ((0, 1),))
    assert elide_waits(schedule) == schedule
