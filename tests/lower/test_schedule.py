"""Queues: every task once, in order, balanced in every stage."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import Task
from mkdsl.lower.machine import simulated
from mkdsl.lower.normalize import normalize
from mkdsl.lower.schedule import (
    ScheduleOptions,
    call_depths,
    schedule,
    streamed_bytes,
)
from mkdsl.lower.verify_schedule import verify_schedule
from tests.lower import programs
from tests.lower.graphs import graph_of, graphs


def events_of(program, machine, **options):
    graph = decompose(program, machine, DecomposeOptions(**options))
    return normalize(fuse_events(find_dependences(graph)))


@given(graphs(), st.integers(1, 5))
def test_any_graph_is_scheduled(graph, sms):
    machine = simulated(sms)
    made = schedule(normalize(fuse_events(graph)), machine)
    verify_schedule(made, machine)
    assert len(made.queues) == sms
    assert all(list(q) == sorted(q) for q in made.queues)
    assert made == schedule(normalize(fuse_events(graph)), machine)


@pytest.mark.parametrize("sms", [2, 3, 5])
@pytest.mark.parametrize("split", [True, False])
def test_no_stage_of_equal_tasks_gives_an_sm_two_tasks_more(sms, split):
    machine = simulated(sms)
    events = events_of(programs.two_layers(), machine, split=split)
    depths = call_depths(events)
    made = schedule(events, machine)
    for stage in set(depths):
        counts = [sum(depths[t] == stage for t in q) for q in made.queues]
        assert max(counts) - min(counts) <= 1


def test_odd_tasks_rotate_over_the_sms():
    """Three equal tasks a stage on two SMs: the odd one goes to the SM with less."""
    machine = simulated(2)
    program = programs.two_layers(d=192, i=192, length=4)
    events = events_of(program, machine, split=False)
    made = schedule(events, machine)
    size = [streamed_bytes(kind, events) for kind in events.graph.kinds]
    totals = [sum(size[events.graph.tasks[t].kind] for t in q) for q in made.queues]
    assert abs(totals[0] - totals[1]) <= max(size)


def test_ties_rotate_over_the_sms():
    """Both SMs have 2 units after three tasks, so the fourth goes to SM 3 % 2."""
    program = programs.mlp(d=256, i=256)
    kinds = decompose(program, simulated(2), DecomposeOptions(split=False)).kinds
    tasks = (Task(0, 0, (0,)), Task(1, 0, (0,)), Task(1, 0, (1,)), Task(1, 1, (0,)))
    graph = graph_of([[], [], [], [((0,), "resident")]])
    graph = replace(
        graph, program=program, buffers=program.buffers, kinds=kinds, tasks=tasks
    )
    made = schedule(normalize(fuse_events(graph)), simulated(2))
    assert made.queues == ((0,), (1, 2, 3))


def test_tasks_that_stream_nothing_are_spread():
    machine = simulated(4)
    events = events_of(programs.mlp(), machine, splits=(("down", 2), ("gate_up", 1)))
    graph = events.graph
    modes = [graph.kinds[task.kind].mode for task in graph.tasks]
    combines = {t for t, mode in enumerate(modes) if mode == "combine"}
    made = schedule(events, machine)
    assert len(combines) == 4
    assert [len(combines & set(q)) for q in made.queues] == [1, 1, 1, 1]


def test_calls_of_one_stage_are_balanced_together():
    """k and v heads stream as much as q heads: the stage is balanced as a whole."""
    machine = simulated(4)
    program = programs.llama(
        b=2, layers=1, d=256, i=512, heads=4, kv=2, hd=64, vocab=512, s=256
    )
    events = events_of(program, machine, split=False)
    depths = call_depths(events)
    made = schedule(events, machine)
    calls = [events.graph.kinds[t.kind].call for t in events.graph.tasks]
    heads = {t for t, call in enumerate(calls) if call in ("q", "k", "v")}
    assert {depths[t] for t in heads} == {1}  # after the embedding and the angles
    assert [len(heads & set(q)) for q in made.queues] == [2, 2, 2, 2]


def test_depth_is_the_longest_path_of_calls():
    events = events_of(programs.two_layers(), simulated(2), split=False)
    calls = [events.graph.kinds[t.kind].call for t in events.graph.tasks]
    by_call: dict[str, set[int]] = {}
    for call, depth in zip(calls, call_depths(events), strict=True):
        by_call.setdefault(call, set()).add(depth)
    assert by_call == {"enter": {0}, "gate_up": {1, 3}, "down": {2, 4}, "leave": {5}}


def test_a_run_time_extent_counts_with_its_share():
    events = events_of(programs.attention(s=1024, d=64), simulated(2), split=False)
    (kind,) = events.graph.kinds
    assert streamed_bytes(kind, events) == 2 * 1024 * 64 * 2
    assert streamed_bytes(kind, events, 0.25) == 1024 * 64
    assert ScheduleOptions().run_time_share == 0.5
