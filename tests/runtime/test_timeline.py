"""Timelines: by hand from stamps, and of the simulator's clock."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mkdsl.errors import LaunchError, VerifyError
from mkdsl.lower import stamps as st
from mkdsl.lower.estimate import estimate
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import Gate, KernelPlan, Schedule
from mkdsl.lower.machine import Machine, simulated
from mkdsl.lower.normalize import normalize
from mkdsl.lower.pipeline import Options, compile_program, finish
from mkdsl.runtime.agents import ROLES
from mkdsl.runtime.timeline import CONSUMER, Span, Timeline, from_stamps
from mkdsl.runtime.timeline_report import longest_held, report
from mkdsl.runtime.virtual_time import simulate_stamps
from tests.lower.graphs import graph_of
from tests.runtime.small_programs import decode, mlp, plan_of

Needs = list[tuple[tuple[int, ...], Gate]]

# Round numbers: a byte takes 1 ns on each SM.
ROUND = replace(
    simulated(2),
    read_bytes_per_s=2e9,
    task_ns=100.0,
    signal_ns=10.0,
    wait_ns=5.0,
    operands_ns=20.0,
    computed_ns=0.0,
    launch_ns=0.0,
)


@functools.cache
def chain() -> KernelPlan:
    """Task 0 on SM 0; task 1, which waits for it, on SM 1; task 2 behind task 1."""
    needs: list[Needs] = [[], [((0,), "resident")], []]
    events = normalize(fuse_events(graph_of(needs)))
    return finish(Schedule(events, ((0,), (1, 2))), simulated(2))


# Per task: first page, waited, fetched, landed, computed, store began, stored,
# signalled, began pages, ended pages.
TASK_0 = [1000, 1005, 1010, 1100, 1500, 1510, 1600, 1700, 1150, 1450]
TASK_1 = [1000, 1800, 1810, 1900, 2000, 2010, 2020, 2100, 1920, 1980]
TASK_2 = [1950, 2000, 2005, 2050, 2300, 2310, 2320, 2400, 2050, 2300]


def written(dtype: type = np.int64, offset: int = 0) -> np.ndarray:
    array = np.zeros((2, 2, len(st.STAMPS)), np.int64)
    array[0, 0], array[1, 0], array[1, 1] = TASK_0, TASK_1, TASK_2
    return np.where(array, array + offset, 0).astype(np.uint64).astype(dtype)


def spans_of(timeline: Timeline, sm: int, role: str) -> list[tuple[object, ...]]:
    return [
        (s.task, s.cause, s.start_ns, s.end_ns)
        for s in timeline.spans
        if (s.sm, s.role) == (sm, role)
    ]


def test_spans_of_every_role() -> None:
    timeline = from_stamps(chain(), written())
    loader, fetcher, consumer, storer = ROLES
    assert spans_of(timeline, 1, consumer) == [
        (1, "wait", 0, 800),
        (1, "load", 800, 900),
        (1, "compute", 900, 920),
        (1, "load", 920, 980),
        (1, "compute", 980, 1000),
        (2, "load", 1000, 1050),
        (2, "load", 1050, 1300),
    ]
    assert spans_of(timeline, 1, fetcher) == [
        (1, "wait", 0, 800),
        (1, "load", 800, 810),
        (2, "load", 1000, 1005),
    ]
    # The loader is ahead: it loads for task 2 before task 1 has used its last page.
    assert spans_of(timeline, 1, loader) == [
        (1, "load", 0, 950),
        (2, "load", 950, 1300),
    ]
    assert spans_of(timeline, 0, storer) == [(0, "store", 510, 700)]
    (wait,) = {s.event for s in timeline.spans if s.cause == "wait"}
    assert wait == 0
    assert timeline.end_ns == 1400
    assert timeline.total_ns(CONSUMER, "wait") == 800
    assert timeline.total_ns(CONSUMER, "wait", sm=0) == 0


def test_a_kernel_that_does_not_note_its_pages() -> None:
    timeline = from_stamps(chain(), written()[:, :, : st.SIGNALLED + 1])
    assert spans_of(timeline, 0, CONSUMER) == [
        (0, "load", 0, 100),
        (0, "compute", 100, 500),
    ]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_any_start_of_the_clock(dtype: type) -> None:
    want = from_stamps(chain(), written())
    assert from_stamps(chain(), written(dtype)) == want
    if dtype != np.int64:
        # It wraps between the first stamp and the last.
        wrapping = written(dtype, 2**32 - 1600)
        assert (np.sort(wrapping[wrapping != 0].view(np.uint32))[0]) < 1000
        assert from_stamps(chain(), wrapping) == want


def test_the_critical_path_goes_through_the_event() -> None:
    timeline = from_stamps(chain(), written())
    assert [r.task for r in timeline.critical_path()] == [0, 1, 2]
    first, held, behind = timeline.runs
    assert (held.event, held.producer, held.previous) == (0, 0, None)
    assert (behind.event, behind.producer, behind.previous) == (None, None, 1)
    assert (first.wait_ns, held.wait_ns, behind.wait_ns) == (0, 800, 0)


def test_which_sm_waited_for_which_event_and_why() -> None:
    timeline = from_stamps(chain(), written(), "a test")
    held = longest_held(timeline)
    assert held is not None
    assert (held.sm, held.event, held.wait_ns, held.event_ns) == (1, 0, 800, 800)
    assert held.run.task == 1
    assert [r.task for r in held.chain] == [0]
    text = report(timeline)
    assert "(a test): 1.4 us, 2 SMs, 3 tasks" in text
    assert (
        "SM 1 waited longest, 0.8 us in all, and longest for event e0: 0.8 us" in text
    )
    assert "on SM 0 signalled at 0.7 us: operands 0.1 us, pages and body 0.4" in text
    assert "which was the first task of its SM" in text


def test_nobody_waits_where_nothing_depends() -> None:
    events = normalize(fuse_events(graph_of([[], [], []])))
    plan = finish(Schedule(events, ((0,), (1, 2))), simulated(2))
    timeline = from_stamps(plan, written())
    assert longest_held(timeline) is None
    assert "no SM has waited for an event" in report(timeline)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda a: a[:1], r"stamps are \[1, 2, 10\]; this plan has 2 SMs and queues"),
        (lambda a: a[:, :, :5], r"\[2, 2, 5\].*8 stamps or more"),
        (lambda a: a * 0, "all zeros: nothing was noted"),
        (
            lambda a: a * (a != 2400),
            "SM 1, task 1 of its queue has no stamp 'signalled'",
        ),
    ],
)
def test_stamps_of_another_plan_are_refused(
    break_it: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    with pytest.raises(LaunchError, match=words) as error:
        from_stamps(chain(), break_it(written()))
    assert error.value.hint


# ------------------------------------------------------------------ virtual time


def timed(plan: KernelPlan, machine: Machine = ROUND, **scalars: int) -> Timeline:
    return from_stamps(plan, simulate_stamps(plan, machine, scalars), "simulator")


def test_a_hand_off_takes_what_the_machine_says() -> None:
    """Operands at 20, body at 120, signal at 130, poll to 135, operands at 155."""
    plan = plan_of(mlp(2, 64, 64), sms=2)
    first, second = timed(plan).runs
    assert (first.waited_ns, first.landed_ns) == (0, 20)
    pages = 2 * 64 * 64 * 2
    assert first.computed_ns == max(120, pages)
    assert first.signalled_ns == first.computed_ns + 10
    assert second.waited_ns == first.signalled_ns + 5
    assert second.landed_ns == second.waited_ns + 20
    assert second.computed_ns == second.landed_ns + 100


def test_results_wait_for_the_slot_of_those_before() -> None:
    """Bodies take 120 and signals 1000: the third results wait for the storer."""
    slow = replace(ROUND, signal_ns=1000.0, read_bytes_per_s=2e15)
    plan = plan_of(mlp(2, 64, 192), sms=1)
    timeline = timed(plan, slow)
    assert plan.staging_slots == 1
    # The storer takes the second at 1120, and only then its slot is free for the third.
    third = plan.schedule.queues[0][2]
    assert timeline.runs[third].computed_ns == 1120
    held = [s for s in timeline.spans if (s.role, s.cause) == (CONSUMER, "store")]
    assert next((s.task, s.end_ns) for s in held) == (third, 1120)


def test_extents_are_those_of_the_scalars() -> None:
    plan = plan_of(decode(), sms=2)
    empty, full = timed(plan, lengths=0), timed(plan, lengths=256)
    # A row of the cache in two operands, 2 rows of the batch, 2 layers, 2 SMs.
    most = 256 * 128 * 2 * 2 * 2
    assert 0 < full.end_ns - empty.end_ns <= most
    with pytest.raises(ValueError, match="x is no integer input"):
        simulate_stamps(plan, ROUND, {"x": 1})


@pytest.mark.parametrize("coarse", [False, True])
def test_the_clock_agrees_with_the_estimate(coarse: bool) -> None:
    machine = simulated(4)
    plan = compile_program(decode(), machine, Options(coarse=coarse))
    half = timed(plan, machine, lengths=128)
    assert half.end_ns == pytest.approx(
        estimate(plan, machine).step_ns - machine.launch_ns, rel=0.15
    )


def test_roles_do_one_thing_at_a_time_and_time_repeats() -> None:
    plan = plan_of(decode(), sms=3)
    timeline = timed(plan, lengths=100)
    assert timeline == timed(plan, lengths=100)
    key = lambda s: (s.sm, s.role)  # noqa: E731
    for _, group in itertools.groupby(timeline.spans, key):
        for a, b in itertools.pairwise(list[Span](group)):
            assert a.end_ns <= b.start_ns
    for run in timeline.runs:
        stages = run.free_ns, run.landed_ns, run.computed_ns, run.signalled_ns
        assert list(stages) == sorted(stages)
    # What holds a task up is over before it goes on.
    for run in timeline.runs:
        if run.producer is not None:
            assert timeline.runs[run.producer].signalled_ns <= run.computed_ns


def test_coarse_events_are_never_faster_here() -> None:
    machine = simulated(4)
    fine, coarse = (
        timed(
            compile_program(decode(), machine, Options(coarse=c)), machine, lengths=64
        )
        for c in (False, True)
    )
    assert fine.end_ns <= coarse.end_ns


def test_a_plan_that_hangs_is_reported() -> None:
    plan = plan_of(decode(), sms=2)
    events = plan.schedule.events
    silent = replace(events, signals=(-1,) * len(events.signals))
    broken = replace(plan, schedule=replace(plan.schedule, events=silent))
    with pytest.raises(VerifyError, match="deadlock: "):
        simulate_stamps(broken, ROUND)
