"""What a schedule costs: by hand on small graphs, bounds on whole programs."""

from dataclasses import replace

import pytest

from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.estimate import Work, estimate, work_of
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import Gate, KernelPlan, Schedule
from mkdsl.lower.machine import H200, Machine, simulated
from mkdsl.lower.normalize import normalize
from mkdsl.lower.pipeline import Options, compile_program, run_passes
from mkdsl.lower.schedule import streamed_bytes
from tests.lower import programs
from tests.lower.graphs import graph_of

Needs = list[tuple[tuple[int, ...], Gate]]

# Round numbers: a byte takes 1 ns on each SM.
ROUND = replace(
    simulated(2),
    page_bytes=1 << 16,
    read_bytes_per_s=2e9,
    task_ns=100.0,
    signal_ns=10.0,
    wait_ns=5.0,
    operands_ns=20.0,
    computed_ns=0.0,
    launch_ns=7.0,
)


def chain(queues: tuple[tuple[int, ...], ...], needs: list[Needs]) -> Schedule:
    """Tasks of the first call of `programs.mlp`: gate and up, 64 KiB streamed."""
    return Schedule(normalize(fuse_events(graph_of(needs))), queues)


BYTES = 2 * 64 * 256 * 2
ALONE: list[Needs] = [[], []]
AFTER: list[Needs] = [[], [((0,), "resident")]]


def test_bytes_and_bandwidth() -> None:
    cost = estimate(chain(((0,), (1,)), ALONE), ROUND)
    assert cost.read_bytes == 2 * BYTES
    assert cost.read_ns == BYTES
    (stage,) = cost.stages
    assert (stage.total, stage.most, stage.balance) == (2 * BYTES, BYTES, 1.0)
    assert cost.worst_balance(0) == stage
    assert cost.worst_balance(BYTES) is None


def test_two_tasks_of_one_sm_are_no_balance() -> None:
    (stage,) = estimate(chain(((0, 1), ()), ALONE), ROUND).stages
    assert stage.balance == 2.0


def test_a_task_alone_streams_from_the_start() -> None:
    cost = estimate(chain(((0,), (1,)), ALONE), ROUND)
    # Operands arrive at 20, its body is ready at 120, its pages are there at BYTES.
    assert cost.step_ns == 7 + BYTES
    # All of its pages fit in the ring: no prefetch can hide the rest.
    assert cost.critical_ns == 100 + 10


def test_a_wait_costs_signal_poll_and_operands() -> None:
    cost = estimate(chain(((0,), (1,)), AFTER), ROUND)
    assert cost.critical_ns == 100 + (10 + 5 + 20) + 100 + 10
    # The second SM has its pages by then.
    assert cost.step_ns == 7 + BYTES + (10 + 5 + 20) + 100
    assert cost.lower_bound_ns == BYTES


def test_pages_beyond_the_ring_cannot_be_loaded_ahead() -> None:
    small = replace(ROUND, page_bytes=1 << 13, smem_bytes=4 << 13)
    cost = estimate(chain(((0,), (1,)), AFTER), small)
    late = BYTES - 4 * small.page_bytes
    assert cost.critical_ns == 2 * (100 + late) + (10 + 5 + 20) + 10
    assert cost.step_ns == 7 + BYTES + (10 + 5 + 20) + 100 + late


def test_waits_are_made_one_after_the_other() -> None:
    both: list[Needs] = [[], [], [((0,), "resident"), ((1,), "resident")], []]
    apart = [*both[:3], [((0,), "resident")]]
    two = chain(((0, 2), (1, 3)), apart)
    assert len(two.events.waits[2]) == 2
    one = chain(((0, 2), (1, 3)), both)
    assert len(one.events.waits[2]) == 1
    fast = replace(ROUND, read_bytes_per_s=2e18)
    more = estimate(two, fast).step_ns - estimate(one, fast).step_ns
    assert more == pytest.approx(ROUND.wait_ns)


def test_a_combine_and_a_computed_operand() -> None:
    options = Options(DecomposeOptions(splits=(("down", 2), ("gate_up", 1))))
    plan = compile_program(programs.mlp(), simulated(2), options)
    events = plan.schedule.events
    found = {
        (k.call, k.mode): work_of(k, streamed_bytes(k, events), H200)
        for k in events.graph.kinds
    }
    page = H200.page_ns
    assert found["down", "combine"] == Work(0, 0, 0.0, H200.task_ns, True)
    half = found["down", "partial"]
    assert (half.slots, half.page_ns) == (1, pytest.approx(page))
    # Eight columns of 256 features are normed before the first page.
    gate_up = found["gate_up", "full"]
    assert gate_up.body_ns == H200.task_ns + 8 * 256 * H200.computed_ns
    assert (gate_up.slots, gate_up.beyond_ns(1)) == (2, pytest.approx(page))


@pytest.mark.parametrize("sms", [1, 3, 16])
def test_a_step_is_never_estimated_below_its_bound(sms: int) -> None:
    program = programs.llama(
        b=2, layers=2, d=256, i=512, heads=4, kv=2, hd=64, vocab=520, s=256
    )
    machine: Machine = simulated(sms)
    for stage in run_passes(program, machine):
        if isinstance(stage.value, Schedule | KernelPlan):
            cost = estimate(stage.value, machine)
            assert cost.step_ns >= cost.lower_bound_ns
            assert cost == estimate(stage.value, machine)
            counts = stage.counts()
            assert counts["us critical path"] == round(cost.critical_ns / 1e3)
            assert counts["us lower bound"] == round(cost.lower_bound_ns / 1e3)


def test_a_larger_share_of_the_cache_costs_more() -> None:
    program = programs.attention(s=1024, d=64)
    plan = compile_program(program, simulated(2), Options(DecomposeOptions(False)))
    half, all_of_it = (estimate(plan, simulated(2), s).read_bytes for s in (0.5, 1.0))
    assert all_of_it == 2 * half > 0
