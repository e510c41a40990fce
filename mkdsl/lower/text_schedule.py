"""The text of TaskGraph, EventGraph, Schedule and KernelPlan, one task per line.

    tasks    ::= "tasks" graph task*             tasks have `needs` alone
    events   ::= "events" graph event* task*
    schedule ::= "schedule" graph event* ("sm" INT task*)* ["no queue" task*]
    plan     ::= "plan" "columns" INT "shared memory" INT "reserved" INT
                 "instructions" INT "arena" slots "scratch" INT "staging" slots
                 "ring" slots "," INT "in flight" memory* schedule
    slots    ::= INT "x" INT                     a number of slots, bytes of each
    memory   ::= "memory of kind" INT ":" "arena" INT "," "scratch" INT "," "staging"
                 INT ["," "pages" (INT "x" INT),*]
    graph    ::= program ("buffer" buffer)* task_definition* kind*
                 ["needs not found yet"] deps*
    kind     ::= "kind" INT NAME mode INT ("part" | "parts") "over (" INT,* ")"
                 "of" key ["pieces"] ["blocks" INT]
                 ("in" (INT | "crossing") access)* ("out" access)*
    mode     ::= "full" | "partial" | "combine"
    deps     ::= "deps" dINT ["about"] ":" ids   "about": assumed, not exact
    event    ::= "event" eINT ":" ids            those that signal it
    ids      ::= (tINT | tINT ".." tINT),*       t0..t31 is every id between
    task     ::= tINT NAME [mode] ["part" INT] "layer" INT "pid (" INT,* ")"
                 [":" action;*]
    action   ::= "needs" need,* | "wait" wait | "signal" eINT
    need     ::= dINT gate ("RAW" | "WAR" | "WAW")
    wait     ::= eINT ">=" INT gate
    gate     ::= "resident" | "block1" | "block2" | "block3" | "stream"

What is not defined here is in text.py. Buffers and task definitions of a graph are
those that its program has not. Kinds, deps and events are numbered from 0. Tasks stand
in the order of a queue in a schedule and in that of their ids elsewhere; a task that
is in the queues for a second time is `tINT` alone. parse_schedule.py is the mirror.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mkdsl.lang.program import TaskDef
from mkdsl.lower.ir import EventGraph, KernelPlan, Kind, Need, Schedule, TaskGraph, Wait
from mkdsl.lower.text import (
    access_text,
    buffer_text,
    list_text,
    name_text,
    program_lines,
    task_keys,
    task_lines,
)


def print_tasks(graph: TaskGraph) -> str:
    """The text of a task graph, with its dependences if they are known."""
    tasks = (
        _task_line(graph, task, _needs_text(graph, task))
        for task in range(len(graph.tasks))
    )
    return _joined(["tasks"], _graph_lines(graph), tasks)


def print_events(events: EventGraph) -> str:
    """The text of an event graph."""
    tasks = (task_line(events, task) for task in range(len(events.graph.tasks)))
    return _joined(["events"], _graph_lines(events.graph), _event_lines(events), tasks)


def print_schedule(schedule: Schedule) -> str:
    """The text of a schedule."""
    return _joined(_schedule_lines(schedule))


def print_plan(plan: KernelPlan) -> str:
    """The text of a kernel plan."""
    return _joined(_plan_lines(plan), _schedule_lines(plan.schedule))


def task_line(events: EventGraph, task: int) -> str:
    """One task with its needs, its waits and its signal."""
    actions = _needs_text(events.graph, task)
    actions += [f"wait {_wait_text(wait)}" for wait in events.waits[task]]
    if events.signals[task] >= 0:
        actions.append(f"signal e{events.signals[task]}")
    return _task_line(events.graph, task, actions)


def ranges_text(ids: Sequence[int]) -> str:
    """Ascending task ids: t0..t3, t7."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return list_text(f"t{a}" if a == b else f"t{a}..t{b}" for a, b in runs)


def _joined(*parts: Iterable[str]) -> str:
    return "".join(f"{line}\n" for part in parts for line in part)


def _task_line(graph: TaskGraph, task: int, actions: Sequence[str]) -> str:
    t = graph.tasks[task]
    kind = graph.kinds[t.kind]
    mode = "" if kind.mode == "full" else f" {kind.mode}"
    part = f" part {t.part}" if mode or t.part else ""
    where = f"layer {t.layer} pid ({list_text(t.pid)})"
    text = f"{': ' if actions else ''}{'; '.join(actions)}"
    return f"t{task} {name_text(kind.call)}{mode}{part} {where}{text}"


def _needs_text(graph: TaskGraph, task: int) -> list[str]:
    needs = graph.needs[task] if graph.needs else ()
    return [f"needs {list_text(map(_need_text, needs))}"] if needs else []


def _need_text(need: Need) -> str:
    return f"d{need.deps} {need.gate} {need.why}"


def _wait_text(wait: Wait) -> str:
    return f"e{wait.event}>={wait.threshold} {wait.gate}"


def _graph_lines(graph: TaskGraph) -> Iterator[str]:
    program = graph.program
    yield from program_lines(program)
    for buffer in graph.buffers[len(program.buffers) :]:
        yield f"buffer {buffer_text(buffer)}"
    own = [call.task for call in program.calls()]
    keys = task_keys([*own, *(kind.task for kind in graph.kinds)])
    for task, key in keys.items():
        if task not in own:
            yield from task_lines(task, key)
    shapes = {b.name: b.shape for b in graph.buffers}
    for number, kind in enumerate(graph.kinds):
        yield from _kind_lines(number, kind, keys, shapes)
    if not graph.needs:
        yield "needs not found yet"
    for number, deps in enumerate(graph.dep_sets):
        about = "" if deps.exact else " about"
        yield f"deps d{number}{about}: {ranges_text(deps.members)}"


def _kind_lines(
    number: int,
    kind: Kind,
    keys: Mapping[TaskDef, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[str]:
    parts = f"{kind.parts} part{'s' if kind.parts > 1 else ''}"
    pieces = " pieces" if kind.pieces else ""
    blocks = f" blocks {kind.blocks}" if kind.blocks > 1 else ""
    yield (
        f"kind {number} {name_text(kind.call)} {kind.mode} {parts} "
        f"over ({list_text(kind.grid)}) of {keys[kind.task]}{pieces}{blocks}"
    )
    for i, access in enumerate(kind.ins):
        operand = kind.operands[i] if i < len(kind.operands) else "crossing"
        yield f"  in {operand} {access_text(access, shapes)}"
    for access in kind.outs:
        yield f"  out {access_text(access, shapes)}"


def _event_lines(events: EventGraph) -> Iterator[str]:
    for number, event in enumerate(events.events):
        yield f"event e{number}: {ranges_text(event.members)}"


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
    events = schedule.events
    yield "schedule"
    yield from _graph_lines(events.graph)
    yield from _event_lines(events)
    left = dict.fromkeys(range(len(events.graph.tasks)))
    for sm, queue in enumerate(schedule.queues):
        yield f"sm {sm}"
        for task in queue:
            first = task in left
            left.pop(task, None)
            yield f"  {task_line(events, task) if first else f't{task}'}"
    if left:
        yield "no queue"
        yield from (f"  {task_line(events, task)}" for task in left)


def _plan_lines(plan: KernelPlan) -> Iterator[str]:
    yield "plan"
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
