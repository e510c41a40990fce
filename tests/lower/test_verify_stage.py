"""A stage from a text is checked as one that the passes have made."""

from dataclasses import replace
from typing import Any

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.ir import EventGraph, KernelPlan, Schedule, TaskGraph
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import STAGES, Options, finish, run_passes
from mkdsl.lower.verify_stage import AnyStage, verify_stage
from tests.lower import programs

MACHINE = simulated(3)
OPTIONS = Options(DecomposeOptions(splits=(("down", 2),)))
MADE: dict[str, Any] = {
    s.name: s.value for s in run_passes(programs.mlp(), MACHINE, OPTIONS)
}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_of_the_passes_pass(stage):
    verify_stage(MADE[stage], MACHINE)


@pytest.mark.parametrize("program", [programs.attention(), programs.two_layers()])
def test_stages_of_other_programs_pass(program):
    for stage in run_passes(program, MACHINE):
        verify_stage(stage.value, MACHINE)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_finished_to_a_plan(stage):
    plan = finish(MADE[stage], MACHINE, OPTIONS)
    verify_stage(plan, MACHINE)
    if stage in ("schedule", "elided"):  # as they are: nothing is elided again
        assert plan.schedule == MADE[stage]
    assert plan.schedule.queues == MADE["pages"].schedule.queues


@pytest.mark.parametrize("stage", ["elided", "pages"])
def test_what_is_left_of_the_passes_gives_the_same_plan(stage):
    assert finish(MADE[stage], MACHINE, OPTIONS) == MADE["pages"]


def graph_of(stage: AnyStage) -> TaskGraph:
    match stage:
        case KernelPlan():
            return stage.schedule.events.graph
        case Schedule():
            return stage.events.graph
        case EventGraph():
            return stage.graph
        case TaskGraph():
            return stage
    raise TypeError(stage)


def with_graph(stage: AnyStage, graph: TaskGraph) -> AnyStage:
    match stage:
        case KernelPlan():
            events = replace(stage.schedule.events, graph=graph)
            return replace(stage, schedule=replace(stage.schedule, events=events))
        case Schedule():
            return replace(stage, events=replace(stage.events, graph=graph))
        case EventGraph():
            return replace(stage, graph=graph)
        case _:
            return graph


def with_events(stage: AnyStage, events: EventGraph) -> AnyStage:
    match stage:
        case KernelPlan():
            schedule = replace(stage.schedule, events=events)
            return replace(stage, schedule=schedule)
        case Schedule():
            return replace(stage, events=events)
        case _:
            return events


LATER = [s for s in STAGES if s not in ("program", "tasks")]


def test_a_need_that_is_left_out_is_found():
    graph = MADE["dependences"]
    task = next(t for t, needs in enumerate(graph.needs) if needs)
    needs = (*graph.needs[:task], (), *graph.needs[task + 1 :])
    with pytest.raises(VerifyError) as error:
        verify_stage(replace(graph, needs=needs), MACHINE)
    for words in (
        f"accesses: race: task t{task} 'down' partial 0 of 2 layer 0 pid (0) reads h[",
        "of which task t0 'gate_up' layer 0 pid (0) writes an element, but the loader",
        "programs.py",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize("stage", [s for s in LATER if s != "dependences"])
def test_needs_prove_nothing_and_waits_do(stage):
    """Left out with their waits, they are missed; a stage with its waits is proved."""
    made = MADE[stage]
    silent = replace(graph_of(made), needs=(), dep_sets=())
    verify_stage(with_graph(made, silent), MACHINE)
    events = made
    while not isinstance(events, EventGraph):
        events = events.events if isinstance(events, Schedule) else events.schedule
    task = next(t for t, waits in enumerate(events.waits) if waits)
    waits = (*events.waits[:task], (), *events.waits[task + 1 :])
    bad = with_events(made, replace(events, graph=silent, waits=waits))
    with pytest.raises(VerifyError, match=rf"race: task t{task} 'down' .* reads h\["):
        verify_stage(bad, MACHINE)


@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_program_is_found_below_every_stage(stage):
    program = replace(programs.mlp(), inputs=("x",))
    made = MADE[stage]
    wrong = program
    if stage != "program":
        wrong = with_graph(made, replace(graph_of(made), program=program))
    with pytest.raises(VerifyError, match="the inputs of mlp are x, but"):
        verify_stage(wrong, MACHINE)


@pytest.mark.parametrize("stage", LATER)
def test_wrong_tasks_are_found_below_every_stage(stage):
    graph = graph_of(MADE[stage])
    twice = (graph.tasks[1], *graph.tasks[1:])
    with pytest.raises(VerifyError, match=r"is written by call gate_up \(1,\)"):
        verify_stage(with_graph(MADE[stage], replace(graph, tasks=twice)), MACHINE)


def test_a_plan_is_checked_with_its_words():
    plan = MADE["pages"]
    assert isinstance(plan, KernelPlan)
    with pytest.raises(VerifyError, match="the ring needs 2 pages"):
        verify_stage(replace(plan, ring=1), MACHINE)
    with pytest.raises(VerifyError, match=r"plan\.instruction_bytes=4"):
        verify_stage(replace(plan, instruction_bytes=4), MACHINE)
