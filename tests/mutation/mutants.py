"""Random small faults of a plan, one function for each kind of fault.

A mutation is a function of a base and a random generator. It gives a plan that differs
from the base, or None where the base has no place for it. What it changes is what a
pass could get wrong, or what could be wrong with the words that a kernel reads.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from mkdsl.lang.expr import Expr
from mkdsl.lang.program import Access, Call, Program, Scan
from mkdsl.lower.decompose import decompose
from mkdsl.lower.ir import (
    FETCH_GATES,
    DepSet,
    EventGraph,
    KernelPlan,
    Schedule,
    TaskGraph,
    Wait,
)
from tests.mutation.bases import Base, plan_of


@dataclass(frozen=True, slots=True)
class Mutant:
    """A plan with one fault. `program` is set if it is for another program."""

    plan: KernelPlan
    program: Program | None = None


Mutation = Callable[[Base, Random], Mutant | None]


def with_events(plan: KernelPlan, **changes: Any) -> Mutant:
    """The plan with other waits, signals, events or graph."""
    events = replace(plan.schedule.events, **changes)
    return Mutant(replace(plan, schedule=replace(plan.schedule, events=events)))


def with_wait(base: Base, random: Random, edit: Callable[..., Any]) -> Mutant | None:
    """The plan with one wait replaced by those that `edit` makes of it."""
    events = base.plan.schedule.events
    places = [(t, i) for t, of in enumerate(events.waits) for i in range(len(of))]
    if not places:
        return None
    task, index = random.choice(places)
    waits = list(events.waits)
    old = waits[task]
    new: tuple[Wait, ...] = tuple(edit(old[index], events))
    if new == (old[index],):
        return None
    waits[task] = (*old[:index], *new, *old[index + 1 :])
    return with_events(base.plan, waits=tuple(waits))


# -------------------------------------------------------------------------- waits


def drop_wait(base: Base, random: Random) -> Mutant | None:
    """A wait is left out."""
    return with_wait(base, random, lambda wait, events: ())


def change_threshold(base: Base, random: Random) -> Mutant | None:
    """A wait asks for more or fewer signals."""

    def edit(wait: Wait, events: EventGraph) -> list[Wait]:
        count = len(events.events[wait.event].members)
        return [replace(wait, threshold=random.randint(0, count + 1))]

    return with_wait(base, random, edit)


def move_wait_to_other_gate(base: Base, random: Random) -> Mutant | None:
    """The other loader makes a wait, or it holds back another block."""
    most = max(k.blocks for k in base.plan.schedule.events.graph.kinds)

    def edit(wait: Wait, events: EventGraph) -> list[Wait]:
        gates = [g for g in (*FETCH_GATES[:most], "stream") if g != wait.gate]
        return [replace(wait, gate=random.choice(gates))]

    return with_wait(base, random, edit)


def wait_for_another_event(base: Base, random: Random) -> Mutant | None:
    """A wait is for another event, at the full threshold of that one."""

    def edit(wait: Wait, events: EventGraph) -> list[Wait]:
        event = random.randrange(len(events.events))
        return [replace(wait, event=event, threshold=events.events[event].threshold)]

    return with_wait(base, random, edit)


def move_wait_to_another_task(base: Base, random: Random) -> Mutant | None:
    """Another task makes a wait."""
    events = base.plan.schedule.events
    places = [(t, i) for t, of in enumerate(events.waits) for i in range(len(of))]
    if not places:
        return None
    task, index = random.choice(places)
    other = random.randrange(len(events.waits))
    waits = list(events.waits)
    wait = waits[task][index]
    if other == task or wait in waits[other]:
        return None
    waits[task] = waits[task][:index] + waits[task][index + 1 :]
    waits[other] = (*waits[other], wait)
    return with_events(base.plan, waits=tuple(waits))


# ------------------------------------------------------------------------- queues


def with_queues(base: Base, queues: list[list[int]]) -> Mutant | None:
    made = tuple(map(tuple, queues))
    if made == base.plan.schedule.queues:
        return None
    return Mutant(
        replace(base.plan, schedule=Schedule(base.plan.schedule.events, made))
    )


def swap_in_a_queue(base: Base, random: Random) -> Mutant | None:
    """Two tasks of one queue change places, neighbours half of the time."""
    queues = [list(q) for q in base.plan.schedule.queues]
    long = [q for q in queues if len(q) > 1]
    if not long:
        return None
    queue = random.choice(long)
    i = random.randrange(len(queue) - 1)
    near = random.random() < 0.5
    j = i + 1 if near else random.randrange(len(queue))
    queue[i], queue[j] = queue[j], queue[i]
    return with_queues(base, queues)


def swap_between_queues(base: Base, random: Random) -> Mutant | None:
    """Two tasks of two queues change places."""
    queues = [list(q) for q in base.plan.schedule.queues if q]
    if len(queues) < 2:
        return None
    one, other = random.sample(range(len(queues)), 2)
    i, j = (random.randrange(len(queues[q])) for q in (one, other))
    queues[one][i], queues[other][j] = queues[other][j], queues[one][i]
    return with_queues(base, queues)


def move_to_another_queue(base: Base, random: Random) -> Mutant | None:
    """A task moves to another queue, any place in it."""
    queues = [list(q) for q in base.plan.schedule.queues]
    if len(queues) < 2:
        return None
    one, other = random.sample(range(len(queues)), 2)
    if not queues[one]:
        return None
    task = queues[one].pop(random.randrange(len(queues[one])))
    # Half of the time where it is in program order.
    place = sum(t < task for t in queues[other])
    if random.random() < 0.5:
        place = random.randint(0, len(queues[other]))
    queues[other].insert(place, task)
    return with_queues(base, queues)


# ------------------------------------------------------------------------ signals


def drop_signal(base: Base, random: Random) -> Mutant | None:
    """A task does not signal; half of the time nobody counts on it any more."""
    events = base.plan.schedule.events
    tasks = [t for t, e in enumerate(events.signals) if e >= 0]
    if not tasks:
        return None
    task = random.choice(tasks)
    number = events.signals[task]
    signals = (*events.signals[:task], -1, *events.signals[task + 1 :])
    members = tuple(m for m in events.events[number].members if m != task)
    if random.random() < 0.5 or not members:
        return with_events(base.plan, signals=signals)
    made = list(events.events)
    made[number] = replace(made[number], members=members)
    waits = tuple(
        tuple(
            replace(w, threshold=len(members)) if w.event == number else w for w in of
        )
        for of in events.waits
    )
    return with_events(base.plan, signals=signals, events=tuple(made), waits=waits)


def exchange_signals(base: Base, random: Random) -> Mutant | None:
    """Two tasks signal each other's event (or none)."""
    events = base.plan.schedule.events
    if len(events.signals) < 2:
        return None
    one, other = random.sample(range(len(events.signals)), 2)
    signals = list(events.signals)
    signals[one], signals[other] = signals[other], signals[one]
    if tuple(signals) == events.signals:
        return None
    made = tuple(
        replace(e, members=tuple(t for t, s in enumerate(signals) if s == n))
        for n, e in enumerate(events.events)
    )
    return with_events(base.plan, signals=tuple(signals), events=made)


# ------------------------------------------------------------------- plan numbers


def with_numbers(base: Base, **numbers: int) -> Mutant | None:
    plan = replace(base.plan, **numbers)
    return None if plan == base.plan else Mutant(plan)


def shrink_ring(base: Base, random: Random) -> Mutant | None:
    """Fewer pages in the ring; half of the time also fewer loads in flight."""
    ring = random.randint(0, base.plan.ring - 1)
    flight = random.randint(0, ring) if random.random() < 0.5 else base.plan.in_flight
    return with_numbers(base, ring=ring, in_flight=flight)


def reuse_slots_early(base: Base, random: Random) -> Mutant | None:
    """Other numbers of slots or loads in flight than there is room for."""
    plan = base.plan
    which = random.choice(("arena_slots", "staging_slots", "in_flight"))
    number = random.randint(0, 3)
    if which == "in_flight":
        return with_numbers(base, in_flight=random.randint(0, plan.ring + 2))
    size = plan.arena_bytes if which == "arena_slots" else plan.staging_bytes
    more = (number - getattr(plan, which)) * size if random.random() < 0.5 else 0
    return with_numbers(base, **{which: number, "smem_bytes": plan.smem_bytes + more})


def shrink_slots(base: Base, random: Random) -> Mutant | None:
    """A page, a slot or what a kind needs of it is smaller than it must be."""
    plan = base.plan
    if random.random() < 0.5:
        names = ("page_bytes", "arena_bytes", "scratch_bytes", "staging_bytes")
        name = random.choice((*names, "smem_bytes", "instruction_bytes", "columns"))
        return with_numbers(base, **{name: random.randint(0, getattr(plan, name))})
    n = random.randrange(len(plan.kinds))
    kind = plan.kinds[n]
    if kind.pages and random.random() < 0.5:
        rows, features = random.choice(kind.pages)
        rows, features = random.choice(
            ((rows // 2, features), (rows, features // 2), (rows, features * 2))
        )
        kind = replace(kind, pages=tuple((rows, features) for _ in kind.pages))
    else:
        name = random.choice(("arena_bytes", "scratch_bytes", "staging_bytes"))
        kind = replace(kind, **{name: random.randint(0, getattr(kind, name))})
    if kind == plan.kinds[n]:
        return None
    return Mutant(replace(plan, kinds=(*plan.kinds[:n], kind, *plan.kinds[n + 1 :])))


# ------------------------------------------------------------------------ regions


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


MUTATIONS: dict[str, Mutation] = {
    f.__name__.replace("_", " "): f
    for f in (
        drop_wait,
        change_threshold,
        move_wait_to_other_gate,
        move_wait_to_another_task,
        wait_for_another_event,
        swap_in_a_queue,
        swap_between_queues,
        move_to_another_queue,
        drop_signal,
        exchange_signals,
        shrink_ring,
        reuse_slots_early,
        shrink_slots,
        shift_region,
        keep_needs_of_other_regions,
        overlook_a_dependence,
    )
}
