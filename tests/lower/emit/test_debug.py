"""The debug build as lowered for CUDA: every poll is bounded, and says why it ended."""

from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import mkdsl as mk
from mkdsl.lower.emit.kernel import Launcher, build
from mkdsl.lower.hang import REPORT_WORDS, ROLES, TIMEOUT_NS
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.pipeline import compile_program
from mkdsl.lower.stamps import STAMPS
from tests.gpu.blocked import without_waits
from tests.gpu.codebook import example, recall
from tests.lower.emit.lowered import Kernel, kernels, ptx

POLL = "ld.relaxed.gpu.global.b32"
SIGNAL = "red.release.gpu.global.add.u32"
REPORT = f"tensor<{H200.sms}x{len(ROLES)}x{REPORT_WORDS}xi32>"

ARGS = jax.eval_shape(example)
LEAVES = jax.tree.leaves(ARGS)
PLAN = compile_program(mk.megakernel(recall).trace(*ARGS).program, H200)


def lowered(launcher: Launcher) -> Kernel:
    traced = jax.jit(launcher.run).trace(*LEAVES)
    (kernel,) = kernels(traced.lower(lowering_platforms=("cuda",)))
    return kernel


@pytest.fixture(scope="module")
def normal() -> Kernel:
    return lowered(Launcher(PLAN))


@pytest.fixture(scope="module")
def debug() -> Kernel:
    return lowered(Launcher(PLAN, debug=True))


def polls(kernel: Kernel) -> list[str]:
    return [line for line in ptx(kernel) if POLL in line]


def test_every_poll_is_bounded(normal: Kernel, debug: Kernel) -> None:
    assert len(polls(debug)) == len(polls(normal)) > 0
    for line in polls(debug):
        assert f"setp.ge.u32 late, waited, {TIMEOUT_NS};" in line
        assert line.index("POLL:") < line.index("@!late bra POLL;")


def test_every_poll_looks_at_the_flag_before_the_counter(debug: Kernel) -> None:
    for line in polls(debug):
        flag, counter = f"{POLL} flag, [$1];", f"{POLL} seen, [$0];"
        assert line.index("POLL:") < line.index(flag) < line.index(counter)
        assert line.index("@up bra GIVE_UP;") < line.index("GIVE_UP:")


def test_who_gives_up_reports_and_raises_the_flag(debug: Kernel) -> None:
    for line in polls(debug):
        end = line[line.index("GIVE_UP:") :]
        order = ("st.global.v4", "st.global.v2", "st.relaxed.gpu.global.b32 [$1], 1;")
        assert list(order) == sorted(order, key=end.index)
        assert "bra POLL" not in end


def test_a_bounded_wait_orders_memory_like_any_other(debug: Kernel) -> None:
    program = ptx(debug)
    for i, line in enumerate(program):
        if POLL in line:
            assert line.endswith("DONE: fence.acquire.gpu; }")
            after = ["bar.sync $0, 128;", "fence.proxy.async.global;"]
            assert program[i + 1 : i + 3] == after


def test_signals_are_the_same(normal: Kernel, debug: Kernel) -> None:
    in_normal, in_debug = (
        [line for line in ptx(k) if SIGNAL in line] for k in (normal, debug)
    )
    assert in_normal == in_debug != []


def test_the_report_is_written_in_place_from_zeros(debug: Kernel) -> None:
    operand, result = debug.operands.index(REPORT), debug.results.index(REPORT)
    assert (operand, result) in debug.aliases


def test_the_flag_is_one_counter_more(normal: Kernel, debug: Kernel) -> None:
    count = len(PLAN.schedule.events.events)
    assert f"tensor<{count}xi32>" in normal.operands
    assert f"tensor<{count + 1}xi32>" in debug.operands


def test_the_normal_build_has_nothing_of_it(normal: Kernel) -> None:
    assert REPORT not in normal.operands
    assert not any("globaltimer" in line or "nano" in line for line in ptx(normal))
    assert set(polls(normal)) == {f"{POLL} $0, [$1];"}


@pytest.mark.slow
def test_timestamps_and_a_report_together() -> None:
    kernel = lowered(Launcher(PLAN, debug=True, timestamps=True))
    longest = max(map(len, PLAN.schedule.queues))
    assert f"tensor<{H200.sms}x{longest}x{len(STAMPS)}xi32>" in kernel.results
    assert REPORT in kernel.results


def test_an_unproved_plan_has_a_debug_build_alone() -> None:
    plan = without_waits(PLAN, 14)
    assert polls(lowered(Launcher(plan, debug=True)))
    for make in (Launcher, build):
        with pytest.raises(mk.VerifyError, match="race: task t14 'best_of_all'"):
            make(plan)


def test_a_debug_build_is_not_called_inside_of_jit() -> None:
    launcher: Any = Launcher(PLAN, debug=True)
    with pytest.raises(mk.LaunchError, match="'recall': a debug build is called dir"):
        jax.jit(lambda *leaves: launcher(*leaves)).trace(*LEAVES)


def test_the_interpreter_has_no_debug_build() -> None:
    plan = compile_program(PLAN.schedule.events.graph.program, simulated(1))
    with pytest.raises(mk.LaunchError, match="a debug build bounds waits, and the int"):
        Launcher(plan, plgpu.InterpretGPUParams(), debug=True)


@pytest.mark.slow
def test_a_megakernel_lowers_to_its_debug_build() -> None:
    step = mk.megakernel(
        recall, donate_argnums=1, implementation="mosaic_gpu", machine=H200
    )
    traced = step.trace(*ARGS)
    (kernel,) = kernels(traced.lower(platforms=("cuda",), debug=True)._jax_lowered())
    assert REPORT in kernel.results
    text = step.lower(*ARGS, platforms=("cuda",), debug=True).as_text()
    assert REPORT in text
    # The trace is donated as in the normal build.
    assert "tf.aliasing_output" in text
    assert REPORT not in step.lower(*ARGS, platforms=("cuda",)).as_text()
