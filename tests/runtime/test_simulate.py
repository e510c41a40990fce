"""The simulator: right values at every seed, and a report for every broken plan."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import expr
from mkdsl.lower.ir import Event, EventGraph, KernelPlan, Wait
from mkdsl.runtime.interpret_program import run_program
from mkdsl.runtime.interpret_schedule import simulate
from tests.runtime.small_programs import (
    arguments,
    bump,
    decode,
    mlp,
    mlp_reference,
    plan_of,
)
from tests.tiers import first_quick

SEEDS = range(6)
DECODE = decode()
SPLIT = {"attend": 2, "down": 2}


@functools.cache
def decode_plan(*splits: tuple[str, int]) -> KernelPlan:
    return plan_of(DECODE, **dict(splits))


def with_events(plan: KernelPlan, events: EventGraph) -> KernelPlan:
    return replace(plan, schedule=replace(plan.schedule, events=events))


def name_of(plan: KernelPlan, task: int) -> str:
    graph = plan.schedule.events.graph
    return graph.kinds[graph.tasks[task].kind].call


def replace_wait(plan: KernelPlan, task: int, index: int, *by: Wait) -> KernelPlan:
    events = plan.schedule.events
    waits = list(events.waits)
    waits[task] = (*waits[task][:index], *by, *waits[task][index + 1 :])
    return with_events(plan, replace(events, waits=tuple(waits)))


def all_waits(plan: KernelPlan) -> list[tuple[int, int]]:
    waits = plan.schedule.events.waits
    return [(t, i) for t, of in enumerate(waits) for i in range(len(of))]


def near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    pair = (np.asarray(a).astype(np.float32) for a in (found, expected))
    np.testing.assert_allclose(*pair, atol=tolerance)


# ---------------------------------------------------------------------- values


def test_one_layer_agrees_with_plain_jnp():
    program = mlp()
    inputs = arguments(program)
    (y,) = simulate(plan_of(program), inputs)
    assert y.shape == (2, 320)
    near(y, mlp_reference(*inputs), 0.03)  # bf16 of values up to 3


@pytest.mark.parametrize("splits", first_quick([tuple(SPLIT.items()), ()]))
@pytest.mark.parametrize("length", first_quick([200, 0, 1, 64]))
def test_every_seed_agrees_with_the_program(splits, length):
    inputs = arguments(DECODE, length)
    expected = run_program(DECODE, inputs)
    first = simulate(decode_plan(*splits), inputs, seed=0)
    for found, want in zip(first, expected, strict=True):
        near(found, want, 0.02)
    for seed in SEEDS:
        again = simulate(decode_plan(*splits), inputs, seed=seed, check_races=seed < 3)
        for found, want in zip(again, first, strict=True):
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("sms", [1, 2, 7])
def test_any_number_of_sms(sms):
    inputs = arguments(DECODE)
    expected = simulate(decode_plan(), inputs)
    found = simulate(plan_of(DECODE, sms), inputs)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_beyond_the_length_is_not_read():
    inputs = arguments(DECODE, length=70)
    expected = simulate(decode_plan(), inputs)
    inputs[1] = inputs[1].copy()
    inputs[1][:, :, 70:] = np.nan
    x, cache = simulate(decode_plan(), inputs)
    np.testing.assert_array_equal(x, expected[0])
    np.testing.assert_array_equal(cache[:, :, :71], expected[1][:, :, :71])


def test_a_full_cache_drops_the_new_row():
    inputs = arguments(DECODE, length=256)
    _, cache = simulate(decode_plan(), inputs)
    np.testing.assert_array_equal(cache, inputs[1])


def test_inputs_are_not_changed_and_are_checked():
    inputs = arguments(DECODE)
    before = [a.copy() for a in inputs]
    simulate(decode_plan(), inputs)
    for a, b in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(VerifyError, match=r"input x is float32\[2, 128\].*bfloat16"):
        simulate(decode_plan(), [inputs[0].astype(np.float32), *inputs[1:]])


def test_the_smallest_rings_and_slots_change_nothing():
    inputs = arguments(DECODE)
    expected = simulate(decode_plan(), inputs)
    tight = replace(decode_plan(), ring=2, in_flight=1, arena_slots=1, staging_slots=1)
    for seed in SEEDS:
        for a, b in zip(simulate(tight, inputs, seed=seed), expected, strict=True):
            np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------------- races


@pytest.mark.parametrize("splits", [(), tuple(SPLIT.items())])
def test_every_removed_wait_is_a_race(splits):
    plan, inputs = decode_plan(*splits), arguments(DECODE)
    assert all_waits(plan)
    for seed, (task, index) in enumerate(all_waits(plan)):
        with pytest.raises(VerifyError, match="race: task") as caught:
            simulate(replace_wait(plan, task, index), inputs, seed=seed)
        assert "small_programs.py" in str(caught.value)


def test_a_race_names_both_tasks_the_region_and_the_event():
    plan = plan_of(mlp())
    task = next(t for t, _ in all_waits(plan) if name_of(plan, t) == "down")
    wait = plan.schedule.events.waits[task][0]
    found: set[str] = set()
    for seed in range(20):
        with pytest.raises(VerifyError) as caught:
            simulate(replace_wait(plan, task, 0), arguments(mlp()), seed=seed)
        text = str(caught.value)
        assert text.startswith("simulate: race: task 'down' layer 0 pid (")
        assert "activation loader of SM" in text
        assert "reads gated[0:2, 0:200]" in text
        assert "resident operands: none" in text
        assert "mk.call(" in text
        found |= {w for w in ("before all of it", "after the write by") if w in text}
        if "after the write by" in text:
            assert "task 'gated' layer 0 pid (" in text
            assert f"signals e{wait.event}" in text
    assert found == {"before all of it", "after the write by"}


def test_without_the_race_check_a_removed_wait_gives_nan():
    plan = plan_of(mlp())
    task = next(t for t, _ in all_waits(plan) if name_of(plan, t) == "down")
    broken = replace_wait(plan, task, 0)
    runs = [
        simulate(broken, arguments(mlp()), seed=s, check_races=False)[0]
        for s in range(20)
    ]
    assert any(np.isnan(y.astype(np.float32)).any() for y in runs)


def test_the_first_k_of_n_signals_say_nothing_of_any_task():
    plan = plan_of(mlp())
    task = next(t for t, _ in all_waits(plan) if name_of(plan, t) == "down")
    wait = plan.schedule.events.waits[task][0]
    assert wait.threshold > 1
    less = replace(wait, threshold=wait.threshold - 1)
    for seed in SEEDS:
        with pytest.raises(VerifyError, match="race: task 'down'"):
            simulate(replace_wait(plan, task, 0, less), arguments(mlp()), seed=seed)


def test_an_overwrite_after_readers():
    plan, inputs = plan_of(bump()), arguments(bump())
    y, s = simulate(plan, inputs)
    near(y, 2 * inputs[0].astype(np.float32), 0.0)
    near(s, 2 * inputs[1].astype(np.float32), 0.0)
    found: set[str] = set()
    for seed, (task, index) in enumerate(all_waits(plan) * 60):
        assert name_of(plan, task) == "writer"
        with pytest.raises(VerifyError) as caught:
            simulate(replace_wait(plan, task, index), inputs, seed=seed)
        text = str(caught.value)
        found |= {w for w in ("after the read by", "after the write by") if w in text}
    # Which of the two comes first differs between seeds.
    assert found == {"after the read by", "after the write by"}


def test_two_tasks_of_a_call_that_write_one_block():
    plan = plan_of(mlp())
    events = plan.schedule.events
    kinds = list(events.graph.kinds)
    (out,) = kinds[0].outs
    same = replace(out, axes=(out.axes[0], replace(out.axes[1], start=expr(0))))
    kinds[0] = replace(kinds[0], outs=(same,))
    graph = replace(events.graph, kinds=tuple(kinds))
    with pytest.raises(VerifyError, match="which its own call has written: task 'g"):
        simulate(with_events(plan, replace(events, graph=graph)), arguments(mlp()))


def test_a_stream_wait_at_the_wrong_gate_is_a_race():
    plan = plan_of(bump())
    task, index = all_waits(plan)[0]
    wait = replace(plan.schedule.events.waits[task][index], gate="stream")
    # The storer follows both gates, so an overwrite may wait at either.
    simulate(replace_wait(plan, task, index, wait), arguments(bump()))
    plan = plan_of(mlp())
    task = next(t for t, _ in all_waits(plan) if name_of(plan, t) == "down")
    wait = replace(plan.schedule.events.waits[task][0], gate="stream")
    with pytest.raises(VerifyError, match="race: task 'down'"):
        simulate(replace_wait(plan, task, 0, wait), arguments(mlp()))


# ------------------------------------------------------------------- deadlocks


def test_a_swapped_queue_is_a_deadlock():
    plan = plan_of(mlp(), 1)
    (queue,) = plan.schedule.queues
    late = min(t for t, _ in all_waits(plan))
    (wait,) = plan.schedule.events.waits[late]
    order = (late, *(t for t in queue if t != late))
    swapped = replace(plan, schedule=replace(plan.schedule, queues=(order,)))
    with pytest.raises(VerifyError) as caught:
        simulate(swapped, arguments(mlp()))
    text = str(caught.value)
    assert text.startswith("simulate: deadlock: 4 roles wait")
    assert "SM 0 activation loader, task 'down' layer 0 pid (0)" in text
    assert f"waits for e{wait.event} >= {wait.threshold}, seen 0" in text
    assert "SM 0 consumer, task 'down'" in text
    assert "waits for arena slot 0 to be full" in text
    assert "SM 0 weight loader" in text
    assert "waits for page slot" in text
    assert "SM 0 storer, task 'down'" in text
    assert "waits for staging slot 0 to be full" in text


def test_a_threshold_that_nobody_reaches_is_a_deadlock():
    plan = plan_of(mlp())
    task, index = all_waits(plan)[0]
    wait = plan.schedule.events.waits[task][index]
    more = replace(wait, threshold=wait.threshold + 1)
    text = rf"e{wait.event} >= {wait.threshold + 1}, seen {wait.threshold}"
    with pytest.raises(VerifyError, match=text):
        simulate(replace_wait(plan, task, index, more), arguments(mlp()))


def test_a_ring_that_holds_less_than_one_step_is_a_deadlock():
    tight = replace(decode_plan(), ring=1, in_flight=1)
    with pytest.raises(VerifyError, match="waits for page slot 0 to be f"):
        simulate(tight, arguments(DECODE))


def test_an_event_that_nobody_signals_is_a_deadlock():
    plan = plan_of(mlp())
    events = plan.schedule.events
    more = (*events.events, Event((0,)))
    waits = list(events.waits)
    waits[0] = (Wait(len(events.events), 1, "stream"),)
    broken = replace(events, events=more, waits=tuple(waits))
    with pytest.raises(
        VerifyError, match=r"weight loader.*waits for e\d+ >= 1, seen 0"
    ):
        simulate(with_events(plan, broken), arguments(mlp()))
