"""Faults of what tasks access, and of the needs that come of it."""

import itertools
from dataclasses import replace
from random import Random

from mkdsl.lang.expr import Expr
from mkdsl.lang.program import Access, Call, Program, Scan
from mkdsl.lower.decompose import decompose
from mkdsl.lower.ir import DepSet, TaskGraph
from tests.mutation.bases import Base, plan_of
from tests.mutation.edits import Mutant, with_events


def shifted(access: Access, random: Random, ranges: dict[str, int]) -> Access | None:
    """The access with one start or one extent moved, the start within the array."""
    tries = (_shifted_once(access, random, ranges) for _ in range(30))
    return next((made for made in tries if made is not None), None)


def _shifted_once(
    access: Access, random: Random, ranges: dict[str, int]
) -> Access | None:
    d = random.randrange(len(access.axes))
    axis, n = access.axes[d], access.view[d]
    by = random.choice((1, -1, axis.size, -axis.size, 64, -64))
    if axis.extent is not None and random.random() < 0.7:
        axis = replace(axis, extent=axis.extent + by)
    elif not (axis.start + by).reads and not _within(axis.start + by, n, ranges):
        return None
    else:
        axis = replace(axis, start=axis.start + by)
    axes = (*access.axes[:d], axis, *access.axes[d + 1 :])
    return replace(access, axes=axes)


def _within(start: Expr, n: int, ranges: dict[str, int]) -> bool:
    points = itertools.product(*(range(r) for r in ranges.values()))
    values = [start.evaluate(dict(zip(ranges, p, strict=True))) for p in points]
    return 0 <= min(values) and max(values) < n


def _ranges(graph: TaskGraph, grid: tuple[int, ...], parts: int) -> dict[str, int]:
    layers = 1 + max(t.layer for t in graph.tasks)
    sizes = {f"g{i}": n for i, n in enumerate(grid)}
    return sizes | {"layer": layers, "part": parts}


def shift_region(base: Base, random: Random) -> Mutant | None:
    """A kind reads or writes elsewhere than its call says."""
    graph = base.plan.schedule.events.graph
    n = random.randrange(len(graph.kinds))
    kind = graph.kinds[n]
    accesses = [*kind.ins, *kind.outs]
    i = random.randrange(len(accesses))
    if not accesses[i].axes:
        return None
    moved = shifted(accesses[i], random, _ranges(graph, kind.grid, kind.parts))
    if moved is None:
        return None
    accesses[i] = moved
    ins = len(kind.ins)
    kind = replace(kind, ins=tuple(accesses[:ins]), outs=tuple(accesses[ins:]))
    kinds = (*graph.kinds[:n], kind, *graph.kinds[n + 1 :])
    return with_events(base.plan, graph=replace(graph, kinds=kinds))


def keep_needs_of_other_regions(base: Base, random: Random) -> Mutant | None:
    """The program and its kinds access other regions; the needs are those of before."""
    graph = base.plan.schedule.events.graph
    calls = list(graph.program.calls())
    call = random.choice(calls)
    accesses = [*call.ins, *call.outs]
    written = {a.buffer for c in calls for a in c.outs}
    # Only these can make a dependence; a weight that moved is no fault at all.
    places = [i for i, a in enumerate(accesses) if a.buffer in written and a.axes]
    if not places:
        return None
    i = random.choice(places)
    moved = shifted(accesses[i], random, _ranges(graph, call.grid, 1))
    if moved is None:
        return None
    accesses[i] = moved
    ins = len(call.ins)
    other = replace(call, ins=tuple(accesses[:ins]), outs=tuple(accesses[ins:]))
    program = _with_call(graph.program, call, other)
    made = decompose(program, base.machine, base.options)
    made = replace(made, dep_sets=graph.dep_sets, needs=graph.needs)
    return replace(with_events(base.plan, graph=made), program=program)


def _with_call(program: Program, call: Call, other: Call) -> Program:
    def change(calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(other if c is call else c for c in calls)

    steps = tuple(
        replace(s, variants=tuple(map(change, s.variants)))
        if isinstance(s, Scan)
        else change((s,))[0]
        for s in program.steps
    )
    return replace(program, steps=steps)


def overlook_a_dependence(base: Base, random: Random) -> Mutant | None:
    """A need, or a member of a set, was never found: all passes after that ran."""
    graph = base.plan.schedule.events.graph
    if not any(graph.needs):
        return None
    task = random.choice([t for t, needs in enumerate(graph.needs) if needs])
    needs = list(graph.needs)
    mine = list(needs[task])
    need = mine.pop(random.randrange(len(mine)))
    members = graph.dep_sets[need.deps].members
    sets = graph.dep_sets
    if len(members) > 1 and random.random() < 0.5:
        lost = random.choice(members)
        kept = tuple(m for m in members if m != lost)
        sets = (*sets, DepSet(kept))
        mine.append(replace(need, deps=len(sets) - 1))
    needs[task] = tuple(mine)
    less = replace(graph, dep_sets=sets, needs=tuple(needs))
    plan = plan_of(less, base.machine, base.waits)
    return None if plan == base.plan else Mutant(plan)
