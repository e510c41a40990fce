"""A mutant, and how to make one from a base."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from mkdsl.lang.program import Program
from mkdsl.lower.ir import KernelPlan, Wait
from tests.mutation.bases import Base


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
    return replace_wait(base, task, index, edit(events.waits[task][index], events))


def replace_wait(
    base: Base, task: int, index: int, by: Iterable[Wait]
) -> Mutant | None:
    """The plan with one wait of a task replaced by others."""
    waits = base.plan.schedule.events.waits
    old, new = waits[task], tuple(by)
    if new == (old[index],):
        return None
    mine = (*old[:index], *new, *old[index + 1 :])
    return with_events(base.plan, waits=(*waits[:task], mine, *waits[task + 1 :]))
