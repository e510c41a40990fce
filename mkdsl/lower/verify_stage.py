"""Check a stage that no pass has made: one from a text.

What it does: proves what can be proved of each type of stage, from the accesses of its
tasks; of a KernelPlan what a launch needs (proof.py).
Needs: nothing.
Guarantees: of a Program, that it is well formed; of a TaskGraph, that its tasks are
those of its program; of one with needs, of an EventGraph and of a Schedule also what
verify.py proves: no deadlock, no race. Needs that a text leaves out do not help it to
prove itself.
Why it is correct: the verifiers are those of a launch. A graph without queues is run
as if every task had an SM of its own: no order but that of needs or events is there.
Cost: that of the verifiers; of a graph without queues a bitset (tasks / 8 bytes) for
every task.
"""

from mkdsl.lang.program import Program
from mkdsl.lower.ir import Event, EventGraph, KernelPlan, Schedule, TaskGraph, Wait
from mkdsl.lower.machine import Machine
from mkdsl.lower.proof import Proof, prove_graph, prove_schedule
from mkdsl.lower.verify import verify_events
from mkdsl.lower.verify_accesses import verify_accesses
from mkdsl.lower.verify_graph import verify_needs, verify_program

type AnyStage = Program | TaskGraph | EventGraph | Schedule | KernelPlan


def verify_stage(stage: AnyStage, machine: Machine) -> None:
    """Check a stage and all that it stands on.

    Raises:
        VerifyError: it is not well formed, may hang, may race or does not fit.
    """
    match stage:
        case Program():
            verify_program(stage)
        case TaskGraph():
            prove_graph(stage)
            if stage.needs:
                verify_needs(stage)
                verify_accesses(alone(events_of_needs(stage)))
        case EventGraph():
            prove_graph(stage.graph)
            verify_events(stage)
            verify_accesses(alone(stage))
        case Schedule():
            prove_schedule(stage, machine)
        case KernelPlan():
            Proof(stage, machine)


def alone(events: EventGraph) -> Schedule:
    """Every task on an SM of its own."""
    return Schedule(events, tuple((t,) for t in range(len(events.graph.tasks))))


def events_of_needs(graph: TaskGraph) -> EventGraph:
    """Every task signals an event of its own, and waits for what it needs."""
    tasks = range(len(graph.tasks))
    waits = tuple(
        tuple(
            Wait(member, 1, need.gate)
            for need in needs
            for member in graph.dep_sets[need.deps].members
        )
        for needs in graph.needs
    )
    return EventGraph(graph, tuple(Event((t,)) for t in tasks), tuple(tasks), waits)
