"""What boundaries cost: by hand on small graphs, orders on whole programs."""

from dataclasses import replace

import pytest

from mkdsl.lower.boundaries import (
    TaskBound,
    Waves,
    economics,
    potential_gain,
    waves,
)
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.estimate import estimate
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.pipeline import Options, compile_program
from tests.lower import programs

# Round numbers: a byte takes 1 ns on each SM, a task of no bytes 135 ns.
ROUND = replace(
    simulated(3),
    read_bytes_per_s=3e9,
    flops_per_s=3e12,
    task_ns=100.0,
    signal_ns=10.0,
    wait_ns=5.0,
    operands_ns=20.0,
    computed_ns=0.0,
)
# A task of the first call of `programs.mlp` streams two blocks of 64 rows.
BYTES = 2 * 64 * 256 * 2


@pytest.fixture(scope="module")
def plan() -> KernelPlan:
    return compile_program(programs.mlp(), ROUND, Options(DecomposeOptions(False)))


def test_512_blocks_leave_80_of_148_sms_idle() -> None:
    assert waves(512, 148) == Waves(full=3, last=68, idle=80)
    assert 3 * 148 + 68 == 512
    assert 68 + 80 == 148


@pytest.mark.parametrize(
    ("blocks", "want"), [(0, (0, 0, 0)), (3, (1, 0, 0)), (1, (0, 1, 2)), (7, (2, 1, 2))]
)
def test_waves(blocks: int, want: tuple[int, int, int]) -> None:
    found = waves(blocks, 3)
    assert (found.full, found.last, found.idle) == want


def test_gain_is_a_share_of_the_whole() -> None:
    assert potential_gain(1.0, 3.0) == 0.25
    assert potential_gain(0.0, 3.0) == potential_gain(0.0, 0.0) == 0.0


def test_the_boundary_of_a_stage(plan: KernelPlan) -> None:
    first, second = economics(plan, ROUND, launch_ns=7.0).boundaries
    tasks = plan.schedule.events.graph.tasks
    assert first.calls == ("gate_up",)
    assert first.blocks == sum(t.kind == 0 for t in tasks) == 8
    assert first.waves == Waves(full=2, last=2, idle=1)
    assert first.launch_ns == 7.0
    assert first.bubble_ns == 20.0
    # Two SMs run three, and the mean is 8 / 3.
    assert first.tail_ns == pytest.approx((3 - 8 / 3) * BYTES)
    # 512 columns of 8 rows, 16 bits: written once, read once.
    assert first.trip_ns == pytest.approx(2 * 512 * 8 * 2 / 3)
    assert first.total_ns == pytest.approx(7.0 + 20.0 + first.tail_ns + first.trip_ns)
    assert second.calls == ("down",)


def test_bytes_are_those_of_the_estimate(plan: KernelPlan) -> None:
    found = economics(plan, ROUND)
    want = estimate(plan, ROUND)
    assert found.read_bytes == want.read_bytes
    assert found.work_ns == pytest.approx(want.read_ns)


def test_operations_are_two_for_each_weight_and_column(plan: KernelPlan) -> None:
    found = economics(plan, ROUND)
    weights = found.read_bytes // 2
    assert found.operations == 2 * 8 * weights


def test_work_is_compute_where_operations_take_longer(plan: KernelPlan) -> None:
    slow = replace(ROUND, flops_per_s=3e9)
    found = economics(plan, slow)
    assert found.work_ns == pytest.approx(found.operations / 3)
    streaming = [t for t in found.tasks if t.read_bytes]
    assert {t.bound for t in streaming} == {"compute"}


def test_every_task_has_a_bound(plan: KernelPlan) -> None:
    gate_up, _ = economics(plan, ROUND).tasks
    assert (gate_up.tasks, gate_up.read_bytes) == (8, BYTES)
    assert gate_up.latency_ns == 135.0
    assert gate_up.memory_ns == BYTES
    assert gate_up.compute_ns == pytest.approx(gate_up.operations / 1e3)
    assert gate_up.intensity == 8.0
    assert gate_up.roofline_ns == BYTES
    assert gate_up.bound == "memory"


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ((3.0, 2.0, 1.0), "memory"),
        ((2.0, 3.0, 1.0), "compute"),
        ((2.0, 1.0, 3.0), "latency"),
        ((0.0, 0.0, 0.0), "memory"),
    ],
)
def test_the_longest_part_bounds(times: tuple[float, ...], want: str) -> None:
    assert TaskBound("a", "full", 1, 1, 1, *times).bound == want


@pytest.mark.slow
def test_a_step_of_1b_at_batch_1_is_two_fifths_boundaries() -> None:
    plan = compile_program(programs.llama(), H200)
    found = economics(plan, H200)
    assert 0.3 < found.gain < 0.5
    # Without launches at all, what is left is waves and bubbles.
    assert 0.2 < economics(plan, H200, launch_ns=0.0).gain < found.gain
