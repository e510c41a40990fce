"""What a launch refuses, whoever made the plan, and what a debug build lets through."""

import re
from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lower.encode import encode
from mkdsl.lower.ir import KernelPlan, Task, Wait
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import compile_program
from mkdsl.lower.verify_launch import verify_bounded, verify_launch
from tests.gpu.blocked import HANGS, waiter, without_waits
from tests.lower import programs

MACHINE = simulated(3)
PLAN = compile_program(programs.two_layers(), MACHINE)
TASK = waiter(PLAN, 0)


def with_schedule(**changed: object) -> KernelPlan:
    events = replace(PLAN.schedule.events, **changed)
    return replace(PLAN, schedule=replace(PLAN.schedule, events=events))


def refused(check, plan: KernelPlan, words: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(words)):
        check(plan, encode(plan), MACHINE)


def test_a_good_plan_passes_both():
    for check in (verify_launch, verify_bounded):
        check(PLAN, encode(PLAN), MACHINE)


def test_a_plan_with_one_wait_removed_is_for_a_debug_build_alone():
    plan = without_waits(PLAN, TASK)
    refused(verify_launch, plan, "race: task t")
    verify_bounded(plan, encode(plan), MACHINE)


@pytest.mark.parametrize("hang", HANGS)
def test_a_plan_that_hangs_is_for_a_debug_build_alone(hang):
    plan = hang(PLAN)
    refused(verify_launch, plan, "launch: ")
    verify_bounded(plan, encode(plan), MACHINE)


def test_a_graph_without_needs_proves_nothing():
    graph = replace(PLAN.schedule.events.graph, needs=())
    refused(verify_launch, with_schedule(graph=graph), "nothing can be proved")


def test_more_queues_than_sms_are_refused():
    encoded = encode(PLAN)
    with pytest.raises(VerifyError, match="3 queues but simulated2 has 2 SMs"):
        verify_launch(PLAN, encoded, simulated(2))


def test_an_event_that_does_not_exist_is_no_address():
    count = len(PLAN.schedule.events.events)
    for event in (-1, count):
        waits = list(PLAN.schedule.events.waits)
        waits[TASK] = (Wait(event, 1, "resident"),)
        refused(
            verify_bounded, with_schedule(waits=tuple(waits)), f"no event e{event} of"
        )
    signals = (count, *PLAN.schedule.events.signals[1:])
    refused(verify_bounded, with_schedule(signals=signals), f"no event e{count} of")


def test_a_task_that_does_not_exist_is_refused():
    queues = ((-1,), *PLAN.schedule.queues[1:])
    plan = replace(PLAN, schedule=replace(PLAN.schedule, queues=queues))
    refused(verify_bounded, plan, "no task t-1: there are")


def test_a_task_outside_of_its_grid_is_refused():
    graph = PLAN.schedule.events.graph
    tasks = (Task(0, 0, (10**6,)), *graph.tasks[1:])
    plan = with_schedule(graph=replace(graph, tasks=tasks))
    refused(verify_bounded, plan, "is outside grid")


def test_a_ring_that_would_block_is_refused():
    """Waits at barriers of an SM are not bounded: what keeps them moving is checked."""
    refused(verify_bounded, replace(PLAN, ring=1), "the ring needs 2 pages")


def test_wrong_words_are_refused():
    encoded = encode(PLAN)
    words = ((*encoded.words[0][:1], 7, *encoded.words[0][2:]), *encoded.words[1:])
    for check in (verify_launch, verify_bounded):
        with pytest.raises(VerifyError, match="layer 7, not 0"):
            check(PLAN, replace(encoded, words=words), MACHINE)
