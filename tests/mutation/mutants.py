"""Random small faults of a plan, one function for each kind of fault.

A mutation is a function of a base and a random generator. It gives a plan that differs
from the base, or None where the base has no place for it. What it changes is what a
pass could get wrong, or what could be wrong with the words that a kernel reads.
"""

from dataclasses import replace
from random import Random
from typing import Any

from mkdsl.lower.ir import FETCH_GATES, EventGraph, Schedule, Wait
from tests.mutation.bases import Base
from tests.mutation.edits import Mutant, Mutation, replace_wait, with_events, with_wait
from tests.mutation.regions import (
    keep_needs_of_other_regions,
    overlook_a_dependence,
    shift_region,
)

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


# ------------------------------------------------------------------------- blocks


def with_block_wait(base: Base, random: Random, gates: set[str], edit: Any) -> Any:
    """The plan with one wait of a blocked kind replaced, one of those at some gates."""
    events = base.plan.schedule.events
    kinds, tasks = events.graph.kinds, events.graph.tasks
    places = [
        (t, i)
        for t, of in enumerate(events.waits)
        for i, wait in enumerate(of)
        if kinds[tasks[t].kind].blocks > 1 and wait.gate in gates
    ]
    if not places:
        return None
    task, index = random.choice(places)
    blocks = kinds[tasks[task].kind].blocks
    return replace_wait(base, task, index, edit(events.waits[task][index], blocks))


def drop_wait_of_a_block(base: Base, random: Random) -> Mutant | None:
    """A block of an operand is loaded without its wait."""
    return with_block_wait(base, random, set(FETCH_GATES[1:]), lambda wait, n: ())


def move_wait_of_a_block(base: Base, random: Random) -> Mutant | None:
    """A wait is made before an earlier or a later block than the one that needs it."""

    def edit(wait: Wait, blocks: int) -> tuple[Wait, ...]:
        others = [g for g in FETCH_GATES[:blocks] if g != wait.gate]
        return (replace(wait, gate=random.choice(others)),)

    return with_block_wait(base, random, set(FETCH_GATES), edit)


def exchange_waits_of_blocks(base: Base, random: Random) -> Mutant | None:
    """Two blocks of a task wait each for what the other one needs."""
    events = base.plan.schedule.events
    places = [
        (t, i, j)
        for t, of in enumerate(events.waits)
        for i, one in enumerate(of)
        for j, other in enumerate(of[:i])
        if "stream" not in (one.gate, other.gate)
        and one.gate != other.gate
        and one.event != other.event
    ]
    if not places:
        return None
    task, i, j = random.choice(places)
    of = list(events.waits[task])
    gates = of[i].gate, of[j].gate
    of[i], of[j] = replace(of[i], gate=gates[1]), replace(of[j], gate=gates[0])
    waits = (*events.waits[:task], tuple(of), *events.waits[task + 1 :])
    return with_events(base.plan, waits=waits)


def shift_bounds_of_blocks(base: Base, random: Random) -> Mutant | None:
    """A kind loads its operand in another number of blocks than its waits are for."""
    graph = base.plan.schedule.events.graph
    blocked = [n for n, k in enumerate(graph.kinds) if k.blocks > 1]
    if not blocked:
        return None
    n = random.choice(blocked)
    kind = graph.kinds[n]
    others = [b for b in range(1, len(FETCH_GATES) + 1) if b != kind.blocks]
    kind = replace(kind, blocks=random.choice(others))
    kinds = (*graph.kinds[:n], kind, *graph.kinds[n + 1 :])
    return with_events(base.plan, graph=replace(graph, kinds=kinds))


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


MUTATIONS: dict[str, Mutation] = {
    f.__name__.replace("_", " "): f
    for f in (
        drop_wait,
        change_threshold,
        move_wait_to_other_gate,
        move_wait_to_another_task,
        drop_wait_of_a_block,
        move_wait_of_a_block,
        exchange_waits_of_blocks,
        shift_bounds_of_blocks,
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
