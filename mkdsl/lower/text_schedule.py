"""The text of TaskGraph, EventGraph, Schedule and KernelPlan, one task per line.

    kind 3 gate_up full 1 parts over (128)           then its accesses, as in text.py
    deps d4: t0..t31, t40                            `about` if not exact
    t70 gate_up layer 2 pid (5) part 0: needs d4 resident RAW
    event e3: t0..t31
    t70 gate_up layer 2 pid (5) part 0: wait e3>=32 resident; signal e4
    sm 7                                             then its tasks, in queue order
    shared memory 231424                             then one line per part

Ids are those of the graph; members are ascending, `t0..t31` is every id between.
"""

from collections.abc import Iterator, Sequence

from mkdsl.lower.ir import EventGraph, KernelPlan, Kind, Schedule, TaskGraph
from mkdsl.lower.text import access_text, buffer_text, list_text


def print_tasks(graph: TaskGraph) -> str:
    """The text of a task graph, with its dependences if they are known."""
    return _joined(_graph_lines(graph), _need_lines(graph))


def print_events(events: EventGraph) -> str:
    """The text of an event graph; its needs are in the text of its task graph."""
    tasks = (task_line(events, task) for task in range(len(events.graph.tasks)))
    return _joined(_graph_lines(events.graph), _event_lines(events), tasks)


def print_schedule(schedule: Schedule) -> str:
    """The text of a schedule."""
    return _joined(_schedule_lines(schedule))


def print_plan(plan: KernelPlan) -> str:
    """The text of a kernel plan."""
    return _joined(_plan_lines(plan), _schedule_lines(plan.schedule))


def task_line(events: EventGraph, task: int) -> str:
    """One task with its waits and its signal."""
    actions = [f"wait e{w.event}>={w.threshold} {w.gate}" for w in events.waits[task]]
    if events.signals[task] >= 0:
        actions.append(f"signal e{events.signals[task]}")
    text = "; ".join(actions)
    return f"{_task_text(events.graph, task)}{': ' if text else ''}{text}"


def ranges_text(ids: Sequence[int]) -> str:
    """Ascending task ids: t0..t3, t7."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return list_text(f"t{a}" if a == b else f"t{a}..t{b}" for a, b in runs)


def _joined(*parts: Iterator[str]) -> str:
    return "".join(f"{line}\n" for part in parts for line in part)


def _task_text(graph: TaskGraph, task: int) -> str:
    t = graph.tasks[task]
    kind = graph.kinds[t.kind]
    mode = "" if kind.mode == "full" else f" {kind.mode} part {t.part}"
    return f"t{task} {kind.call}{mode} layer {t.layer} pid ({list_text(t.pid)})"


def _graph_lines(graph: TaskGraph) -> Iterator[str]:
    yield f"tasks of {graph.program.name}"
    for buffer in graph.buffers:
        yield f"buffer {buffer_text(buffer)}"
    shapes = {b.name: b.shape for b in graph.buffers}
    for number, kind in enumerate(graph.kinds):
        yield from _kind_lines(number, kind, shapes)


def _kind_lines(
    number: int, kind: Kind, shapes: dict[str, tuple[int, ...]]
) -> Iterator[str]:
    parts = f"{kind.parts} part{'s' if kind.parts > 1 else ''}"
    grid = list_text(kind.grid)
    task = f"{kind.task.name}#{kind.task.digest}"
    yield f"kind {number} {kind.call} {kind.mode} {parts} over ({grid}) of {task}"
    for i, access in enumerate(kind.ins):
        operand = kind.operands[i] if i < len(kind.operands) else "crossing"
        yield f"  in {operand} {access_text(access, shapes[access.buffer])}"
    for access in kind.outs:
        yield f"  out {access_text(access, shapes[access.buffer])}"


def _need_lines(graph: TaskGraph) -> Iterator[str]:
    for number, deps in enumerate(graph.dep_sets):
        about = "" if deps.exact else " about"
        yield f"deps d{number}{about}: {ranges_text(deps.members)}"
    for task in range(len(graph.tasks)):
        needs = graph.needs[task] if graph.needs else ()
        text = list_text(f"d{n.deps} {n.gate} {n.why}" for n in needs)
        yield f"{_task_text(graph, task)}{': needs ' if text else ''}{text}"


def _event_lines(events: EventGraph) -> Iterator[str]:
    for number, event in enumerate(events.events):
        yield f"event e{number}: {ranges_text(event.members)}"


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
    events = schedule.events
    yield from _graph_lines(events.graph)
    yield from _event_lines(events)
    for sm, queue in enumerate(schedule.queues):
        yield f"sm {sm}"
        for task in queue:
            yield f"  {task_line(events, task)}"


def _plan_lines(plan: KernelPlan) -> Iterator[str]:
    yield f"plan of {plan.schedule.events.graph.program.name}"
    yield f"columns {plan.columns}"
    yield f"shared memory {plan.smem_bytes}"
    yield f"  reserved {plan.reserved_bytes}"
    yield f"  instructions {plan.instruction_bytes}"
    yield f"  arena {plan.arena_slots} x {plan.arena_bytes}"
    yield f"  scratch {plan.scratch_bytes}"
    yield f"  staging {plan.staging_slots} x {plan.staging_bytes}"
    yield f"  ring {plan.ring} x {plan.page_bytes}, {plan.in_flight} in flight"
    for number, sizes in enumerate(plan.kinds):
        pages = list_text(f"{rows} x {features}" for rows, features in sizes.pages)
        yield (
            f"memory of kind {number}: arena {sizes.arena_bytes}, "
            f"scratch {sizes.scratch_bytes}, staging {sizes.staging_bytes}"
            + (f", pages {pages}" if pages else "")
        )
