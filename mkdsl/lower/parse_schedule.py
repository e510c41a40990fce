"""Parse the text of TaskGraph to KernelPlan: the mirror of text_schedule.py.

Only what the text itself must have is checked here: keywords, numbers in their order,
names that are known. Whether a stage is right is up to the verifiers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from mkdsl.lang.program import Access
from mkdsl.lower.ir import (
    GATES,
    DepSet,
    Event,
    EventGraph,
    KernelPlan,
    Kind,
    KindPlan,
    Mode,
    Need,
    Schedule,
    Task,
    TaskGraph,
    Wait,
)
from mkdsl.lower.parse_program import (
    Shapes,
    Tasks,
    read_access,
    read_buffers,
    read_program,
    read_tasks,
)
from mkdsl.lower.text_lines import Line, Lines

_MODES: tuple[Mode, ...] = get_args(Mode)
_REASONS = ("RAW", "WAR", "WAW")
_KindIds = Mapping[tuple[str, Mode], int]


@dataclass(frozen=True, slots=True)
class _Row:
    """The line of a task."""

    task: Task
    needs: tuple[Need, ...]
    waits: tuple[Wait, ...]
    signal: int


@dataclass(frozen=True, slots=True)
class _Head:
    """A graph without its tasks; `found`: whether its needs are known."""

    graph: TaskGraph
    kinds: _KindIds
    found: bool

    def with_rows(self, rows: Mapping[int, _Row], end: Line) -> TaskGraph:
        """The graph with its tasks."""
        for task in range(len(rows)):
            if task not in rows:
                end.refuse(f"{len(rows)} tasks, but none of them is t{task}")
        ordered = [rows[task] for task in range(len(rows))]
        return TaskGraph(
            self.graph.program,
            self.graph.buffers,
            self.graph.kinds,
            tuple(row.task for row in ordered),
            self.graph.dep_sets,
            tuple(row.needs for row in ordered) if self.found else (),
        )


def read_stage(
    word: str, lines: Lines, tasks: Tasks
) -> TaskGraph | EventGraph | Schedule | KernelPlan:
    """The stage of which the first line has been read: it is `word`."""
    match word:
        case "tasks":
            return _read_tasks(lines, tasks)
        case "events":
            return _read_events(lines, tasks)
        case "schedule":
            return _read_schedule(lines, tasks)
        case _:
            return _read_plan(lines, tasks)


def _read_tasks(lines: Lines, tasks: Tasks) -> TaskGraph:
    head = _head(lines, tasks)
    rows: dict[int, _Row] = {}
    while found := lines.take_identifier("t"):
        number, line = found
        _new_row(rows, number, line, head)
        row = rows[number]
        if row.waits or row.signal >= 0:
            line.refuse("tasks have no waits and signals before the stage `events`")
    return head.with_rows(rows, lines.end)


def _read_events(lines: Lines, tasks: Tasks) -> EventGraph:
    head = _head(lines, tasks)
    events = _events(lines)
    rows: dict[int, _Row] = {}
    while found := lines.take_identifier("t"):
        _new_row(rows, *found, head)
    return _event_graph(head, events, rows, lines.end)


def _read_schedule(lines: Lines, tasks: Tasks) -> Schedule:
    head = _head(lines, tasks)
    events = _events(lines)
    rows: dict[int, _Row] = {}
    queues: list[tuple[int, ...]] = []
    while line := lines.take_numbered("sm", len(queues)):
        line.done()
        queue: list[int] = []
        while found := lines.take_identifier("t"):
            number, line = found
            if not line.ended:
                _new_row(rows, number, line, head)
            queue.append(number)
        queues.append(tuple(queue))
    if lines.take("no queue"):
        while found := lines.take_identifier("t"):
            _new_row(rows, *found, head)
    return Schedule(_event_graph(head, events, rows, lines.end), tuple(queues))


def _event_graph(
    head: _Head, events: tuple[Event, ...], rows: Mapping[int, _Row], end: Line
) -> EventGraph:
    graph = head.with_rows(rows, end)
    ordered = [rows[task] for task in range(len(rows))]
    return EventGraph(
        graph,
        events,
        tuple(row.signal for row in ordered),
        tuple(row.waits for row in ordered),
    )


# --------------------------------------------------------------------------- graph


def _head(lines: Lines, tasks: Tasks) -> _Head:
    program = read_program(lines, tasks)
    buffers = (*program.buffers, *read_buffers(lines))
    read_tasks(lines, tasks)
    shapes = {b.name: b.shape for b in buffers}
    kinds: list[Kind] = []
    ids: dict[tuple[str, Mode], int] = {}
    while line := lines.take_numbered("kind", len(kinds)):
        kind = _kind(line, lines, tasks, shapes)
        if (kind.call, kind.mode) in ids:
            line.refuse(f"two kinds are {kind.call} {kind.mode}")
        ids[kind.call, kind.mode] = len(kinds)
        kinds.append(kind)
    found = lines.take("needs not found yet") is None
    sets: list[DepSet] = []
    while line := lines.take_numbered("deps", len(sets), "d"):
        exact = not line.take("about")
        sets.append(DepSet(_ids(line), exact))
    graph = TaskGraph(program, buffers, tuple(kinds), (), tuple(sets))
    return _Head(graph, ids, found)


def _kind(line: Line, lines: Lines, tasks: Tasks, shapes: Shapes) -> Kind:
    call, mode, parts = line.name(), line.one_of(_MODES), line.number()
    line.one_of(("parts", "part"))
    line.expect("over (")
    grid = line.numbers(")")
    line.expect("of")
    task = tasks.get(line)
    pieces = line.take("pieces")
    blocks = line.number() if line.take("blocks") else 1
    line.done()
    operands: list[int] = []
    ins: list[Access] = []
    while access := lines.take("in"):
        if not access.take("crossing"):
            operands.append(access.number())
        ins.append(read_access(access, shapes))
    outs: list[Access] = []
    while access := lines.take("out"):
        outs.append(read_access(access, shapes))
    return Kind(
        call,
        mode,
        parts,
        task,
        grid,
        tuple(operands),
        tuple(ins),
        tuple(outs),
        line.src,
        pieces,
        blocks,
    )


def _events(lines: Lines) -> tuple[Event, ...]:
    events: list[Event] = []
    while line := lines.take_numbered("event", len(events), "e"):
        events.append(Event(_ids(line)))
    return tuple(events)


def _ids(line: Line) -> tuple[int, ...]:
    line.expect(":")
    ids: list[int] = []
    for first, last in line.many(lambda: _range(line)):
        ids += range(first, last + 1)
    return tuple(ids)


def _range(line: Line) -> tuple[int, int]:
    first = line.identifier("t")
    return first, line.identifier("t") if line.take("..") else first


# --------------------------------------------------------------------------- tasks


def _new_row(rows: dict[int, _Row], number: int, line: Line, head: _Head) -> None:
    """Read the line of a task that is not in the rows yet."""
    if number in rows:
        line.refuse(f"t{number} is described twice; later it is `t{number}` alone")
    call = line.name()
    mode = line.take_one_of(_MODES) or "full"
    kind = head.kinds.get((call, mode))
    if kind is None:
        known = ", ".join(f"{c} {m}" for c, m in head.kinds) or "none"
        line.refuse(f"no kind is {call} {mode}: {known}")
    part = line.number() if line.take("part") else 0
    line.expect("layer")
    layer = line.number()
    line.expect("pid (")
    task = Task(kind, layer, line.numbers(")"), part)
    needs: tuple[Need, ...] = ()
    waits: list[Wait] = []
    signal = -1
    if not line.ended:
        line.expect(":")
        if line.take("needs"):
            needs = _needs(line)
            line.take(";")
        while line.take("wait"):
            waits.append(_wait(line))
            line.take(";")
        if line.take("signal"):
            signal = line.identifier("e")
        if not line.ended:
            line.fail("'needs', 'wait' or 'signal', in this order")
    if needs and not head.found:
        line.refuse("needs, but the text says `needs not found yet` above")
    rows[number] = _Row(task, needs, tuple(waits), signal)


def _needs(line: Line) -> tuple[Need, ...]:
    needs = [_need(line)]
    while line.take(","):
        needs.append(_need(line))
    return tuple(needs)


def _need(line: Line) -> Need:
    return Need(line.identifier("d"), line.one_of(GATES), line.one_of(_REASONS))


def _wait(line: Line) -> Wait:
    event = line.identifier("e")
    line.expect(">=")
    return Wait(event, line.number(), line.one_of(GATES))


# ---------------------------------------------------------------------------- plan


def _read_plan(lines: Lines, tasks: Tasks) -> KernelPlan:
    def number(word: str) -> int:
        _, line = lines.expect(word)
        value = line.number()
        line.done()
        return value

    def slots(word: str) -> tuple[int, int]:
        _, line = lines.expect(word)
        return _times(line)

    columns, smem_bytes = number("columns"), number("shared memory")
    reserved_bytes, instruction_bytes = number("reserved"), number("instructions")
    arena_slots, arena_bytes = slots("arena")
    scratch_bytes = number("scratch")
    staging_slots, staging_bytes = slots("staging")
    _, line = lines.expect("ring")
    ring, page_bytes = _times(line)
    line.expect(",")
    in_flight = line.number()
    line.expect("in flight")
    kinds: list[KindPlan] = []
    while line := lines.take_numbered("memory of kind", len(kinds)):
        kinds.append(_memory(line))
    lines.expect("schedule")
    return KernelPlan(
        _read_schedule(lines, tasks),
        tuple(kinds),
        columns=columns,
        page_bytes=page_bytes,
        ring=ring,
        in_flight=in_flight,
        arena_bytes=arena_bytes,
        arena_slots=arena_slots,
        scratch_bytes=scratch_bytes,
        staging_bytes=staging_bytes,
        staging_slots=staging_slots,
        smem_bytes=smem_bytes,
        instruction_bytes=instruction_bytes,
        reserved_bytes=reserved_bytes,
    )


def _memory(line: Line) -> KindPlan:
    sizes: list[int] = []
    for words in (": arena", ", scratch", ", staging"):
        line.expect(words)
        sizes.append(line.number())
    pages = line.many(lambda: _times(line)) if line.take(", pages") else ()
    line.done()
    return KindPlan(pages, *sizes)


def _times(line: Line) -> tuple[int, int]:
    first = line.number()
    line.expect("x")
    return first, line.number()
