"""What is checked right before a plan becomes a kernel, whoever made the plan.

What it does: `verify_launch` takes a proof, or proves the plan, so that one built or
edited by hand is refused like any other. `verify_bounded` is for a debug build, whose
waits give up by themselves: it leaves out the proof that counters are reached in the
right order, and keeps all that a kernel relies on to end and to stay in its memory.
Needs: nothing.
Guarantees: a bounded plan may report a hang or return wrong values; it cannot block a
barrier inside an SM, and every index comes from checked words or from arguments.
Why it is correct: hand-overs inside an SM follow the instructions alone (emit/walk.py),
and pages, slots and words are checked here as for any plan.
Cost: that of the verifiers for a plan, nothing for a proof.
"""

from mkdsl.errors import VerifyError
from mkdsl.lower.encode import Encoded, encode
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import Machine
from mkdsl.lower.proof import Proof
from mkdsl.lower.verify import task_name
from mkdsl.lower.verify_graph import verify_tasks
from mkdsl.lower.verify_plan import verify_encoded, verify_plan


def verify_launch(
    plan: KernelPlan | Proof, machine: Machine, *, bounded: bool = False
) -> tuple[KernelPlan, Encoded]:
    """A plan that may run, and its words.

    Args:
        machine: what a plan without a proof is for.
        bounded: the waits of the kernel give up, so that the plan needs no proof.

    Raises:
        VerifyError: the plan is not proved, or, if bounded, may not end.
    """
    if isinstance(plan, Proof):
        return plan.plan, plan.encoded
    if not bounded:
        return plan, Proof(plan, machine).encoded
    encoded = encode(plan)
    verify_bounded(plan, encoded, machine)
    return plan, encoded


def verify_bounded(plan: KernelPlan, encoded: Encoded, machine: Machine) -> None:
    """Check that a plan ends and stays inside its memory if all waits are bounded.

    Raises:
        VerifyError: it does not.
    """
    events = plan.schedule.events
    verify_tasks(events.graph)
    tasks, count = len(events.graph.tasks), len(events.events)
    for task in (t for queue in plan.schedule.queues for t in queue):
        if not 0 <= task < tasks:
            raise VerifyError("launch", f"no task t{task}: there are {tasks}")
        awaited = {w.event for w in events.waits[task]}
        for event in sorted(awaited | {events.signals[task]} - {-1}):
            if not 0 <= event < count:
                name = task_name(events.graph, task)
                raise VerifyError("launch", f"{name}: no event e{event} of {count}")
    verify_plan(plan, machine)
    verify_encoded(plan, encoded)
