"""A printed stage is a bug report: it is verified, and runs as it was."""

import re

import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.pipeline import STAGES, finish, run_passes
from mkdsl.runtime.interpret_program import run_program
from mkdsl.runtime.replay import replay_unproved
from tests.runtime.small_programs import arguments, decode, mlp

PROGRAM = mlp()
INPUTS = arguments(PROGRAM)
TEXTS = {s.name: s.as_text() for s in run_passes(PROGRAM, simulated(3))}
# A task that reads h, without its wait.
RACE = re.sub(r"; wait e0>=\d+ resident", "", TEXTS["pages"], count=1)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_can_be_replayed(stage):
    (found,) = mk.replay(TEXTS[stage], INPUTS, PROGRAM, machine=simulated(3), seed=5)
    (wanted,) = run_program(PROGRAM, INPUTS)
    pair = (np.asarray(a).astype(np.float32) for a in (found, wanted))
    np.testing.assert_allclose(*pair, atol=0.03)


def test_a_report_from_another_machine_holds_its_schedule():
    """What runs is the text: two queues on a machine of 132 SMs."""
    text = next(
        s.as_text() for s in run_passes(PROGRAM, simulated(2)) if s.name == "elided"
    )
    plan = finish(mk.parse(text, PROGRAM), H200)
    assert len(plan.schedule.queues) == 2
    mk.replay(text, INPUTS, PROGRAM)


def test_the_verifier_speaks_first_and_the_simulator_shows_it():
    assert RACE != TEXTS["pages"]
    with pytest.raises(mk.VerifyError, match=r"race: task t\d+ 'down'") as error:
        mk.replay(RACE, INPUTS, PROGRAM)
    assert error.value.stage == "accesses"
    with pytest.raises(mk.VerifyError, match="race: task 'down'") as error:
        replay_unproved(RACE, INPUTS, PROGRAM, seed=7)
    assert error.value.stage == "simulate"
    with pytest.raises(mk.VerifyError, match="race: task 'down'"):
        replay_unproved(RACE, INPUTS, PROGRAM, seed=8)
    (found,) = replay_unproved(RACE, INPUTS, PROGRAM, seed=8, check_races=False)
    assert found.shape == INPUTS[0].shape


def test_a_report_needs_the_tasks_that_it_was_made_with():
    with pytest.raises(mk.ParseError, match="no task gated is given: copy"):
        mk.replay(TEXTS["pages"], INPUTS, [next(decode().calls()).task])


def test_the_way_from_a_megakernel_to_its_replay():
    """As the docstring of mkdsl/runtime/replay.py says."""

    def double_twice(x):
        spec = mk.Spec((1, 64), lambda i: (0, i))

        def twice(x, name):
            return mk.call(
                double,
                grid=(2,),
                in_specs=spec,
                out_specs=spec,
                out_shape=mk.Shape(x.shape, x.dtype),
                name=name,
            )(x)

        return twice(twice(x, "once"), "twice")

    @mk.task
    def double(x):
        return x * 2

    step, x = mk.megakernel(double_twice), np.ones((1, 128), np.float32)
    text = step.lower(x).as_text("pages")
    (found,) = mk.replay(text, [x], tasks=step.trace(x).program, seed=7)
    np.testing.assert_array_equal(found, 4 * x)
    np.testing.assert_array_equal(found, step(x))
