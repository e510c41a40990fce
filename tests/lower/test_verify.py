"""One bad program per hazard, its good twin, and the verifiers against brute force."""

import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mkdsl.errors import VerifyError
from mkdsl.lower.elide_waits import elide_waits
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import Event, EventGraph, Schedule, Wait
from mkdsl.lower.normalize import normalize
from mkdsl.lower.verify import verify_events
from mkdsl.lower.verify_schedule import verify_schedule
from tests.lower.graphs import (
    MACHINE,
    all_waits,
    by_waits,
    covered,
    graph_of,
    graphs,
    queues,
    without_wait,
)

# 0 and 1 make h; 2 and 3 read it, 3 into pages; 4 reads what 2 and 3 make.
GRAPH = graph_of(
    [
        [],
        [],
        [((0, 1), "resident")],
        [((0, 1), "stream")],
        [((2, 3), "resident")],
    ]
)
EVENTS = normalize(fuse_events(GRAPH))
QUEUES = ((0, 2), (1, 3, 4))
GOOD = elide_waits(Schedule(EVENTS, QUEUES))


def with_waits(events: EventGraph, task: int, *waits: Wait) -> EventGraph:
    """The graph with other waits of one task."""
    changed = list(events.waits)
    changed[task] = waits
    return replace(events, waits=tuple(changed))


def fails(events: EventGraph, *words: str, queues=QUEUES, stages=(0, 1)) -> None:
    """Both verifiers (or one of them) refuse it with these words and a line."""
    for i in stages:
        check = (
            partial(verify_events, events),
            partial(verify_schedule, Schedule(events, queues), MACHINE),
        )[i]
        with pytest.raises(VerifyError) as error:
            check()
        for word in (*words, f"{GRAPH.kinds[0].src}", "hint:"):
            assert re.search(re.escape(word), str(error.value)), str(error.value)
        assert error.value.stage == ("events", "schedule")[i]


def test_the_good_twin_passes():
    verify_events(EVENTS)
    verify_schedule(Schedule(EVENTS, QUEUES), MACHINE)
    verify_schedule(GOOD, MACHINE, "elided")


def test_a_dropped_wait_is_a_race():
    fails(
        with_waits(EVENTS, 2),
        "race: task t2 'down' layer 0 pid (2) reads what it writes",
        "task t0",
        "resident operands does not wait",
        "let t2 'wait e0>=2 resident': neither the order of a queue nor a wait of the",
        "If mkdsl made it, it is a fault of mkdsl",
    )


def test_a_wait_moved_to_the_other_gate_is_a_race():
    fails(with_waits(EVENTS, 2, Wait(0, 2, "stream")), "race", "its resident operands")
    fails(
        with_waits(EVENTS, 3, Wait(0, 2, "resident")),
        "race",
        "its stream operands",
        "let t3 'wait e0>=2 stream': each gate needs a wait of its own",
    )


def test_the_remedy_of_a_race_without_an_event():
    none = (-1,) * len(GRAPH.tasks), ((),) * len(GRAPH.tasks)
    events = replace(EVENTS, events=(), signals=none[0], waits=none[1])
    fails(events, "let t0 signal an event, and t2 wait for it at resident")


def test_too_high_a_threshold_is_a_deadlock():
    fails(
        with_waits(EVENTS, 2, Wait(0, 3, "resident")),
        "event e0: task t2",
        "waits for 3 signals but only 2 tasks signal it: deadlock",
    )


def test_the_first_k_of_n_is_a_race():
    fails(
        with_waits(EVENTS, 2, Wait(0, 1, "resident")),
        "waits for 1 of 2 signals",
        "race",
    )


def test_a_missing_signal_is_found():
    signals = (-1, *EVENTS.signals[1:])
    fails(
        replace(EVENTS, signals=signals),
        *("task t0", "signals e-1", "member of e0"),
        "let the line of the task and the list of the event agree",
    )


def test_a_task_in_two_events_is_found():
    events = replace(EVENTS, events=(*EVENTS.events, Event((0,))))
    with pytest.raises(
        VerifyError, match="t0 does not exist or signals another"
    ) as error:
        verify_events(events)
    assert "a task signals one event: let its waiters share it" in str(error.value)


def test_a_member_that_counts_twice_is_found():
    events = replace(EVENTS, events=(Event((0, 0, 1)), *EVENTS.events[1:]))
    with pytest.raises(VerifyError, match="not distinct and ascending") as error:
        verify_events(events)
    assert "list each task that signals it once. If mkdsl" in str(error.value)


def test_an_unknown_event_is_found():
    fails(with_waits(EVENTS, 2, Wait(7, 1, "resident")), "e7: no event")


def test_a_wait_for_oneself_is_a_deadlock():
    own = EVENTS.signals[2]
    fails(with_waits(EVENTS, 2, Wait(own, 2, "resident")), "deadlock", "t2")


def test_a_swapped_queue_is_a_deadlock():
    """3 waits for 1, which is behind it in its own queue."""
    fails(
        EVENTS,
        "deadlock: a circle of 1 waits",
        "task t3",
        "(in its queue behind t3)",
        queues=((0, 2), (3, 1, 4)),
        stages=(1,),
    )


def test_two_queues_that_wait_for_each_other_are_a_deadlock():
    graph = graph_of([[], [], [((0,), "resident")], [((1,), "resident")]])
    events = normalize(fuse_events(graph))
    verify_schedule(Schedule(events, ((0, 3), (1, 2))), MACHINE)
    with pytest.raises(VerifyError, match="a circle of 2 waits"):
        verify_schedule(Schedule(events, ((3, 0), (2, 1))), MACHINE)


def test_swapped_independent_tasks_pass_unless_their_waits_were_elided():
    graph = graph_of([[], [((0,), "resident")], [((0,), "resident")]])
    events = normalize(fuse_events(graph))
    elided = elide_waits(Schedule(events, ((0,), (1, 2))))
    verify_schedule(Schedule(events, ((0,), (2, 1))), MACHINE)
    with pytest.raises(VerifyError, match="race: task t2"):
        verify_schedule(Schedule(elided.events, ((0,), (2, 1))), MACHINE)


def test_queue_order_orders_no_load_after_a_store():
    graph = graph_of([[], [((0,), "resident")]])
    events = normalize(fuse_events(graph))
    verify_schedule(Schedule(events, ((0, 1),)), MACHINE)
    with pytest.raises(VerifyError, match="race: task t1"):
        verify_schedule(Schedule(with_waits(events, 1), ((0, 1),)), MACHINE)


def test_more_queues_than_sms_hang():
    schedule = Schedule(EVENTS, (*QUEUES, (), (), ()))
    with pytest.raises(VerifyError, match="5 queues but simulated4 has 4 SMs"):
        verify_schedule(schedule, MACHINE)


@pytest.mark.parametrize(
    ("queues", "words"),
    [
        (((0, 2), (1, 3)), "task t4 .* is in the queues 0 times"),
        (((0, 2, 4), (1, 3, 4)), "task t4 .* is in the queues 2 times"),
        (((0, 2), (1, 3, 4, 5)), "no task t5"),
    ],
)
def test_every_task_is_in_one_queue(queues, words):
    with pytest.raises(VerifyError, match=words):
        verify_schedule(Schedule(EVENTS, queues), MACHINE)


def test_an_assumed_overlap_is_said_to_be_one():
    sets = tuple(replace(d, exact=False) for d in GRAPH.dep_sets)
    events = replace(EVENTS, graph=replace(GRAPH, dep_sets=sets))
    fails(with_waits(events, 2), "(or may: not decided)")


@pytest.mark.parametrize(
    ("why", "words"),
    [("WAR", "overwrites what it reads"), ("WAW", "overwrites what it writes")],
)
def test_a_race_says_of_what_kind_it_is(why, words):
    needs = tuple(tuple(replace(n, why=why) for n in ns) for ns in GRAPH.needs)
    events = replace(EVENTS, graph=replace(GRAPH, needs=needs))
    fails(with_waits(events, 2), words)


def passes(check, *args) -> bool:
    try:
        check(*args)
    except VerifyError:
        return False
    return True


@given(st.data(), graphs())
def test_verify_events_agrees_with_brute_force(data, graph):
    events = fuse_events(graph)
    waits = all_waits(events)
    assume(waits)
    bad = without_wait(events, *data.draw(st.sampled_from(waits)))
    assert passes(verify_events, bad) == covered(bad, by_waits(bad))


@given(st.data(), graphs())
def test_verify_schedule_agrees_with_brute_force(data, graph):
    events = normalize(fuse_events(graph))
    order = data.draw(queues(len(graph.tasks)))
    events = elide_waits(Schedule(events, order)).events
    waits = all_waits(events)
    assume(waits)
    task, index = data.draw(st.sampled_from(waits))
    bad = without_wait(events, task, index)
    if data.draw(st.booleans()):
        moved = events.waits[task][index]
        other = "stream" if moved.gate == "resident" else "resident"
        moved = replace(moved, gate=other)
        bad = with_waits(events, task, *bad.waits[task], moved)
    found = passes(verify_schedule, Schedule(bad, order), MACHINE)
    assert found == covered(bad, by_waits(bad, order))
