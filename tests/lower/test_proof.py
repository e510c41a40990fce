"""To have a proof is to be proved: from the accesses, whatever passes have said."""

from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lower import proof as module
from mkdsl.lower.encode import encode
from mkdsl.lower.ir import KernelPlan, TaskGraph
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import prove_program, run_passes
from mkdsl.lower.proof import Proof
from tests.gpu.blocked import waiter, without_waits
from tests.lower import programs

MACHINE = simulated(3)
PROOF = prove_program(programs.two_layers(), MACHINE)
PLAN = PROOF.plan
GRAPH = PLAN.schedule.events.graph


def with_graph(plan: KernelPlan, graph: TaskGraph) -> KernelPlan:
    events = replace(plan.schedule.events, graph=graph)
    return replace(plan, schedule=replace(plan.schedule, events=events))


def test_the_last_stage_comes_with_its_proof():
    proofs = [stage.proof for stage in run_passes(programs.two_layers(), MACHINE)]
    assert proofs[:-1] == [None] * (len(proofs) - 1)
    assert proofs[-1] == PROOF
    assert PROOF.encoded == encode(PLAN)


def test_needs_are_no_part_of_a_proof():
    """Without them a good plan has one, and a bad one has none."""
    silent = replace(GRAPH, needs=(), dep_sets=())
    Proof(with_graph(PLAN, silent), MACHINE)
    bad = without_waits(PLAN, waiter(PLAN, 0))
    for graph in (GRAPH, silent):
        with pytest.raises(VerifyError, match="accesses: race: task"):
            Proof(with_graph(bad, graph), MACHINE)


def test_another_plan_does_not_inherit_a_proof():
    with pytest.raises(VerifyError, match="the ring needs 2 pages"):
        replace(PROOF, plan=replace(PLAN, ring=1))
    with pytest.raises(VerifyError, match="3 queues but simulated2 has 2 SMs"):
        replace(PROOF, machine=simulated(2))


def test_tasks_of_another_program_have_none():
    fewer = replace(GRAPH, tasks=(*GRAPH.tasks[:-1], GRAPH.tasks[0]))
    with pytest.raises(VerifyError):
        Proof(with_graph(PLAN, fewer), MACHINE)
    other = replace(GRAPH.program, inputs=("x",))
    with pytest.raises(VerifyError, match="the inputs of"):
        Proof(with_graph(PLAN, replace(GRAPH, program=other)), MACHINE)


def test_words_that_say_something_else_are_found(monkeypatch):
    words = PROOF.encoded.words
    wrong = ((*words[0][:1], 7, *words[0][2:]), *words[1:])
    bad = replace(PROOF.encoded, words=wrong)
    monkeypatch.setattr(module, "encode", lambda plan: bad)
    with pytest.raises(VerifyError, match="layer 7, not 0"):
        Proof(PLAN, MACHINE)
