"""Checks of a Program and of a TaskGraph before anything is planned with them.

What it does: raises a VerifyError that names call, operand, shape and the user's line.
Needs: nothing; both may come from text.
Guarantees: of a Program: names are unique and known, views and blocks agree with their
buffers and parameters, constant positions are inside, inputs are not written, temps are
written by an earlier call or the same layer before they are read, variables are in
scope. Of a TaskGraph: ids are in range, tasks of one kind and layer contiguous, every
element of a temp is written by one task, every element of a temp that a task reads is
written, needs point to lower ids.
Why it is correct: positions that are linear in grid axes have their extremes at the
ends of the axes. Elements are those of verify_elements.py. Positions with run-time
scalars are left to the bounds of the kernel.
Cost: linear in the calls; near-linear in the tasks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from mkdsl.errors import SrcInfo, VerifyError
from mkdsl.lang.expr import Expr, Read, Var
from mkdsl.lang.program import (
    Access,
    Axis,
    Buffer,
    Call,
    Fold,
    Param,
    Program,
    Scan,
)
from mkdsl.lower.ir import Task, TaskGraph
from mkdsl.lower.verify_elements import verify_elements

# ------------------------------------------------------------------------- program


def verify_program(program: Program) -> None:
    """Raise a VerifyError if the program is not well formed."""
    _unique("buffer", ((b.name, b.src) for b in program.buffers))
    _unique("call", ((c.name, c.src) for c in program.calls()))
    buffers = {b.name: b for b in program.buffers}
    for b in program.buffers:
        if any(n < 1 for n in b.shape):
            raise _wrong(f"buffer {b.name}: {b.shape=} has an empty dimension", b.src)
    arguments = {b.name for b in program.buffers if b.role != "temp"}
    if sorted(program.inputs) != sorted(arguments):
        raise _wrong(
            f"the inputs of {program.name} are {', '.join(program.inputs)}, but its "
            f"input and state buffers are {', '.join(sorted(arguments))}"
        )
    for step in program.steps:
        if isinstance(step, Call):
            _verify_call(step, buffers, None)
            continue
        for index in step.choice:
            if not 0 <= index < len(step.variants):
                raise _wrong(f"scan: {index=} is not one of its variants", step.src)
        for index, variant in enumerate(step.variants):
            for call in variant:
                _verify_call(call, buffers, _layers(step, index))
    _verify_order(program, buffers)


def _layers(scan: Scan, variant: int) -> tuple[int, int]:
    """First and last layer that run a variant."""
    layers = [i for i, which in enumerate(scan.choice) if which == variant]
    return (layers[0], layers[-1]) if layers else (0, 0)


def _unique(what: str, names: Iterable[tuple[str, SrcInfo]]) -> None:
    seen: set[str] = set()
    for name, src in names:
        if name in seen:
            raise _wrong(f"two {what}s have the name {name!r}", src)
        seen.add(name)


def _verify_call(
    call: Call, buffers: Mapping[str, Buffer], layers: tuple[int, int] | None
) -> None:
    if any(n < 1 for n in call.grid):
        raise _wrong(f"call {call.name}: {call.grid=} has no tasks", call.src)
    ranges = {f"g{i}": (0, n - 1) for i, n in enumerate(call.grid)}
    if layers is not None:
        ranges["layer"] = layers
    task = call.task
    for what, accesses, params in (
        ("operand", call.ins, task.params),
        ("result", call.outs, task.results),
    ):
        if len(accesses) != len(params):
            raise _wrong(
                f"call {call.name}: {len(accesses)} {what}s for the {len(params)} of "
                f"task {task.name}",
                call.src,
            )
        for access, param in zip(accesses, params, strict=True):
            where = f"call {call.name}: {what} {param.name}"
            _Block(where, access, param, ranges, buffers, call.src).verify()
    for access in call.outs:
        if buffers[access.buffer].role == "input":
            raise _wrong(
                f"call {call.name} writes {access.buffer}, an argument that is not "
                "donated",
                call.src,
                "name the array in donate_argnums",
            )
    _verify_task(call)


def _verify_task(call: Call) -> None:
    task, count = call.task, len(call.task.params)
    for i in (*task.before, *task.after):
        if not 0 <= i < count:
            raise _wrong(f"task {task.name}: no operand {i} of {count}", task.src)
    if task.cut != "none" and not task.streams:
        raise _wrong(f"task {task.name}: {task.cut=} without a stream", task.src)
    for stream in task.streams:
        operands = stream.operands if isinstance(stream, Fold) else (stream.rhs,)
        for i in operands:
            if not 0 <= i < count or task.params[i].use != "stream":
                raise _wrong(f"task {task.name}: operand {i} is no stream", task.src)


@dataclass(frozen=True, slots=True)
class _Block:
    """One access of a call with what is known about it."""

    where: str
    access: Access
    param: Param
    ranges: Mapping[str, tuple[int, int]]
    buffers: Mapping[str, Buffer]
    src: SrcInfo

    def verify(self) -> None:
        access, param = self.access, self.param
        if access.buffer not in self.buffers:
            raise _wrong(f"{self.where}: no buffer {access.buffer!r}", self.src)
        buffer = self.buffers[access.buffer]
        if math.prod(access.view) != math.prod(buffer.shape):
            raise _wrong(
                f"{self.where}: {buffer.name} of shape {buffer.shape} has no view "
                f"{access.view}",
                self.src,
            )
        # A vector may be a [features] block, columns a [columns] block.
        forms = (access.shape, (1, *access.shape), (*access.shape, 1))
        if param.shape not in forms or buffer.dtype != param.dtype:
            raise _wrong(
                f"{self.where} is {param.dtype}{list(param.shape)}, but its block of "
                f"{buffer.name} is {buffer.dtype}{list(access.shape)}",
                self.src,
                "make the block of the spec and the shape of the task agree",
            )
        for d, (axis, n) in enumerate(zip(access.axes, access.view, strict=True)):
            self._verify_axis(d, axis, n)

    def _verify_axis(self, d: int, axis: Axis, n: int) -> None:
        if axis.size < 1 or (axis.squeezed and axis.size != 1):
            raise _wrong(f"{self.where}: dimension {d}: {axis.size=}", self.src)
        for value in (axis.start, axis.extent):
            if value is not None:
                self._verify_scope(d, value)
        extremes = _extremes(axis.start, self.ranges)
        if extremes is not None and not 0 <= extremes[0] <= extremes[1] < n:
            raise _wrong(
                f"{self.where}: blocks of dimension {d} of {self.access.buffer} start "
                f"at {extremes[0]} to {extremes[1]} ({axis.start}), outside its {n} "
                "elements",
                self.src,
                "let the grid and the index map cover the array once",
            )

    def _verify_scope(self, d: int, value: Expr) -> None:
        for name in sorted(value.variables):
            if name not in self.ranges:
                known = ", ".join(self.ranges)
                raise _wrong(
                    f"{self.where}: dimension {d}: {name!r} in `{value}` is not one of "
                    f"{known}",
                    self.src,
                )
        for atom in value.atoms():
            if isinstance(atom, Read):
                self._verify_read(atom)

    def _verify_read(self, atom: Read) -> None:
        buffer = self.buffers.get(atom.buffer)
        if buffer is None or buffer.role != "input" or buffer.dtype != "int32":
            raise _wrong(
                f"{self.where}: `{atom}` is not an element of an int32 argument that "
                "no call writes",
                self.src,
                "pass the positions as an integer array",
            )
        if len(atom.index) != len(buffer.shape):
            raise _wrong(
                f"{self.where}: `{atom}` indexes {buffer.name} of shape {buffer.shape}",
                self.src,
            )


def _extremes(
    value: Expr, ranges: Mapping[str, tuple[int, int]]
) -> tuple[int, int] | None:
    """Least and largest value of a linear form over the ranges."""
    low = high = value.constant
    for atom, k in value.terms:
        if not isinstance(atom, Var):
            return None
        ends = [k * end for end in ranges[atom.name]]
        low, high = low + min(ends), high + max(ends)
    return low, high


def _verify_order(program: Program, buffers: Mapping[str, Buffer]) -> None:
    """Every temp is written by an earlier call than those that read it."""
    written: set[str] = set()
    for call, layer in program.instances():
        for access in call.ins:
            buffer = buffers[access.buffer]
            if buffer.role == "temp" and buffer.name not in written:
                raise _wrong(
                    f"call {call.name} in layer {layer} reads {buffer.name} before any "
                    "call writes it",
                    call.src,
                )
        written |= {access.buffer for access in call.outs}
    for output in program.outputs:
        if output.buffer not in buffers:
            raise _wrong(f"output {output.buffer!r} is no buffer")
        buffer = buffers[output.buffer]
        if buffer.role == "temp" and buffer.name not in written:
            raise _wrong(f"output {buffer.name} is never written", buffer.src)
        if output.layer is not None and not 0 <= output.layer < buffer.shape[0]:
            raise _wrong(f"output {buffer.name}: no layer {output.layer}", buffer.src)


def _wrong(what: str, src: SrcInfo | None = None, hint: str = "") -> VerifyError:
    return VerifyError("program", what, src or SrcInfo(), hint)


# --------------------------------------------------------------------------- tasks


def verify_tasks(graph: TaskGraph) -> None:
    """Raise a VerifyError if the tasks of a graph are not well formed."""
    _unique("buffer", ((b.name, b.src) for b in graph.buffers))
    for t, task in enumerate(graph.tasks):
        _verify_ids(graph, t, task)
    _verify_runs(graph)
    verify_elements(graph)


def _verify_runs(graph: TaskGraph) -> None:
    """Tasks of one kind and layer follow each other."""
    runs = [run for run, _ in groupby((t.kind, t.layer) for t in graph.tasks)]
    again = next((run for i, run in enumerate(runs) if run in runs[:i]), None)
    if again is not None:
        kind = graph.kinds[again[0]]
        raise VerifyError(
            "tasks",
            f"tasks of {kind.call} ({kind.mode}), layer {again[1]}, are interrupted by "
            "those of another call",
            kind.src,
            "tasks of one kind and layer must follow each other",
        )


def _verify_ids(graph: TaskGraph, t: int, task: Task) -> None:
    if not 0 <= task.kind < len(graph.kinds):
        raise VerifyError("tasks", f"task {t}: no kind {task.kind}")
    kind = graph.kinds[task.kind]
    inside = len(task.pid) == len(kind.grid) and all(
        0 <= p < n for p, n in zip(task.pid, kind.grid, strict=False)
    )
    parts = kind.parts if kind.mode == "partial" else 1
    if not inside or not 0 <= task.part < parts:
        raise VerifyError(
            "tasks",
            f"task {t}: pid {task.pid} part {task.part} is outside grid {kind.grid} x "
            f"{parts} of call {kind.call}",
            kind.src,
        )


def verify_needs(graph: TaskGraph) -> None:
    """Raise a VerifyError if the needs of a graph are not well formed.

    Whether they are all that tasks need is not asked here.
    """
    if len(graph.needs) != len(graph.tasks):
        raise VerifyError("tasks", f"{len(graph.needs)=} for {len(graph.tasks)=}")
    latest: list[int] = []
    for i, deps in enumerate(graph.dep_sets):
        members = deps.members
        if not members or list(members) != sorted(set(members)) or members[0] < 0:
            raise VerifyError("tasks", f"set {i} is not ascending task ids: {members}")
        latest.append(members[-1])
    for t, needs in enumerate(graph.needs):
        for need in needs:
            if not 0 <= need.deps < len(latest) or latest[need.deps] >= t:
                raise VerifyError("tasks", f"task {t}: {need} is no set of lower ids")
