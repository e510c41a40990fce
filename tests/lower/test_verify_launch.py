"""What a launch refuses, whoever made the plan, and what a debug build lets through."""

import re
from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lower.encode import encode
from mkdsl.lower.ir import KernelPlan, Task, Wait
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import compile_program
from mkdsl.lower.proof import Proof
from mkdsl.lower.verify_launch import verify_launch
from tests.gpu.blocked import HANGS, waiter, without_waits
from tests.lower import programs

MACHINE = simulated(3)
PLAN = compile_program(programs.two_layers(), MACHINE)
TASK = waiter(PLAN, 0)


def with_schedule(**changed: object) -> KernelPlan:
    events = replace(PLAN.schedule.events, **changed)
    return replace(PLAN, schedule=replace(PLAN.schedule, events=events))


def refused(plan: KernelPlan, words: str, *, bounded: bool = False) -> None:
    with pytest.raises(VerifyError, match=re.escape(words)):
        verify_launch(plan, MACHINE, bounded=bounded)


def test_a_good_plan_passes_both():
    for bounded in (False, True):
        plan, encoded = verify_launch(PLAN, MACHINE, bounded=bounded)
        assert plan is PLAN
        assert encoded == encode(PLAN)


def test_a_proof_is_taken_as_it_is(monkeypatch):
    proof = Proof(PLAN, MACHINE)
    # A debug build of a plan that is proved has nothing more to check.
    monkeypatch.delattr("mkdsl.lower.verify_launch.verify_bounded")
    monkeypatch.delattr("mkdsl.lower.proof.verify_accesses")
    for bounded in (False, True):
        plan, encoded = verify_launch(proof, simulated(1), bounded=bounded)
        assert plan is PLAN
        assert encoded is proof.encoded


def test_a_plan_with_one_wait_removed_is_for_a_debug_build_alone():
    plan = without_waits(PLAN, TASK)
    refused(plan, "race: task t")
    assert verify_launch(plan, MACHINE, bounded=True) == (plan, encode(plan))


@pytest.mark.parametrize("hang", HANGS)
def test_a_plan_that_hangs_is_for_a_debug_build_alone(hang):
    plan = hang(PLAN)
    with pytest.raises(VerifyError, match=r"deadlock|signals e-1 but is a member"):
        verify_launch(plan, MACHINE)
    verify_launch(plan, MACHINE, bounded=True)


def test_an_event_that_does_not_exist_is_no_address():
    count = len(PLAN.schedule.events.events)
    for event in (-1, count):
        waits = list(PLAN.schedule.events.waits)
        waits[TASK] = (Wait(event, 1, "resident"),)
        refused(
            with_schedule(waits=tuple(waits)), f"no event e{event} of", bounded=True
        )
    signals = (count, *PLAN.schedule.events.signals[1:])
    refused(with_schedule(signals=signals), f"no event e{count} of", bounded=True)


def test_a_task_that_does_not_exist_is_refused():
    queues = ((-1,), *PLAN.schedule.queues[1:])
    plan = replace(PLAN, schedule=replace(PLAN.schedule, queues=queues))
    refused(plan, "no task t-1: there are", bounded=True)


def test_a_task_outside_of_its_grid_is_refused():
    graph = PLAN.schedule.events.graph
    tasks = (Task(0, 0, (10**6,)), *graph.tasks[1:])
    plan = with_schedule(graph=replace(graph, tasks=tasks))
    refused(plan, "is outside grid", bounded=True)


def test_a_ring_that_would_block_is_refused():
    """Waits at barriers of an SM are not bounded: what keeps them moving is checked."""
    refused(replace(PLAN, ring=1), "the ring needs 2 pages", bounded=True)
