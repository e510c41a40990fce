"""A queue of tasks for every SM: static list scheduling.

What it does: gives each task to one SM, so that within every stage all SMs stream the
same bytes.
Needs: a normalized EventGraph.
Guarantees: every task is in exactly one queue, ids ascending; the same graph gives the
same queues.
Why it is correct: dependences point to lower ids, so ascending queues are a linear
extension: the lowest unfinished task of all is at the head of its queue, and what it
waits for is done. Balance is a matter of speed alone.
How: the stage of a task is the depth of its call in the order of calls (longest path).
Inside a stage tasks go, longest first, to the SM with the fewest streamed bytes in this
stage; ties by total bytes, then rotating, so that no SM always gets the odd page.
Cost: n log(SMs).
Source: Graham, Bounds on multiprocessing timing anomalies (1969): longest processing
time first. Balancing each stage instead of the sum took a step from 712 to 652 us
(gpu_facts.md, measured on an H200; mode `slpt` of prototypes/px_core.py).
"""

import heapq
from dataclasses import dataclass

from mkdsl.lower.cost import access_bytes
from mkdsl.lower.ir import EventGraph, Kind, Schedule
from mkdsl.lower.machine import Machine


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """How tasks are weighed.

    Attributes:
        run_time_share: part of a block that is expected to be there where its extent
            is known only at run time.
    """

    run_time_share: float = 0.5


def schedule(
    events: EventGraph, machine: Machine, options: ScheduleOptions | None = None
) -> Schedule:
    """The queues of all SMs of the machine."""
    options = options or ScheduleOptions()
    graph = events.graph
    share = options.run_time_share
    # A task that streams nothing counts as a page: one arrives in 1 us, and a satisfied
    # wait takes 0.5 us, a store 0.4 us (gpu_facts.md, H200).
    weight = [
        streamed_bytes(kind, events, share) or machine.page_bytes
        for kind in graph.kinds
    ]
    sm_of = [0] * len(graph.tasks)
    total = [0] * machine.sms
    turn = 0
    for stage in _stages(events):
        # Python's sort is stable: equal weights stay in program order.
        longest_first = sorted(stage, key=lambda t: -weight[graph.tasks[t].kind])
        # (bytes in this stage, bytes in all, turn, SM)
        loads = [(0, total[s], (s - turn) % machine.sms, s) for s in range(len(total))]
        heapq.heapify(loads)
        for task in longest_first:
            here, _, rank, sm = loads[0]
            cost = weight[graph.tasks[task].kind]
            total[sm] += cost
            sm_of[task] = sm
            heapq.heapreplace(loads, (here + cost, total[sm], rank, sm))
        turn = (turn + len(stage)) % machine.sms
    queues: list[list[int]] = [[] for _ in range(machine.sms)]
    for task, sm in enumerate(sm_of):
        queues[sm].append(task)
    return Schedule(events, tuple(tuple(queue) for queue in queues))


def call_depths(events: EventGraph) -> list[int]:
    """Per task, the stage of its call: the longest path of calls that lead to it."""
    tasks = events.graph.tasks
    groups: dict[tuple[int, int], int] = {}
    group = [groups.setdefault((t.kind, t.layer), len(groups)) for t in tasks]
    sources = [tuple({group[m] for m in e.members}) for e in events.events]
    depth = [0] * len(groups)
    for task, waits in enumerate(events.waits):
        mine = group[task]
        for wait in waits:
            for source in sources[wait.event]:
                if source != mine and depth[source] >= depth[mine]:
                    depth[mine] = depth[source] + 1
    return [depth[g] for g in group]


def streamed_bytes(kind: Kind, events: EventGraph, share: float = 1.0) -> int:
    """Bytes that one task of a kind streams through pages.

    Args:
        share: expected part of a block whose extent is known only at run time.
    """
    buffers = {b.name: b for b in events.graph.buffers}
    total = 0
    for operand, access in zip(kind.operands, kind.ins, strict=False):
        if kind.task.params[operand].use == "stream":
            ragged = any(axis.extent is not None for axis in access.axes)
            size = access_bytes(access, buffers[access.buffer])
            total += int(size * share) if ragged else size
    return total


def _stages(events: EventGraph) -> list[list[int]]:
    depths = call_depths(events)
    stages: list[list[int]] = [[] for _ in range(max(depths, default=-1) + 1)]
    for task, depth in enumerate(depths):
        stages[depth].append(task)
    return stages
