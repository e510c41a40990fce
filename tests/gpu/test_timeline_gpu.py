"""Stamps of the device make a timeline of the plan that ran."""

import jax
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.emit.kernel import Launcher
from mkdsl.lower.machine import H200
from mkdsl.lower.pipeline import compile_program
from mkdsl.runtime.timeline import CAUSES, CONSUMER, from_stamps
from mkdsl.runtime.timeline_report import report
from tests.gpu.codebook import example, recall

# %globaltimer advances in steps of 32 ns, and a stamp follows what it notes.
SLACK_NS = 2_000
MOST_NS = 10_000_000


@pytest.mark.gpu
def test_a_timeline_of_the_device() -> None:
    args = example()
    program = mk.megakernel(recall).trace(*args).program
    plan = compile_program(program, H200)
    run = jax.jit(Launcher(plan, timestamps=True).run)
    for _ in range(3):
        results = run(*jax.tree.leaves(args))
    timeline = from_stamps(plan, np.asarray(results.stamps))
    assert 0 < timeline.end_ns < MOST_NS
    assert len(timeline.runs) == len(plan.schedule.events.graph.tasks)
    assert {s.cause for s in timeline.spans} == set(CAUSES)
    for run_of in timeline.runs:
        assert run_of.waited_ns <= run_of.landed_ns + SLACK_NS
        assert run_of.landed_ns <= run_of.computed_ns <= run_of.signalled_ns
        if run_of.producer is not None:
            producer = timeline.runs[run_of.producer]
            assert producer.computed_ns <= run_of.landed_ns + SLACK_NS
    path = timeline.critical_path()
    assert path[-1].signalled_ns == timeline.end_ns
    assert timeline.total_ns(CONSUMER, "wait") > 0
    assert "waited longest" in report(timeline)
