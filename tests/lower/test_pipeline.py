"""The whole middle of the compiler on whole programs."""

import gc
import time
from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lower import pipeline
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.pipeline import STAGES, compile_program, run_passes
from tests.lower import programs


def small_llama():
    return programs.llama(
        b=2, layers=2, d=256, i=512, heads=4, kv=2, hd=64, vocab=520, s=256
    )


def test_stages_have_their_names():
    assert STAGES == (
        "program",
        "tasks",
        "dependences",
        "events",
        "widened",
        "normalized",
        "schedule",
        "elided",
        "pages",
    )


@pytest.mark.parametrize("sms", [1, 3, 8])
def test_a_decode_step_compiles_and_is_proved(sms):
    plan = compile_program(small_llama(), simulated(sms))
    assert isinstance(plan, KernelPlan)
    assert len(plan.schedule.queues) == sms


def test_compiling_twice_gives_the_same_text():
    first, second = (
        [stage.as_text() for stage in run_passes(small_llama(), simulated(3))]
        for _ in range(2)
    )
    assert first == second


def test_dump_sees_every_stage_with_its_size():
    seen = []
    plan = compile_program(programs.mlp(), simulated(2), dump=seen.append)
    assert tuple(stage.name for stage in seen) == STAGES
    assert seen[-1].value == plan
    assert str(seen[0]) == "program: 7 buffers, 2 calls"
    assert seen[-1].counts()["smem bytes"] == plan.smem_bytes
    counts = {stage.name: stage.counts() for stage in seen}
    assert counts["widened"]["events"] >= counts["normalized"]["events"]
    assert counts["schedule"]["waits"] >= counts["elided"]["waits"]


def drop_a_wait(value):
    """The stage with one wait less."""
    if hasattr(value, "queues"):
        return replace(value, events=drop_a_wait(value.events))
    task = next(t for t, waits in enumerate(value.waits) if waits)
    waits = (*value.waits[:task], (), *value.waits[task + 1 :])
    return replace(value, waits=waits)


@pytest.mark.parametrize(
    "stage", ["events", "widened", "normalized", "schedule", "elided"]
)
def test_a_broken_pass_is_named(stage, monkeypatch):
    passes = tuple(
        replace(step, run=lambda v, m, o, run=step.run: drop_a_wait(run(v, m, o)))
        if step.stage == stage
        else step
        for step in pipeline.PASSES
    )
    monkeypatch.setattr(pipeline, "PASSES", passes)
    with pytest.raises(VerifyError, match="race"):
        compile_program(small_llama(), simulated(3))
    assert gc.isenabled()


def test_the_garbage_collector_rests_in_passes_alone(monkeypatch):
    seen = []
    passes = tuple(
        replace(step, verify=lambda v, m: seen.append(gc.isenabled()))
        for step in pipeline.PASSES
    )
    monkeypatch.setattr(pipeline, "PASSES", passes)
    for _ in run_passes(programs.mlp(), simulated(2)):
        assert gc.isenabled()
    assert seen == [False] * len(STAGES)


def test_a_whole_model_is_compiled_in_seconds():
    """Llama-3.2-1B at batch 8, with a vocabulary whose maxima fit in one task."""
    start = time.perf_counter()
    sizes = {}
    plan = compile_program(
        programs.llama(vocab=32064),
        H200,
        dump=lambda stage: sizes.update({stage.name: stage.counts()}),
    )
    # About 2 s on one core of a slow machine; the limit is for a quadratic pass.
    assert time.perf_counter() - start < 30
    assert sizes["pages"]["most waits"] <= 2
    assert sizes["pages"]["waits"] < 1.2 * sizes["pages"]["tasks"]
    assert plan.ring >= 2
