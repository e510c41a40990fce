"""Left sides of dots that come in blocks: where, which waits, and what they are for."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mkdsl.errors import VerifyError
from mkdsl.lower.blocked import block_accesses, blocked_operand, legal_blocks
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.ir import FETCH_GATES, KernelPlan, Kind
from mkdsl.lower.machine import simulated
from mkdsl.lower.parse import parse
from mkdsl.lower.pipeline import Options, compile_program
from mkdsl.lower.text_schedule import print_plan
from mkdsl.lower.verify_accesses import verify_accesses
from mkdsl.lower.verify_kinds import verify_kinds
from mkdsl.lower.verify_plan import verify_plan
from mkdsl.lower.verify_schedule import verify_schedule
from mkdsl.runtime.interpret_schedule import simulate
from tests.runtime.small_programs import arguments, mlp, mlp_reference

# 16 tiles of gate_up on 4 SMs are four waves; the depth of down is four pages.
PROGRAM = mlp(b=2, d=256, inner=1024)
MACHINE = simulated(4)


def plan_with(most_blocks: int, sms: int = 4) -> KernelPlan:
    split = DecomposeOptions(split=False, most_blocks=most_blocks)
    return compile_program(PROGRAM, simulated(sms), Options(decompose=split))


def down_of(plan: KernelPlan) -> Kind:
    graph = plan.schedule.events.graph
    return next(k for k in graph.kinds if k.call == "down")


def down_tasks(plan: KernelPlan) -> list[int]:
    graph = plan.schedule.events.graph
    return [
        t for t, task in enumerate(graph.tasks) if graph.kinds[task.kind].call == "down"
    ]


BLOCKED = plan_with(4)


@pytest.mark.parametrize(("most", "blocks"), [(4, 4), (3, 2), (2, 2), (1, 1)])
def test_the_largest_number_of_blocks_that_divides_the_pages(most, blocks):
    assert down_of(plan_with(most)).blocks == blocks


def test_producers_of_one_wave_leave_an_operand_whole():
    assert down_of(plan_with(4, sms=16)).blocks == 1


def test_only_an_operand_that_a_dot_alone_reads_comes_in_blocks():
    kinds = BLOCKED.schedule.events.graph.kinds
    (gated,) = [k for k in kinds if k.call != "down"]
    assert blocked_operand(gated) == -1
    assert legal_blocks(gated, MACHINE.page_bytes) == (1,)
    assert down_of(BLOCKED).ins[blocked_operand(down_of(BLOCKED))].shape == (2, 1024)


def test_blocks_cover_the_operand_in_the_order_of_gates():
    kind = down_of(BLOCKED)
    found = list(block_accesses(kind, blocked_operand(kind)))
    assert [gate for gate, _ in found] == list(FETCH_GATES)
    starts = [int(access.axes[-1].start) for _, access in found]
    assert starts == [0, 256, 512, 768]
    assert {access.axes[-1].size for _, access in found} == {256}


def test_every_block_waits_for_the_tiles_in_it():
    events = BLOCKED.schedule.events
    for task in down_tasks(BLOCKED):
        for need in events.graph.needs[task]:
            tiles = events.graph.dep_sets[need.deps].members
            first = 4 * FETCH_GATES.index(need.gate)
            assert tiles == tuple(range(first, first + 4))
    # Of an SM the first task makes the waits, in the order of the blocks.
    first = min(down_tasks(BLOCKED))
    assert [w.gate for w in events.waits[first]] == list(FETCH_GATES)
    assert all(w.threshold == 4 for w in events.waits[first])


def test_the_text_of_a_plan_with_blocks_parses_back():
    text = print_plan(BLOCKED)
    assert " blocks 4\n" in text
    assert ">=4 block3" in text
    assert parse(text, PROGRAM) == BLOCKED


@pytest.mark.parametrize("most", [1, 2, 4])
def test_values_are_those_of_whole_operands(most):
    inputs = arguments(PROGRAM)
    plan = plan_with(most)
    results = [simulate(plan, inputs, seed=seed)[0] for seed in range(6)]
    for result in results:
        assert result.tobytes() == results[0].tobytes()
    expected = mlp_reference(*inputs)
    error = np.abs(np.asarray(results[0], np.float32) - expected).max()
    assert error < 0.02 * np.abs(expected).max()


def without(plan: KernelPlan, gate: str) -> KernelPlan:
    """The plan with no wait at a gate."""
    events = plan.schedule.events
    waits = tuple(tuple(w for w in ws if w.gate != gate) for ws in events.waits)
    schedule = replace(plan.schedule, events=replace(events, waits=waits))
    return replace(plan, schedule=schedule)


def simulate_often(plan: KernelPlan) -> None:
    for seed in range(20):
        simulate(plan, arguments(PROGRAM), seed=seed)


@pytest.mark.parametrize("gate", FETCH_GATES)
def test_a_block_without_its_wait_is_refused_and_breaks(gate):
    bad = without(BLOCKED, gate)
    with pytest.raises(VerifyError, match=r"race: task t\d+ 'down'"):
        verify_schedule(bad.schedule, MACHINE)
    with pytest.raises(VerifyError, match=f"its {gate} operands"):
        verify_accesses(bad.schedule)
    with pytest.raises(VerifyError, match="race: task 'down'"):
        simulate_often(bad)


def test_a_wait_that_is_moved_to_a_later_block_is_refused():
    events = BLOCKED.schedule.events
    for gate, later in itertools.pairwise(FETCH_GATES):
        waits = tuple(
            tuple(replace(w, gate=later) if w.gate == gate else w for w in ws)
            for ws in events.waits
        )
        schedule = replace(BLOCKED.schedule, events=replace(events, waits=waits))
        with pytest.raises(VerifyError, match=f"its {gate} operands"):
            verify_schedule(schedule, MACHINE)


def test_a_wait_may_be_made_at_an_earlier_block():
    events = BLOCKED.schedule.events
    waits = tuple(tuple(replace(w, gate="resident") for w in ws) for ws in events.waits)
    schedule = replace(BLOCKED.schedule, events=replace(events, waits=waits))
    verify_schedule(schedule, MACHINE)
    verify_accesses(schedule)


def test_blocks_of_a_kind_that_has_no_such_operand_are_refused():
    graph = BLOCKED.schedule.events.graph
    for number, blocks in ((0, 2), (1, 3)):
        kinds = list(graph.kinds)
        kinds[number] = replace(kinds[number], blocks=blocks)
        with pytest.raises(VerifyError, match=f"{blocks} blocks"):
            verify_kinds(replace(graph, kinds=tuple(kinds)))
    with pytest.raises(ValueError, match="blocks"):
        replace(graph.kinds[0], blocks=5)


def test_a_block_that_is_no_whole_number_of_pages_is_refused():
    # The interpreter and the kernel wait for a block at the first page that it has.
    plan = plan_with(2)
    number = 1
    assert plan.kinds[number].pages == ((64, 256),)
    pages = replace(plan.kinds[number], pages=((64, 192),))
    kinds = (plan.kinds[0], pages)
    with pytest.raises(VerifyError, match="not whole pages of 192"):
        verify_plan(replace(plan, kinds=kinds), MACHINE)
