"""Check that a TaskGraph computes what its Program says, no more and no less.

What it does: compares tasks and accesses of a graph with the calls that they stand for.
Needs: a verified Program; task ids in range (verify_tasks).
Guarantees: the tasks are the instances of the program's calls in program order, every
grid point and part once. A full kind has the accesses of its call; a partial and a
combine kind have them, too, but for the operands that a split cuts, whose parts cover
the operand once. A buffer between them has one place for every layer, grid point and
part, which that partial writes and that combine reads, and nobody else.
Why it is correct: equality of accesses is equality of expressions in canonical form.
Parts of a depth are equal pieces by their expressions. Parts of a fold depend on the
run-time extent, so their bounds are computed at every block boundary of every extent
and one element beside it: between two boundaries nothing changes but the last row.
Cost: linear in the tasks; a few thousand evaluations per split fold.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NoReturn

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import expr, minimum, var
from mkdsl.lang.program import Access, Axis, Call, Dot, Fold
from mkdsl.lower.ir import Kind, TaskGraph
from mkdsl.lower.text import access_text
from mkdsl.lower.verify import INTERNAL

LAYER, PART = var("layer"), var("part")


def verify_kinds(graph: TaskGraph) -> None:
    """Check the tasks and kinds of a graph against its program.

    Raises:
        VerifyError: they differ; the text names call, mode and operand.
    """
    program = graph.program
    if graph.buffers[: len(program.buffers)] != program.buffers:
        raise _wrong("the buffers are not those of the program")
    at = 0
    known: set[tuple[tuple[int, ...], int]] = set()
    for call, layer in program.instances():
        numbers, at = _instance(graph, call, layer, at)
        key = numbers, id(call)
        if key not in known:
            _Site(graph, call, [graph.kinds[n] for n in numbers], numbers).verify()
            known.add(key)
    if at < len(graph.tasks):
        raise _wrong(f"{len(graph.tasks)} tasks, but the program has {at}")


def _instance(
    graph: TaskGraph, call: Call, layer: int, at: int
) -> tuple[tuple[int, ...], int]:
    """The kinds of the tasks of one call at one layer, and where they end."""
    numbers: list[int] = []
    splits = at < len(graph.tasks) and graph.kinds[graph.tasks[at].kind].mode != "full"
    for mode in ("partial", "combine") if splits else ("full",):
        number = graph.tasks[at].kind if at < len(graph.tasks) else -1
        kind = graph.kinds[number]
        parts = kind.parts if mode == "partial" else 1
        count = parts * math.prod(call.grid)
        points = {
            (t.pid, t.part)
            for t in graph.tasks[at : at + count]
            if (t.kind, t.layer, kind.mode) == (number, layer, mode)
        }
        if len(points) != count:
            raise _wrong(
                f"call {call.name} ({mode}) has {len(points)} different tasks in layer "
                f"{layer} at t{at}, where grid {call.grid} x {parts} parts has {count}",
                call,
            )
        numbers.append(number)
        at += count
    return tuple(numbers), at


class _Site:
    """A call and its kinds."""

    def __init__(
        self, graph: TaskGraph, call: Call, kinds: Sequence[Kind], at: tuple[int, ...]
    ) -> None:
        self._graph, self._call, self._kinds, self._at = graph, call, kinds, at

    def verify(self) -> None:
        """Compare accesses."""
        call = self._call
        for kind in self._kinds:
            if kind.task != call.task or kind.grid != call.grid:
                self._fail(kind, f"task {kind.task.name} over {kind.grid}")
        last = self._kinds[-1]
        self._same(last, "result", last.outs, call.outs)
        if last.mode == "full":
            self._operands(last, tuple(range(len(call.ins))), {})
            return
        partial, combine = self._kinds
        if partial.parts < 2 or partial.parts != combine.parts:
            self._fail(partial, f"{partial.parts} parts, combine of {combine.parts}")
        self._operands(partial, call.task.before, dict(self._cuts()))
        self._operands(combine, call.task.after, {})
        between = combine.ins[len(call.task.after) :]
        if not between or len(between) != len(partial.outs):
            self._fail(combine, f"{len(partial.outs)} values between the parts")
        for n, (write, read) in enumerate(zip(partial.outs, between, strict=True)):
            self._between(n, write, read)

    def _operands(
        self, kind: Kind, operands: tuple[int, ...], cuts: dict[int, Dot | Fold]
    ) -> None:
        if kind.operands != operands:
            self._fail(kind, f"operands {kind.operands}, not {operands}")
        if kind.blocks > 1:
            self._blocks(kind)
        ins = self._call.ins
        for n, i in enumerate(operands):
            if i in cuts:
                self._cut(kind, i, kind.ins[n], cuts[i])
            else:
                self._same(kind, f"operand {i}", kind.ins[n : n + 1], ins[i : i + 1])
        extra = len(kind.ins) - len(operands)
        if extra and kind.mode != "combine":
            self._fail(kind, f"{extra} operands more than its call")

    def _blocks(self, kind: Kind) -> None:
        """An operand comes in blocks if one dot reads it, and nothing else."""
        streams = kind.task.streams
        dot = streams[0] if len(streams) == 1 else None
        if not isinstance(dot, Dot) or dot.lhs is None or kind.mode != "full":
            self._fail(kind, f"{kind.blocks} blocks, but not one dot that reads them")
        depth = kind.ins[kind.operands.index(dot.lhs)].axes[-1]
        if depth.squeezed or depth.extent is not None or depth.size % kind.blocks:
            self._fail(kind, f"{kind.blocks} blocks of a depth of {depth.size}")

    def _same(
        self, kind: Kind, what: str, has: Sequence[Access], wanted: Sequence[Access]
    ) -> None:
        if tuple(has) != tuple(wanted):
            said, meant = (", ".join(map(_text, a)) for a in (has, wanted))
            self._fail(kind, f"{what} is {said}, the call has {meant}")

    def _cuts(self) -> Iterator[tuple[int, Dot | Fold]]:
        """The operands that a split cuts, and the stream that they belong to."""
        for stream in self._call.task.streams:
            both = (stream.lhs, stream.rhs) if isinstance(stream, Dot) else ()
            for i in both or getattr(stream, "operands", ()):
                if i is not None:
                    yield i, stream

    def _cut(self, kind: Kind, i: int, access: Access, stream: Dot | Fold) -> None:
        """The parts of an operand are those of its depth, or of its rows."""
        whole = self._call.ins[i]
        visible = [d for d, axis in enumerate(whole.axes) if not axis.squeezed]
        at = visible[-1 if isinstance(stream, Dot) else 0]
        rest = [
            (a.buffer, a.view, a.axes[:at], a.axes[at + 1 :]) for a in (access, whole)
        ]
        part, axis = access.axes[at], whole.axes[at]
        fits = (
            _pieces(part, axis, kind.parts)
            if isinstance(stream, Dot)
            else self._covers(part, axis, whole.view[at], kind.parts, stream.block)
        )
        if rest[0] != rest[1] or part.squeezed or not fits:
            self._fail(
                kind,
                f"operand {i} is {_text(access)}, whose {kind.parts} parts are not "
                f"{_text(whole)} cut in dimension {at}",
            )

    def _covers(self, part: Axis, whole: Axis, n: int, parts: int, block: int) -> bool:
        """True if the parts of a range of rows follow each other from its start to
        its end, at every run-time extent."""
        edges = [b + d for b in range(0, n + block, block) for d in (-1, 0, 1)]
        grids = [(0,) * len(self._call.grid), tuple(g - 1 for g in self._call.grid)]
        for v, grid in itertools.product([e for e in edges if 0 <= e <= n], grids):
            env = {f"g{i}": p for i, p in enumerate(grid)} | {"layer": 0}
            at, end = _rows(whole, env, v)
            if end - at > whole.size:
                continue
            for p in range(parts):
                first, last = _rows(part, env | {"part": p}, v)
                if first < last and (first != at or last - first > part.size):
                    return False
                at = max(at, last)
            if at != end:
                return False
        return True

    def _between(self, n: int, write: Access, read: Access) -> None:
        """A place for every layer, grid point and part, and the whole tile in it."""
        graph, partial = self._graph, self._kinds[0]
        names = [b.name for b in graph.program.buffers]
        users = {
            i
            for i, k in enumerate(graph.kinds)
            for a in (*k.ins, *k.outs)
            if a.buffer == write.buffer
        }
        ranges = {f"g{i}": size for i, size in enumerate(self._call.grid)}
        ranges["part"] = partial.parts
        own = [axis for axis in write.axes if not axis.start.is_constant]
        places = [str(axis.start) for axis in own if axis.squeezed and axis.size == 1]
        layers = [
            n for n, a in zip(write.view, write.axes, strict=True) if a.start == LAYER
        ]
        if layers:
            ranges["layer"] = layers[0]
        one_each = sorted(places) == sorted(ranges) and len(own) == len(places)
        axes = list(write.axes)
        for d, (axis, size) in enumerate(zip(write.axes, write.view, strict=True)):
            whole = axis.start == expr(0) and axis.size == size and not axis.squeezed
            place = ranges.get(str(axis.start)) == size
            one_each = one_each and (place or whole) and axis.extent is None
            if axis.start == PART:
                axes[d] = Axis(expr(0), partial.parts)
        same = (write.buffer, write.view, tuple(axes)) == (
            read.buffer,
            read.view,
            read.axes,
        )
        if not same or not one_each or write.buffer in names or users != set(self._at):
            self._fail(
                partial,
                f"value {n} for the combine is written to {_text(write)} and read "
                f"from {_text(read)}, not one place for each of {ranges}",
            )

    def _fail(self, kind: Kind, what: str) -> NoReturn:
        raise _wrong(f"call {self._call.name} ({kind.mode}): {what}", self._call)


def _pieces(part: Axis, whole: Axis, parts: int) -> bool:
    """True if the parts are equal pieces, one after the other."""
    size = part.size
    extent = None
    if whole.extent is not None:
        extent = minimum(whole.extent - PART * size, size)
    start = whole.start + PART * size
    return size * parts == whole.size and part == Axis(start, size, False, extent)


def _rows(axis: Axis, env: dict[str, int], scalar: int) -> tuple[int, int]:
    """First row and the one after the last where every run-time scalar is `scalar`."""
    first = axis.start.evaluate(env, lambda buffer, index: scalar)
    if axis.extent is None:
        return first, first + axis.size
    rows = axis.extent.evaluate(env, lambda buffer, index: scalar)
    return first, max(first, first + rows)


def _text(access: Access) -> str:
    return access_text(access, {access.buffer: access.view})


def _wrong(what: str, call: Call | None = None) -> VerifyError:
    if call is None:
        return VerifyError("tasks", what, hint=INTERNAL)
    return VerifyError("tasks", what, call.src, INTERNAL)
