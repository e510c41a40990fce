"""Models on a machine with less than half of the H200's shared memory."""

from dataclasses import replace

import numpy as np
import pytest

import mkdsl as mk
from mkdsl.errors import PlanError
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import H200, RTX_4090, Machine, simulated
from mkdsl.lower.pipeline import compile_program
from models.decode import DecodeStep, argument_shapes
from models.registry import SHAPES
from tests.tiny_llama import TINY, example


def plan_of(name: str, batch: int, machine: Machine) -> KernelPlan:
    config = SHAPES[name]
    step = DecodeStep(
        config, batch, 2048, implementation="simulate", machine=machine
    ).kernel
    program = step.trace(*argument_shapes(config, batch, 2048)).program
    return compile_program(program, machine)


def modes(plan: KernelPlan, call: str) -> set[str]:
    return {k.mode for k in plan.schedule.events.graph.kinds if k.call == call}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_llama_1b_is_planned_and_proved(batch: int) -> None:
    plan = plan_of("llama-3.2-1b", batch, RTX_4090)
    assert plan.smem_bytes <= 99 * 1024
    assert plan.page_bytes == RTX_4090.page_bytes
    assert len(plan.schedule.queues) == 128
    # Whole, its tasks would be 32 for 128 SMs. What reads x may not be split at batch
    # 1: others read the same array in pieces.
    assert modes(plan, "down") == {"partial", "combine"}
    assert batch > 1 or modes(plan, "q") == {"full"}


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_budget() -> None:
    with pytest.raises(PlanError) as e:
        plan_of("llama-3.2-1b", 16, RTX_4090)
    lines = str(e.value).splitlines()
    assert "0 pages of shared memory are left, at least 2 are needed" in lines[0]
    budget = [line.split() for line in lines if line.startswith("  ")]
    sizes = {" ".join(words[:2]): words for words in budget}
    assert "101376" in sizes["shared memory"]
    assert "q" in sizes["resident operands,"]


def test_a_page_that_no_slot_holds_is_refused_with_its_bytes() -> None:
    with pytest.raises(PlanError, match=r"256 rows x 64 columns = 32768 bytes; a page"):
        plan_of("gemma-3-270m", 1, RTX_4090)


# The resident operand of `down`, [8, 4096], takes 64 KiB: it has to be split.
WIDE = replace(TINY, hidden_size=256, intermediate_size=4096, num_layers=1)


@pytest.mark.slow
def test_a_step_that_has_to_be_split_has_the_right_values() -> None:
    machine = simulated(4, like=RTX_4090)
    lengths = [5, 0, 63, 100]
    scores = {}
    for implementation in ("xla", "simulate"):
        step = DecodeStep(
            WIDE, 4, 128, logits=True, implementation=implementation, machine=machine
        )
        args = example(WIDE, lengths, 128)
        scores[implementation] = np.asarray(step(*args)[0])
    program = step.kernel.trace(*example(WIDE, lengths, 128)).program
    assert modes(compile_program(program, machine), "down") == {"partial", "combine"}
    assert np.std(scores["xla"]) > 0.3
    np.testing.assert_allclose(scores["simulate"], scores["xla"], atol=0.03)


@pytest.mark.slow
def test_smaller_pages_make_room_for_a_batch_of_16_on_an_h200() -> None:
    with pytest.raises(PlanError, match="1 pages of shared memory are left") as e:
        plan_of("llama-3.1-8b", 16, H200)
    assert "page_bytes=16384" in e.value.hint
    plan = plan_of("llama-3.1-8b", 16, replace(H200, page_bytes=16384))
    assert (plan.ring, plan.page_bytes) == (2, 16384)


def test_tiles_fit_the_pages_of_the_machine() -> None:
    many = {"computed": True, "tiles": (256, 128, 64)}
    assert mk.projection_rows(128256, 2048, 8, **many) == 256
    assert mk.projection_rows(128256, 2048, 8, RTX_4090, **many) == 128
    assert mk.projection_rows(8192, 2048, 8, RTX_4090) == 64
    # Few rows would keep [8, 8192] of the other operand whole.
    assert mk.projection_rows(2048, 8192, 1, RTX_4090) == 64
