"""Parse the text of a Program: the mirror of text.py, which has the grammar.

Bodies of tasks are not in the text. They come from the tasks that are given: each
printed task must be among them, with the same name, digest and everything else that is
printed. Without any given, tasks have no body: enough to verify, plan and print.
"""

import re
from collections.abc import Iterable, Mapping
from typing import get_args

from mkdsl.lang.program import (
    Access,
    Axis,
    Buffer,
    Call,
    Cut,
    Dot,
    Fold,
    Output,
    Param,
    Program,
    Role,
    Scan,
    Scratch,
    Step,
    Stream,
    TaskDef,
    Use,
)
from mkdsl.lower.text import DTYPE_TEXT
from mkdsl.lower.text_lines import Line, Lines

Shapes = Mapping[str, tuple[int, ...]]

_DTYPES = {text: dtype for dtype, text in DTYPE_TEXT.items()}
_ROLES: tuple[Role, ...] = get_args(Role)
_USES: tuple[Use, ...] = get_args(Use)
_CUTS: tuple[Cut, ...] = get_args(Cut)
_DIGEST = re.compile(r"[^\s/]+")


class Tasks:
    """The task definitions of a text by key, and those that are given for it."""

    def __init__(self, given: Iterable[TaskDef] | None) -> None:
        self._given = None if given is None else {task: task for task in given}
        self._defined: dict[str, TaskDef] = {}

    def define(self, key: str, task: TaskDef, line: Line) -> None:
        """Enter a definition, with the body that is given for it."""
        if key in self._defined:
            line.refuse(f"task {key} is defined twice")
        if self._given is not None:
            task = self._given.get(task) or self._refuse(key, task, line)
        self._defined[key] = task

    def get(self, line: Line) -> TaskDef:
        """The definition that a key names."""
        key = read_key(line)[2]
        if key not in self._defined:
            known = ", ".join(self._defined) or "none"
            line.refuse(f"no task {key} is defined above: {known}")
        return self._defined[key]

    def _refuse(self, key: str, task: TaskDef, line: Line) -> TaskDef:
        """Say how the given tasks of that name differ."""
        assert self._given is not None
        named = [t for t in self._given if t.name == task.name]
        if not named:
            names = ", ".join(dict.fromkeys(t.name for t in self._given)) or "none"
            line.refuse(
                f"no task {task.name} is given: {names}",
                "pass the tasks of the program that was printed, or tasks=None for "
                "tasks without bodies",
            )
        same = [t for t in named if t.digest == task.digest]
        if not same:
            digests = ", ".join(t.digest for t in named)
            line.refuse(
                f"task {key} was printed from another body than the one that is given "
                f"for it, {digests}",
                "use the code (and the JAX) that printed the text, or print it again",
            )
        fields = ("params", "results", "columns", "streams", "scratch", "cut")
        differ = [
            f"{f}: {getattr(same[0], f)}, not {getattr(task, f)}"
            for f in (*fields, "before", "after", "long")
            if getattr(same[0], f) != getattr(task, f)
        ]
        line.refuse(
            f"the task {key} that is given differs from the text in "
            + "; ".join(differ),
            "pass the tasks of the program that was printed",
        )


def read_program(lines: Lines, tasks: Tasks) -> Program:
    """The program that the next lines print."""
    _, line = lines.expect("program")
    name = line.name()
    line.expect("(")
    inputs = line.many(line.name, ")")
    line.expect("->")
    outputs = line.many(lambda: _output(line))
    buffers = read_buffers(lines)
    read_tasks(lines, tasks)
    shapes = {b.name: b.shape for b in buffers}
    steps: list[Step] = []
    while True:
        if call := _take_call(lines, tasks, shapes):
            steps.append(call)
        elif scan := lines.take("scan"):
            steps.append(_scan(scan, lines, tasks, shapes))
        else:
            return Program(name, buffers, inputs, tuple(steps), outputs)


def read_buffers(lines: Lines) -> tuple[Buffer, ...]:
    """The buffers that the next lines print."""
    buffers: list[Buffer] = []
    while line := lines.take("buffer"):
        name = line.name()
        line.expect(":")
        shape, dtype = _array(line)
        role = line.one_of(_ROLES)
        column = line.number() if line.take("column") else None
        line.done()
        buffers.append(Buffer(name, shape, dtype, role, column, line.src))
    return tuple(buffers)


def read_tasks(lines: Lines, tasks: Tasks) -> None:
    """Enter the task definitions that the next lines print."""
    while line := lines.take("task"):
        name, digest, key = read_key(line)
        line.expect("columns")
        columns = line.number()
        line.expect("cut")
        cut = line.one_of(_CUTS)
        long = line.number() if line.take("long") else 0
        line.done()
        task = TaskDef(
            name,
            digest,
            params=_params(lines, "param"),
            results=_params(lines, "result"),
            columns=columns,
            streams=_streams(lines),
            scratch=_scratch(lines),
            cut=cut,
            before=_operands(lines, "before"),
            after=_operands(lines, "after"),
            long=long,
            src=line.src,
        )
        tasks.define(key, task, line)


def read_key(line: Line) -> tuple[str, str, str]:
    """(name, digest, key) of a task: name#digest, or name#digest/2."""
    start = line.at
    name = line.name()
    line.expect("#")
    digest = line.match(_DIGEST, "a digest")
    if line.take("/"):
        line.number()
    return name, digest, line.text[start : line.at].strip()


def read_access(line: Line, shapes: Shapes) -> Access:
    """A block of a buffer."""
    buffer = line.name()
    view = line.shape() if line.take("as") else shapes.get(buffer)
    if view is None:
        known = ", ".join(shapes)
        line.refuse(f"no buffer {buffer}, and no shape `as [..]`: known are {known}")
    line.expect("[")
    axes = line.many(lambda: _axis(line), "]")
    if len(axes) != len(view):
        line.refuse(f"{len(axes)} axes for the shape {list(view)} of {buffer}")
    line.done()
    return Access(buffer, view, axes, line.src)


def _axis(line: Line) -> Axis:
    start = line.expression()
    if not line.take(":+"):
        return Axis(start, 1, squeezed=True)
    size = line.number()
    dropped = line.take("dropped")
    extent = line.expression() if line.take("upto") else None
    return Axis(start, size, dropped, extent)


def _output(line: Line) -> Output:
    buffer, layer = line.name(), None
    if line.take("["):
        layer = line.number()
        line.expect("]")
    return Output(buffer, layer, line.shape() if line.take("as") else ())


def _array(line: Line) -> tuple[tuple[int, ...], str]:
    dtype = line.one_of(tuple(_DTYPES))
    return line.shape(), _DTYPES[dtype]


def _params(lines: Lines, word: str) -> tuple[Param, ...]:
    params: list[Param] = []
    while line := lines.take_numbered(word, len(params)):
        name = line.name()
        line.expect(":")
        shape, dtype = _array(line)
        params.append(Param(name, shape, dtype, line.one_of(_USES)))
        line.done()
    return tuple(params)


def _streams(lines: Lines) -> tuple[Stream, ...]:
    streams: list[Stream] = []
    while True:
        if line := lines.take("dot"):
            streams.append(_dot(line))
        elif line := lines.take("fold"):
            streams.append(_fold(line))
        else:
            return tuple(streams)
        line.done()


def _dot(line: Line) -> Dot:
    line.expect("lhs")
    lhs = None if line.take("-") else line.number()
    sizes: list[int] = []
    for word in ("rhs", "rows", "depth"):
        line.expect(word)
        sizes.append(line.number())
    return Dot(lhs, *sizes)


def _fold(line: Line) -> Fold:
    line.expect("operands")
    operands = line.numbers("block")
    block = line.number()
    line.expect("carries")
    return Fold(operands, block, line.many(lambda: _array(line)))


def _scratch(lines: Lines) -> tuple[Scratch, ...]:
    scratch: list[Scratch] = []
    while line := lines.take("scratch"):
        use = line.one_of(get_args(Scratch.__annotations__["use"]))
        scratch.append(Scratch(use, line.number(), line.take("after cut")))
        line.done()
    return tuple(scratch)


def _operands(lines: Lines, word: str) -> tuple[int, ...]:
    line = lines.take(word)
    return line.numbers() if line else ()


def _take_call(lines: Lines, tasks: Tasks, shapes: Shapes) -> Call | None:
    line = lines.take("call")
    if line is None:
        return None
    name = line.name()
    line.expect("=")
    task = tasks.get(line)
    line.expect("over (")
    grid = line.numbers(")")
    line.done()
    ins = _accesses(lines, "in", shapes)
    return Call(name, task, grid, ins, _accesses(lines, "out", shapes), line.src)


def _accesses(lines: Lines, word: str, shapes: Shapes) -> tuple[Access, ...]:
    accesses: list[Access] = []
    while line := lines.take(word):
        accesses.append(read_access(line, shapes))
    return tuple(accesses)


def _scan(line: Line, lines: Lines, tasks: Tasks, shapes: Shapes) -> Scan:
    length = line.number()
    line.expect(":")
    choice = tuple(n for run in line.many(lambda: _run(line)) for n in run)
    if len(choice) != length:
        line.refuse(f"{len(choice)} variants are named for {length} layers")
    variants: list[tuple[Call, ...]] = []
    while lines.take_numbered("variant", len(variants)):
        calls: list[Call] = []
        while call := _take_call(lines, tasks, shapes):
            calls.append(call)
        variants.append(tuple(calls))
    lines.expect("end scan")
    return Scan(length, tuple(variants), choice, line.src)


def _run(line: Line) -> tuple[int, ...]:
    value = line.number()
    return (value,) * (line.number() if line.take("*") else 1)
