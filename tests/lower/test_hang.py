"""What a debug build reports, decoded: who is stuck, for what, which is the cause."""

from dataclasses import replace

import pytest

from mkdsl.errors import HangError, LaunchError
from mkdsl.lower.hang import REPORT_WORDS, ROLES, SHOWN, raise_if_hung, stuck_waits
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import compile_program
from tests.gpu.blocked import (
    HANGS,
    blocked,
    circle,
    dropped_first_signal,
    dropped_signal,
    raised_threshold,
    report_of,
    without_signal,
)
from tests.lower import programs

PLAN = compile_program(programs.two_layers(), simulated(3))
EVENTS = PLAN.schedule.events


def nothing(plan: KernelPlan) -> list[list[list[int]]]:
    return [[[0] * REPORT_WORDS for _ in ROLES] for _ in plan.schedule.queues]


def test_a_kernel_that_ended_has_nothing_to_say():
    assert blocked(PLAN) == []
    raise_if_hung(PLAN, nothing(PLAN))


def test_the_cause_of_any_dropped_signal_is_found():
    signalling = [t for t, event in enumerate(EVENTS.signals) if event >= 0]
    for task in signalling:
        plan = without_signal(PLAN, task)
        stuck = stuck_waits(plan, report_of(plan, blocked(plan)))
        event = EVENTS.signals[task]
        causes = [s for s in stuck if s.is_cause]
        assert stuck[: len(causes)] == tuple(causes)
        assert {s.event for s in causes} == {event}
        for s in causes:
            threshold = EVENTS.events[event].threshold
            assert (s.expected, s.signallers) == (threshold, threshold - 1)
            assert s.seen + s.to_come == threshold - 1
            assert EVENTS.waits[PLAN.schedule.queues[s.sm][s.position]]
        assert len({s.sm for s in stuck}) == len(stuck)


def test_a_raised_threshold_is_its_own_cause():
    plan = raised_threshold(PLAN)
    first, *others = stuck_waits(plan, report_of(plan, blocked(plan)))
    assert first.is_cause
    assert first.seen == first.signallers == first.expected - 1
    assert not any(s.is_cause for s in others)


def test_a_circle_has_no_cause():
    plan = circle(PLAN)
    stuck = stuck_waits(plan, report_of(plan, blocked(plan)))
    assert stuck
    assert not any(s.is_cause for s in stuck)


def test_of_an_sm_only_the_earliest_wait_counts():
    """Having given up, a role goes on and meets later waits on garbage."""
    report = nothing(PLAN)
    report[1][0][:6] = [2, 5, 3, 2, 0, 10]
    report[1][1][:6] = [1, 2, 1, 4, 3, 200_000_000]
    (one,) = stuck_waits(PLAN, report)
    assert (one.role, one.position, one.event) == ("activation loader", 2, 1)
    assert (one.expected, one.seen, one.waited_ns) == (4, 3, 200_000_000)
    report[1][0][1] = 1
    (one,) = stuck_waits(PLAN, report)
    assert (one.role, one.position) == ("weight loader", 1)


@pytest.mark.parametrize("hang", HANGS)
def test_the_message(hang):
    plan = hang(PLAN)
    stuck = blocked(plan)
    with pytest.raises(HangError) as error:
        raise_if_hung(plan, report_of(plan, stuck))
    assert isinstance(error.value, LaunchError)
    one, text = error.value.stuck[0], str(error.value)
    place = next(b for b in stuck if b.sm == one.sm)
    task = PLAN.schedule.events.graph.tasks[plan.schedule.queues[one.sm][one.position]]
    kind = PLAN.schedule.events.graph.kinds[task.kind]
    for words in (
        f"kernel '{EVENTS.graph.program.name}' hung, {len(error.value.stuck)} of 3 SMs",
        f"SM {place.sm} {ROLES[place.row][1]}, instruction {place.position}, task t",
        f"'{kind.call}' layer {task.layer} pid (",
        f"event e{place.event} expected {place.expected}, seen {place.seen} after 200",
        f"{one.signallers} tasks signal it, {one.to_come} of them are held up",
        str(kind.src),
        "hint: look the event up in the text of the schedule",
        "docs/debug_a_hang.md",
    ):
        assert words in text, text


def test_a_long_report_is_cut():
    many = SHOWN + 3
    plan = compile_program(programs.two_layers(), simulated(many))
    plan = dropped_first_signal(plan)
    stuck = blocked(plan)
    rows = [stuck[0]._replace(sm=sm, position=0) for sm in range(many)]
    with pytest.raises(HangError, match="and 3 more, behind these") as error:
        raise_if_hung(plan, report_of(plan, rows))
    assert len(error.value.stuck) == many
    assert str(error.value).count("\n    SM ") == SHOWN


def test_a_task_that_is_in_no_queue_is_not_held_up():
    task = EVENTS.events[0].members[0]
    queues = tuple(tuple(t for t in q if t != task) for q in PLAN.schedule.queues)
    plan = replace(PLAN, schedule=replace(PLAN.schedule, queues=queues))
    first, *_ = stuck_waits(plan, report_of(plan, blocked(plan)))
    assert first.is_cause
    assert (first.event, first.signallers) == (0, EVENTS.events[0].threshold)


def test_the_weight_loader_is_named_for_a_wait_of_a_stream():
    plan = dropped_signal(PLAN)
    where = blocked(plan)[0]._replace(row=0)
    assert stuck_waits(plan, report_of(plan, [where]))[0].role == "weight loader"
