"""The compiler on one screen: a Program goes in, a KernelPlan comes out.

What it does: runs the passes in order and verifies every stage.
Needs: a traced Program.
Guarantees: a returned plan has been proved free of deadlocks and races (verify.py).
Why it is correct: verifiers share no code with passes. Every stage is checked against
the needs that `dependences` found, which says the pass that is at fault. The last one
gets a Proof (proof.py), from the accesses of its tasks and those of the program: what
`dependences` overlooks is found there.
Cost: linear or nearly so in tasks and waits; the step of Llama-3.2-1B at batch 8 takes
3.7 s on one core of a slow machine (2026-11-30), 0.6 s of it the last proof.
Source: the list of named rewrites of tinygrad, the dump callback of xDSL.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mkdsl.lang.program import Program
from mkdsl.lower.coarsen import coarsen
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.elide_waits import elide_waits
from mkdsl.lower.estimate import estimate
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import EventGraph, KernelPlan, Schedule, TaskGraph
from mkdsl.lower.machine import Machine
from mkdsl.lower.normalize import normalize
from mkdsl.lower.plan_pages import PageOptions, plan_pages
from mkdsl.lower.proof import Proof
from mkdsl.lower.schedule import ScheduleOptions, schedule
from mkdsl.lower.text import print_program
from mkdsl.lower.text_schedule import (
    print_events,
    print_plan,
    print_schedule,
    print_tasks,
)
from mkdsl.lower.verify import verify_events
from mkdsl.lower.verify_graph import verify_needs, verify_program, verify_tasks
from mkdsl.lower.verify_kinds import verify_kinds
from mkdsl.lower.verify_schedule import verify_schedule
from mkdsl.lower.widen_waits import widen_waits


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all passes.

    Attributes:
        coarse: wait for whole calls, see coarsen.py.
    """

    decompose: DecomposeOptions = field(default_factory=DecomposeOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    pages: PageOptions = field(default_factory=PageOptions)
    coarse: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One step: the stage that it makes, how, and how that is checked and printed."""

    stage: str
    run: Callable[[Any, Machine, Options], Any]
    verify: Callable[[Any, Machine], Proof | None]
    text: Callable[[Any], str]


def _dependences(graph: TaskGraph, options: Options) -> TaskGraph:
    found = find_dependences(graph)
    return coarsen(found) if options.coarse else found


def _verify_graph(graph: TaskGraph) -> None:
    verify_tasks(graph)
    verify_kinds(graph)


# fmt: off
PASSES = (
    Pass("program", lambda p, m, o: p,
         lambda p, m: verify_program(p), print_program),
    Pass("tasks", lambda p, m, o: decompose(p, m, o.decompose),
         lambda g, m: _verify_graph(g), print_tasks),
    Pass("dependences", lambda g, m, o: _dependences(g, o),
         lambda g, m: verify_needs(g), print_tasks),
    Pass("events", lambda g, m, o: fuse_events(g),
         lambda e, m: verify_events(e), print_events),
    Pass("widened", lambda e, m, o: widen_waits(e),
         lambda e, m: verify_events(e), print_events),
    Pass("normalized", lambda e, m, o: normalize(e),
         lambda e, m: verify_events(e), print_events),
    Pass("schedule", lambda e, m, o: schedule(e, m, o.schedule),
         lambda s, m: verify_schedule(s, m), print_schedule),
    Pass("elided", lambda s, m, o: elide_waits(s),
         lambda s, m: verify_schedule(s, m, "elided"), print_schedule),
    Pass("pages", lambda s, m, o: plan_pages(s, m, o.pages),
         lambda p, m: Proof(p, m), print_plan),
)
# fmt: on
STAGES = tuple(p.stage for p in PASSES)


@dataclass(frozen=True, slots=True)
class Stage:
    """What a pass made: `value` is a Program, TaskGraph, .., KernelPlan.

    Attributes:
        proof: of the last stage.
    """

    name: str
    value: Program | TaskGraph | EventGraph | Schedule | KernelPlan
    print_value: Callable[[Any], str]
    machine: Machine
    proof: Proof | None = None

    def as_text(self) -> str:
        """The canonical text of the stage."""
        return self.print_value(self.value)

    def counts(self) -> dict[str, int]:
        """Its size: tasks, needs, events, waits, longest queue, bytes; of a schedule
        also the critical path and the lower bound of a step, in us (estimate.py)."""
        return dict(_counts(self.value, self.machine))

    def __str__(self) -> str:
        counts = (f"{number} {what}" for what, number in self.counts().items())
        return f"{self.name}: {', '.join(counts)}"


def run_passes(
    program: Program, machine: Machine, options: Options | None = None
) -> Iterator[Stage]:
    """Every stage of a program in order, each verified before it is given.

    Raises:
        PlanError: the program does not fit the machine.
        VerifyError: a stage is not proved.
    """
    value: Any = program
    for step in PASSES:
        with _no_collection():
            value = step.run(value, machine, options or Options())
            proof = step.verify(value, machine)
        yield Stage(step.stage, value, step.text, machine, proof)


@contextmanager
def _no_collection() -> Generator[None]:
    """No search for cycles in what passes make, of which there are none: millions of
    small tuples; it took a fifth of the time (8.5 -> 6.7 s for 40,473 tasks)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def prove_program(
    program: Program,
    machine: Machine,
    options: Options | None = None,
    dump: Callable[[Stage], object] | None = None,
) -> Proof:
    """The plan of a program with its proof, for a launch.

    Args:
        dump: called with every stage, e.g. `print` for one line of sizes each.

    Raises:
        PlanError: the program does not fit the machine.
        VerifyError: a stage is not proved.
    """
    proof: Proof | None = None
    for stage in run_passes(program, machine, options):
        proof = stage.proof
        if dump is not None:
            dump(stage)
    assert proof is not None
    return proof


def compile_program(
    program: Program,
    machine: Machine,
    options: Options | None = None,
    dump: Callable[[Stage], object] | None = None,
) -> KernelPlan:
    """The verified plan of a program; see prove_program."""
    return prove_program(program, machine, options, dump).plan


def finish(
    stage: Program | TaskGraph | EventGraph | Schedule | KernelPlan,
    machine: Machine,
    options: Options | None = None,
) -> KernelPlan:
    """The plan of a stage, not verified: by the passes that come after it.

    Events and a schedule stay as they are: they are not normalized or elided again, so
    that what a text says is what the simulator runs.

    Raises:
        PlanError: the program does not fit the machine.
    """
    value: Any = stage
    for step in PASSES[STAGES.index(_made_by(stage)) + 1 :]:
        value = step.run(value, machine, options or Options())
    return value


def _made_by(stage: object) -> str:
    """The last pass that makes stages of this type."""
    match stage:
        case Program():
            return "program"
        case TaskGraph():
            return "dependences" if stage.needs else "tasks"
        case EventGraph():
            return "normalized"
        case Schedule():
            return "elided"
        case _:
            return "pages"


def _counts(value: object, machine: Machine) -> Iterator[tuple[str, int]]:
    match value:
        case Program():
            yield "buffers", len(value.buffers)
            yield "calls", sum(1 for _ in value.instances())
        case TaskGraph():
            yield "kinds", len(value.kinds)
            yield "tasks", len(value.tasks)
            if value.needs:
                yield "needs", sum(map(len, value.needs))
                sizes = [len(d.members) for d in value.dep_sets]
                edges = (sizes[n.deps] for needs in value.needs for n in needs)
                yield "edges", sum(edges)
        case EventGraph():
            yield "tasks", len(value.graph.tasks)
            yield "events", len(value.events)
            yield "waits", sum(map(len, value.waits))
            yield "most waits", max(map(len, value.waits), default=0)
        case Schedule():
            yield from _counts(value.events, machine)
            yield "SMs", len(value.queues)
            yield "longest queue", max(map(len, value.queues), default=0)
            yield from _bounds(value, machine)
        case KernelPlan():
            yield from _counts(value.schedule.events, machine)
            yield "pages", value.ring
            yield "smem bytes", value.smem_bytes
            yield from _bounds(value, machine)
        case _:
            return


def _bounds(plan: Schedule | KernelPlan, machine: Machine) -> Iterator[tuple[str, int]]:
    cost = estimate(plan, machine)
    yield "us critical path", round(cost.critical_ns / 1e3)
    yield "us lower bound", round(cost.lower_bound_ns / 1e3)
