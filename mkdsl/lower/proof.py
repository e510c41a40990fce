"""A plan with its proof: what a launch takes.

What it does: to make a Proof is to prove the plan; a plan that is not proved has none.
Needs: nothing; the plan may come from passes, from a text or from a user's hands.
Guarantees: of a plan that has a Proof: it is free of deadlocks and races, it computes
what its program says, it fits the machine, and the words say what the plan says.
Why it is correct: the verifiers below look at the program, at the accesses of tasks and
at the waits. What passes say of their work, such as the needs of a graph, is not used.
Plans are immutable, so that a proof holds for good.
Cost: that of the verifiers: 0.6 s for Llama-3.2-1B at batch 8, 1.7 s for Qwen3-8B.
"""

from dataclasses import dataclass, field

from mkdsl.lower.encode import Encoded, encode
from mkdsl.lower.ir import KernelPlan, Schedule, TaskGraph
from mkdsl.lower.machine import Machine
from mkdsl.lower.verify_accesses import verify_accesses
from mkdsl.lower.verify_graph import verify_program, verify_tasks
from mkdsl.lower.verify_kinds import verify_kinds
from mkdsl.lower.verify_plan import verify_encoded, verify_plan
from mkdsl.lower.verify_schedule import verify_queues


@dataclass(frozen=True, slots=True)
class Proof:
    """A proved plan.

    Attributes:
        encoded: its instruction words.

    Raises:
        VerifyError: the plan may hang or race, computes something else than its
            program, or does not fit.
        PlanError: a number does not fit in a word.
    """

    plan: KernelPlan
    machine: Machine
    encoded: Encoded = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plan = self.plan
        prove_schedule(plan.schedule, self.machine)
        verify_plan(plan, self.machine)
        encoded = encode(plan)
        verify_encoded(plan, encoded)
        object.__setattr__(self, "encoded", encoded)


def prove_graph(graph: TaskGraph) -> None:
    """Check a program, and that these tasks are what it asks for.

    Raises:
        VerifyError: they are not.
    """
    verify_program(graph.program)
    verify_tasks(graph)
    verify_kinds(graph)


def prove_schedule(schedule: Schedule, machine: Machine) -> None:
    """Check that queues and waits can neither hang nor race.

    Raises:
        VerifyError: they may.
    """
    prove_graph(schedule.events.graph)
    verify_queues(schedule, machine)
    verify_accesses(schedule)
