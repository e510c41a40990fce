"""Passes and verifiers on random programs, against masks and all pairs of tasks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import ExprLike, expr
from mkdsl.lang.program import Program
from mkdsl.lang.region import AccessRegions, Region, overlap
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.elide_waits import elide_waits
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import FETCH_GATES, GATES, EventGraph, Schedule, TaskGraph
from mkdsl.lower.machine import simulated
from mkdsl.lower.meetings import find_meetings
from mkdsl.lower.normalize import normalize
from mkdsl.lower.pipeline import compile_program
from mkdsl.lower.region_index import RegionIndex
from mkdsl.lower.touches import common_shapes
from mkdsl.lower.verify_accesses import verify_accesses
from mkdsl.lower.verify_graph import verify_program, verify_tasks
from mkdsl.lower.verify_kinds import verify_kinds
from mkdsl.lower.verify_schedule import verify_schedule
from tests.lower.all_pairs import (
    closure,
    conflicts,
    elements,
    environment_of,
    illegal,
    mask_of,
    meet,
    unwritten,
)
from tests.lower.graphs import (
    MACHINE,
    all_waits,
    by_needs,
    by_waits,
    queues,
    without_wait,
)
from tests.lower.random_programs import INSIDE, LENGTHS, programs
from tests.strategies import examples

pytestmark = pytest.mark.slow
EITHER = st.booleans().flatmap(programs)


def graph_of(program: Program) -> TaskGraph:
    """The tasks of a program, none of them split."""
    verify_program(program)
    graph = decompose(program, MACHINE, DecomposeOptions(split=False))
    verify_tasks(graph)
    verify_kinds(graph)
    return graph


def legal(program: Program) -> TaskGraph:
    """The graph with dependences of a program that is not refused."""
    graph = graph_of(program)
    assume(not all(illegal(graph, elements(graph, n)) for n in LENGTHS))
    found, _ = tried(find_dependences, graph)
    assume(found is not None)
    return found


def tried(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """The result of a pass or a check, or None and why it refuses."""
    try:
        return function(*args), ""
    except VerifyError as error:
        return None, str(error)


def value(bound: ExprLike, n: tuple[int, ...]) -> int:
    """A bound where the scalars are n."""
    return expr(bound).evaluate({}, lambda buffer, index: n[index[0]])


def mask(r: Region, n: tuple[int, ...]) -> np.ndarray:
    """The elements of a region."""
    out = np.zeros(r.shape, bool)
    out[
        tuple(
            slice(min(max(0, lo), size), min(max(0, lo, hi), size))
            for size, lo, hi in (
                (s, value(i.lo, n), value(i.hi, n))
                for s, i in zip(r.shape, r.box, strict=True)
            )
        )
    ] = True
    return out.ravel()


# ----------------------------------------------------------------------- regions


def accesses(graph: TaskGraph) -> Iterator[tuple[Region, list[np.ndarray]]]:
    """The region of every access of every task, and its masks at all LENGTHS."""
    shapes = common_shapes(graph)
    buffers = {b.name: b for b in graph.buffers}
    for t, one in enumerate(graph.tasks):
        env = environment_of(graph, t)
        for a in (*graph.kinds[one.kind].ins, *graph.kinds[one.kind].outs):
            r = AccessRegions(a, buffers[a.buffer], shapes[a.buffer]).at(env)
            yield r, [mask_of(a, env, n) for n in LENGTHS]


@examples(150)
@given(EITHER)
def test_regions_cover_what_is_touched_and_are_it_where_exact(program: Program) -> None:
    for r, masks in accesses(graph_of(program)):
        for n, true in zip(LENGTHS, masks, strict=True):
            box = mask(r, n)
            assert not (true & ~box).any()
            # A bounded slice is as long as its block at most.
            assert not r.is_constant or not r.exact or (box == true).all()


@examples(100)
@given(EITHER)
def test_meetings_of_regions_agree_with_masks(program: Program) -> None:
    by_buffer: dict[str, list[tuple[Region, list[np.ndarray]]]] = {}
    for r, masks in accesses(graph_of(program)):
        by_buffer.setdefault(r.buffer, []).append((r, masks))
    for every in by_buffer.values():
        regions = [r for r, _ in every]
        index = RegionIndex(regions)
        for r, masks in every[:5]:
            found = dict(index.meeting(r))
            for i, (other, its) in enumerate(every):
                how = overlap(r, other)
                meets = [bool((a & b).any()) for a, b in zip(masks, its, strict=True)]
                assert how != "disjoint" or not any(meets)
                assert how != "overlap" or all(meets[: len(INSIDE)])
                assert (i in found) == (how != "disjoint")
                assert i not in found or found[i] == (how == "overlap")


# ------------------------------------------------------------------- dependences


def needed(graph: TaskGraph) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(earlier, later) of every member of every need, and of those that are exact."""
    pairs = [
        (m, t, graph.dep_sets[need.deps].exact)
        for t, needs in enumerate(graph.needs)
        for need in needs
        for m in graph.dep_sets[need.deps].members
    ]
    return [(m, t) for m, t, _ in pairs], [(m, t) for m, t, exact in pairs if exact]


@examples(450)
@given(programs())
def test_dependences_are_those_of_all_pairs(program: Program) -> None:
    graph = graph_of(program)
    touched = elements(graph, INSIDE[0])
    if illegal(graph, touched):
        with pytest.raises(
            VerifyError, match=r"both write|overwrite|same call|no earlier"
        ):
            verify_accesses_of(find_dependences(graph))
        return
    found, refused = tried(find_dependences, graph)
    if found is None:
        # Views without a common refinement: it may, and says so.
        assert "may overwrite" in refused or unwritten(graph, touched)
        return
    pairs, exact = needed(found)
    count = len(graph.tasks)
    true = conflicts(graph, touched)
    assert set(exact) <= set(true)
    order, wanted = closure(count, pairs), closure(count, true)
    if all(d.exact for d in found.dep_sets):
        assert order == wanted
    assert all(not w & ~o for o, w in zip(order, wanted, strict=True))


def verify_accesses_of(graph: TaskGraph) -> None:
    """The last proof of the schedule with one SM."""
    events = normalize(fuse_events(graph))
    verify_accesses(Schedule(events, (tuple(range(len(graph.tasks))),)))


@examples(300)
@given(programs(run_time=True))
def test_dependences_at_run_time_hold_at_every_length(program: Program) -> None:
    graph = graph_of(program)
    count = len(graph.tasks)
    true = {n: elements(graph, n) for n in LENGTHS}
    found, refused = tried(find_dependences, graph)
    if found is None:
        # What is refused is illegal at some length, or said to be unproved.
        bad = any(
            illegal(graph, touched) or unwritten(graph, touched)
            for touched in true.values()
        )
        assert bad or "may overwrite" in refused
        return
    pairs, exact = needed(found)
    order = closure(count, pairs)
    for n, touched in true.items():
        must = conflicts(graph, touched)
        wanted = closure(count, must)
        assert all(not w & ~o for o, w in zip(order, wanted, strict=True))
        if n in INSIDE:
            assert set(exact) <= set(must)
        if n in INSIDE and all(d.exact for d in found.dep_sets):
            assert order == wanted
    assert find_dependences(graph) == found


# ------------------------------------------------------------------------ events


def events_of(graph: TaskGraph) -> EventGraph:
    """The normalized events."""
    return normalize(fuse_events(graph))


@examples(250)
@given(EITHER)
def test_events_order_what_the_needs_order_and_nothing_else(program: Program) -> None:
    graph = legal(program)
    wanted = by_needs(graph)
    assert by_waits(fuse_events(graph)) == wanted
    events = events_of(graph)
    assert by_waits(events) == wanted
    for task, index in all_waits(events):
        assert by_waits(without_wait(events, task, index)) != wanted


@examples(250)
@given(st.data(), EITHER)
def test_elided_waits_order_the_same_and_none_can_go(
    data: st.DataObject, program: Program
) -> None:
    graph = legal(program)
    events = events_of(graph)
    order = data.draw(queues(len(graph.tasks)))
    wanted = by_waits(events, order)
    elided = elide_waits(Schedule(events, order)).events
    assert by_waits(elided, order) == wanted
    # No wait stays that the same loader of the same SM has made, or knows of by those
    # that it has made. (That storers keep order, too, is not made use of.)
    loaders = by_waits(elided, order, GATES)
    for task, index in all_waits(elided):
        assert by_waits(without_wait(elided, task, index), order, GATES) != loaders


# ---------------------------------------------------------------------- verifier


@examples(250)
@given(EITHER)
def test_every_meeting_is_found_and_constant_ones_alone(program: Program) -> None:
    graph = graph_of(program)
    found: dict[tuple[int, str, str], set[int]] = {}
    for buffer in find_meetings(graph):
        for task, region, use in buffer.uses:
            key = task, buffer.buffer.name, use
            found.setdefault(key, set()).update(buffer.writers.of(region))
    run_time = is_run_time(graph)
    for n in LENGTHS if run_time else LENGTHS[:1]:
        touched = elements(graph, n)
        for t, mine in enumerate(touched):
            uses = {**mine.reads, "store": mine.writes}
            for use, some in uses.items():
                for name, bits in some.items():
                    at = {name: bits}
                    true = {w for w, o in enumerate(touched) if meet(o.writes, at)}
                    assert true - {t} <= found.get((t, name, use), set())
                    if not run_time:
                        assert found.get((t, name, use), {t}) - {t} == true - {t}


def is_run_time(graph: TaskGraph) -> bool:
    """Whether some access depends on a run-time scalar."""
    axes = (x for k in graph.kinds for a in (*k.ins, *k.outs) for x in a.axes)
    bounds = (e for x in axes for e in (x.start, x.extent) if e is not None)
    return any(e.reads for e in bounds)


def ordered(events: EventGraph, order: tuple[tuple[int, ...], ...], n) -> bool:
    """Whether all accesses that meet are ordered, found one pair after the other."""
    graph = events.graph
    touched = elements(graph, n)
    before = by_waits(events, order)
    for i, j in conflicts(graph, touched):
        for gate in GATES:
            reads = meet(touched[i].writes, touched[j].reads[gate])
            if reads and i not in before[j, gate]:
                return False
        stores = meet(touched[i].writes, touched[j].writes) or meet(
            touched[i].all_reads, touched[j].writes
        )
        if stores and i not in before[j, FETCH_GATES[-1]] | before[j, "stream"]:
            return False
    return True


@examples(400)
@given(st.data(), EITHER)
def test_the_last_proof_agrees_with_all_pairs(
    data: st.DataObject, program: Program
) -> None:
    """Of schedules that lack needs, waits, or have a wait at the other gate."""
    graph = legal(program)
    some = [t for t, needs in enumerate(graph.needs) if needs]
    assume(some)
    fault = data.draw(st.sampled_from(("need", "wait", "gate", "none")))
    if fault == "need":
        task = data.draw(st.sampled_from(some))
        gone = data.draw(st.integers(0, len(graph.needs[task]) - 1))
        needs = list(graph.needs)
        needs[task] = needs[task][:gone] + needs[task][gone + 1 :]
        graph = replace(graph, needs=tuple(needs))
    events = events_of(graph)
    order = data.draw(queues(len(graph.tasks)))
    if data.draw(st.booleans()):
        events = elide_waits(Schedule(events, order)).events
    waits = all_waits(events)
    if waits and fault in ("wait", "gate"):
        task, index = data.draw(st.sampled_from(waits))
        wait = events.waits[task][index]
        events = without_wait(events, task, index)
        if fault == "gate":
            other = "stream" if wait.gate == "resident" else "resident"
            moved = (*events.waits[task], replace(wait, gate=other))
            every = (*events.waits[:task], moved, *events.waits[task + 1 :])
            events = replace(events, waits=every)
    schedule = Schedule(events, order)
    _, refused = tried(verify_accesses, schedule)
    if refused:
        assert "race" in refused
        assert is_run_time(graph) or not ordered(events, order, INSIDE[0])
        return
    assert all(ordered(events, order, n) for n in LENGTHS)


@examples(150)
@given(EITHER, st.integers(1, 4))
def test_what_the_compiler_makes_is_proved(program: Program, sms: int) -> None:
    legal(program)
    machine = simulated(sms)
    plan = compile_program(program, machine)
    verify_schedule(plan.schedule, machine)
