"""What a debug build says about a hang: words of the device, in the terms of the plan.

A wait of a debug build gives up after TIMEOUT_NS, or as soon as another has. The first
unmet wait of every (SM, role) leaves one row of REPORT_WORDS int32:

    state (0 none, 1 gave up, 2 followed), position in the queue, event, expected,
    seen, waited ns, 0, 0

Which of them is the cause: where the signals still to come, those of tasks that are
held up themselves, would not make up what is missing. Waits behind it follow from it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mkdsl.errors import HangError, LaunchError, Stuck
from mkdsl.lower.ir import LOADERS, KernelPlan
from mkdsl.lower.verify import task_name

# A step takes about a millisecond; a wait that takes this long never ends.
TIMEOUT_NS = 200_000_000
REPORT_WORDS = 8
# Rows of an SM: who makes the waits of which gate.
ROLES = tuple(LOADERS.items())
SHOWN = 8

Words = Sequence[Sequence[Sequence[int]]]


def stuck_waits(plan: KernelPlan, report: Words) -> tuple[Stuck, ...]:
    """The earliest unmet wait of every SM, causes first, then the longest.

    Args:
        report: int [SMs, ROLES, REPORT_WORDS].
    """
    queues, events = plan.schedule.queues, plan.schedule.events
    rows = [
        Stuck(sm, role, at, task_name(events.graph, queues[sm][at]), *numbers)
        for sm, of_sm in enumerate(report)
        for (_, role), (state, at, *numbers, _, _) in zip(ROLES, of_sm, strict=True)
        if state
    ]
    # Once it has given up a role goes on, so what is later in a queue follows from it.
    rows.sort(key=lambda s: (s.sm, -s.position, s.waited_ns))
    first = {s.sm: s for s in rows}
    held = Counter(
        events.signals[task]
        for s in first.values()
        for task in queues[s.sm][s.position :]
    )
    found = [
        replace(
            s, signallers=events.signals.count(s.event), to_come=held.get(s.event, 0)
        )
        for s in first.values()
    ]
    return tuple(sorted(found, key=lambda s: (not s.is_cause, -s.waited_ns, s.sm)))


def raise_if_hung(plan: KernelPlan, report: Words) -> None:
    """Raise what a debug build has reported, if it has.

    Raises:
        HangError: some wait gave up.
    """
    stuck = stuck_waits(plan, report)
    if not stuck:
        return
    graph, queues = plan.schedule.events.graph, plan.schedule.queues
    lines = [f"    {s}" for s in stuck[:SHOWN]]
    if len(stuck) > SHOWN:
        lines.append(f"    and {len(stuck) - SHOWN} more, behind these or like them")
    kind = graph.tasks[queues[stuck[0].sm][stuck[0].position]].kind
    raise HangError(
        f"kernel '{graph.program.name}' hung, {len(stuck)} of {len(queues)} SMs wait "
        "for counts that are not reached; results are garbage\n" + "\n".join(lines),
        graph.kinds[kind].src,
        "look the event up in the text of the schedule, as docs/debug_a_hang.md says; "
        "if mkdsl made the plan, this is a fault of mkdsl: please report it",
        stuck,
    )


def not_traceable(name: str) -> LaunchError:
    """A debug build inside of a trace."""
    return LaunchError(
        f"megakernel '{name}': a debug build is called directly, not inside jax.jit, "
        "where a hang could not be raised",
        hint="call it step by step from Python",
    )
