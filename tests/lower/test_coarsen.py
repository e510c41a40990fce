"""Whole calls instead of tiles: more order, fewer events, the same values."""

import numpy as np
import pytest

from mkdsl.lower.coarsen import coarsen
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.ir import KernelPlan, TaskGraph
from mkdsl.lower.machine import simulated
from mkdsl.lower.parse import parse
from mkdsl.lower.pipeline import Options, compile_program
from mkdsl.lower.text_schedule import print_plan
from mkdsl.lower.verify_stage import verify_stage
from mkdsl.runtime.interpret_schedule import simulate
from tests.runtime.small_programs import arguments, bump, decode, mlp

MACHINE = simulated(4)
PROGRAMS = {"mlp": mlp(b=2, d=256, inner=1024), "decode": decode(), "bump": bump()}


def needed(graph: TaskGraph) -> list[set[int]]:
    return [
        {m for need in needs for m in graph.dep_sets[need.deps].members}
        for needs in graph.needs
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_task_needs_the_whole_calls_that_it_needed_a_task_of(name):
    fine = find_dependences(decompose(PROGRAMS[name], MACHINE))
    coarse = coarsen(fine)
    run = [(t.kind, t.layer) for t in fine.tasks]
    for before, after in zip(needed(fine), needed(coarse), strict=True):
        calls = {run[m] for m in before}
        assert after == {t for t, r in enumerate(run) if r in calls}
    assert coarsen(coarse) == coarse


def plan_of(name: str, coarse: bool) -> KernelPlan:
    split = DecomposeOptions(split=False)
    return compile_program(
        PROGRAMS[name], MACHINE, Options(decompose=split, coarse=coarse)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_the_same_bits(name):
    inputs = arguments(PROGRAMS[name])
    fine, coarse = (simulate(plan_of(name, c), inputs) for c in (False, True))
    for a, b in zip(fine, coarse, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_coarse_plan_has_one_event_per_call():
    events = plan_of("mlp", coarse=True).schedule.events
    assert [e.threshold for e in events.events] == [16]
    assert len(plan_of("mlp", coarse=False).schedule.events.events) == 4


def test_the_text_of_a_coarse_plan_is_a_proof():
    plan = plan_of("mlp", coarse=True)
    again = parse(print_plan(plan), PROGRAMS["mlp"])
    assert again == plan
    verify_stage(again, MACHINE)
