"""What is checked right before a plan becomes a kernel, whoever made the plan.

What it does: `verify_launch` proves the whole plan again, so that a plan built or
edited by hand is refused like any other. `verify_bounded` is for a debug build, whose
waits give up by themselves: it leaves out the proof that counters are reached in the
right order, and keeps all that a kernel relies on to end and to stay in its memory.
Needs: nothing.
Guarantees: a bounded plan may report a hang or return wrong values; it cannot block a
barrier inside an SM, and every index comes from checked words or from arguments.
Why it is correct: hand-overs inside an SM follow the instructions alone (emit/walk.py),
and pages, slots and words are checked here as for any plan.
Cost: that of the verifiers, a fraction of a second for Llama-3.2-1B.
"""

from dataclasses import replace

from mkdsl.errors import VerifyError
from mkdsl.lower.encode import Encoded
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import Machine
from mkdsl.lower.verify import task_name
from mkdsl.lower.verify_graph import verify_tasks
from mkdsl.lower.verify_plan import verify_encoded, verify_plan
from mkdsl.lower.verify_schedule import verify_schedule


def verify_launch(plan: KernelPlan, encoded: Encoded, machine: Machine) -> None:
    """Check that a plan is proved free of deadlocks and races, and fits.

    Raises:
        VerifyError: it may hang, race, or does not fit.
    """
    graph = plan.schedule.events.graph
    if len(graph.needs) != len(graph.tasks):
        raise VerifyError(
            "launch",
            f"{len(graph.tasks)} tasks, but dependences were found for "
            f"{len(graph.needs)}: nothing can be proved",
            hint="make the plan with compile_program",
        )
    verify_schedule(plan.schedule, machine, "launch")
    verify_plan(plan, machine)
    verify_encoded(plan, encoded)


def verify_bounded(plan: KernelPlan, encoded: Encoded, machine: Machine) -> None:
    """Check that a plan ends and stays inside its memory if all waits are bounded.

    Raises:
        VerifyError: it does not.
    """
    events = plan.schedule.events
    verify_tasks(replace(events.graph, needs=()))
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
