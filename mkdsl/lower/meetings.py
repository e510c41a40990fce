"""Which tasks write what a task reads or writes, from the accesses alone.

What it does: finds, for every region that a task touches in a buffer that some task
writes, all tasks that write an element of it, and all that read one.
Needs: a TaskGraph; its needs are not looked at.
Guarantees: no pair is missing: a pair is left out only if the two accesses share no
element, whatever the run-time scalars are.
Why it is correct: the block of an access is a set of runs of elements that lie one
after the other in memory, in whatever view it counts, so blocks of different views
compare as they are. The ends of all runs of a buffer cut it into segments, a run is a
range of segments, and two blocks meet if they have a segment in common. A dimension
whose bounds are known only at run time counts as the whole dimension here; pairs that
meet then, and have such a dimension, are asked of `overlap` (region.py).
Why not region_index.py and touches.py: those serve the pass that finds dependences. The
proof at the end of the compiler (verify_accesses.py) must not share its faults.
Cost: numpy sorts of the runs, and the pairs that are found. Llama-3.2-1B on a 2-core
CPU that others use too (2026-11-30): 13,117 tasks (batch 8) 0.4 to 0.5 s, most of it
proofs about the rows of the cache; 25,688 (batch 1, tiles of 16 rows) 0.1 s.
Source: sweep over sorted endpoints, as for intersections of intervals.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mkdsl.lang.expr import Expr, Ops
from mkdsl.lang.program import Access, Axis, Buffer, Dot
from mkdsl.lang.region import AccessRegions, Memo, overlap, refine
from mkdsl.lower.ir import FETCH_GATES, Gate, Kind, TaskGraph

Ints = NDArray[np.int64]
Use = Gate | Literal["store"]
ARRAYS = Ops(np.floor_divide, np.mod, np.minimum, np.maximum)


@dataclass(frozen=True, slots=True)
class Table:
    """Lists of tasks, ascending, one per region: tasks[starts[r] : starts[r + 1]]."""

    starts: Ints
    tasks: Ints

    def of(self, region: int) -> list[int]:
        """The tasks of a region."""
        return self.tasks[self.starts[region] : self.starts[region + 1]].tolist()


@dataclass(frozen=True, slots=True)
class BufferMeetings:
    """What meets in one buffer.

    Attributes:
        uses: (task, region, use) of every access that another task's write meets.
        writers: per region, all tasks that write an element of it.
        readers: per region, all tasks that read an element of it.
        sure: False for the writers of a region if some of them may not meet it.
        text: per region, an access and a task that touches it, to print it.
    """

    buffer: Buffer
    uses: list[tuple[int, int, Use]]
    writers: Table
    readers: Table
    sure: NDArray[np.bool_]
    text: list[tuple[Access, int]]


@dataclass(frozen=True, slots=True)
class _Touches:
    """All instances of one access that have an element.

    Attributes:
        lo, hi: [instances, rank] of the view; run-time dimensions are whole.
        run_time: per instance, the number of its run-time bounds, 0 if it has none.
    """

    access: Access
    use: Use
    tasks: Ints
    lo: Ints
    hi: Ints
    run_time: Ints


def find_meetings(graph: TaskGraph) -> Iterator[BufferMeetings]:
    """What meets in each buffer that some task writes."""
    written = {a.buffer for k in graph.kinds for a in k.outs}
    touches: dict[str, list[_Touches]] = {name: [] for name in sorted(written)}
    count = 0
    for kind, tasks in zip(graph.kinds, _tasks_of_kinds(graph), strict=True):
        env = _environments(graph, tasks)
        for access, use in _accesses(kind):
            if access.buffer not in written or not len(tasks):
                continue
            made, count = _touch(access, use, tasks, env, count)
            touches[access.buffer].append(made)
    for buffer in graph.buffers:
        if touches.get(buffer.name):
            yield _Buffer(graph, buffer, touches[buffer.name]).meetings()


def _tasks_of_kinds(graph: TaskGraph) -> list[Ints]:
    kinds = np.array([t.kind for t in graph.tasks], np.int64)
    return [np.flatnonzero(kinds == k) for k in range(len(graph.kinds))]


def _environments(graph: TaskGraph, tasks: Ints) -> dict[str, Ints]:
    """The variables of tasks of one kind, an array each."""
    rows = [(t.layer, t.part, *t.pid) for t in (graph.tasks[i] for i in tasks)]
    columns = np.array(rows, np.int64).reshape(len(rows), -1).T
    names = ("layer", "part", *(f"g{i}" for i in range(len(columns) - 2)))
    return dict(zip(names, columns, strict=False))


def _accesses(kind: Kind) -> Iterator[tuple[Access, Use]]:
    """Every block that a task of a kind moves, and who has to wait for it.

    A combine has the operand of a stream only for its extents.
    """
    for n, access in enumerate(kind.ins):
        named = n < len(kind.operands)
        stream = named and kind.task.params[kind.operands[n]].use == "stream"
        if not stream or kind.mode != "combine":
            if stream or kind.blocks == 1 or n != _blocked(kind):
                yield access, "stream" if stream else "resident"
            else:
                yield from _blocks(kind, access)
    for access in kind.outs:
        yield access, "store"


def _blocked(kind: Kind) -> int:
    """Position of the operand that comes in blocks: the left side of the one dot."""
    (dot,) = kind.task.streams
    assert isinstance(dot, Dot)
    assert dot.lhs is not None
    return kind.operands.index(dot.lhs)


def _blocks(kind: Kind, access: Access) -> Iterator[tuple[Access, Use]]:
    *outer, last = access.axes
    size = last.size // kind.blocks
    for k in range(kind.blocks):
        axes = (*outer, Axis(last.start + size * k, size))
        yield replace(access, axes=axes), FETCH_GATES[k]


def _touch(
    access: Access, use: Use, tasks: Ints, env: Mapping[str, Ints], count: int
) -> tuple[_Touches, int]:
    shape = len(tasks), len(access.view)
    lo, hi = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    names = set[str]()
    late = False
    for d, (axis, n) in enumerate(zip(access.axes, access.view, strict=True)):
        bounds = (axis.start, *(() if axis.extent is None else (axis.extent,)))
        if any(b.reads for b in bounds):
            late, hi[:, d] = True, n
            names |= {v for b in bounds for v in b.variables}
            continue
        start = _values(axis.start, env)
        size: Any = axis.size
        if axis.extent is not None:
            size = np.minimum(size, _values(axis.extent, env))
        lo[:, d] = np.clip(start, 0, n)
        hi[:, d] = np.clip(start + size, 0, n)
    run_time = np.zeros(len(tasks), np.int64)
    if late:
        keys = [env[v] for v in sorted(names)]
        _, number = _distinct(keys, len(tasks))
        run_time = number + (count + 1)
        count = int(run_time.max())
    some = (hi > lo).all(axis=1)
    made = _Touches(access, use, tasks[some], lo[some], hi[some], run_time[some])
    return made, count


def _values(value: Expr, env: Mapping[str, Ints]) -> Any:
    return value.evaluate(env, ops=ARRAYS)


def _distinct(keys: Sequence[Ints], count: int) -> tuple[Ints, Ints]:
    """One position of each distinct row of keys, and the number of each row."""
    if not keys or not count:
        return np.zeros(min(count, 1), np.int64), np.zeros(count, np.int64)
    order = np.lexsort(keys)
    new = np.zeros(count, bool)
    new[0] = True
    for key in keys:
        new[1:] |= key[order[1:]] != key[order[:-1]]
    numbers = np.empty(count, np.int64)
    numbers[order] = np.cumsum(new) - 1
    return order[new], numbers


def _ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """All integers of all ranges, and the range of each."""
    sizes = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return starts[owner] + inside, owner


def _table(regions: Ints, tasks: Ints, count: int) -> Table:
    """Pairs of region and task, in any order and perhaps several times, as lists."""
    first, _ = _distinct((tasks, regions), len(tasks))
    regions, tasks = regions[first], tasks[first]
    return Table(np.searchsorted(regions, np.arange(count + 1)), tasks)


class _Buffer:
    """The regions of one buffer, numbered, and what meets what."""

    def __init__(
        self, graph: TaskGraph, buffer: Buffer, touches: Sequence[_Touches]
    ) -> None:
        self._graph, self._buffer = graph, buffer
        self._text: list[tuple[Access, int]] = []
        self._late: list[int] = []
        views: dict[tuple[int, ...], list[_Touches]] = {}
        for t in touches:
            views.setdefault(t.access.view, []).append(t)
        self._shape = refine((buffer.shape, *views))
        tasks: list[Ints] = []
        regions: list[Ints] = []
        uses: list[Use] = []
        runs: list[tuple[Ints, Ints, Ints]] = []
        for view, group in views.items():
            numbers, boxes = self._number(view, group)
            runs.append(_runs(view, *boxes, len(self._text) - len(boxes[0])))
            regions += numbers
            tasks += [t.tasks for t in group]
            uses.extend(t.use for t in group)
        self._touches = list(zip(tasks, regions, uses, strict=True))
        self._runs = [np.concatenate(x) for x in zip(*runs, strict=True)]

    def _number(
        self, view: tuple[int, ...], group: Sequence[_Touches]
    ) -> tuple[list[Ints], tuple[Ints, Ints]]:
        """The regions of the touches in one view, and the distinct boxes."""
        lo, hi = (np.concatenate([getattr(t, x) for t in group]) for x in ("lo", "hi"))
        late = np.concatenate([t.run_time for t in group])
        strides = np.array(
            [math.prod(view[d + 1 :]) for d in range(len(view))], np.int64
        )
        # Two boxes of one view are equal if their first and last elements are.
        first, numbers = _distinct((lo @ strides, (hi - 1) @ strides, late), len(lo))
        numbers = numbers + len(self._text)
        sizes = [len(t.tasks) for t in group]
        owner = np.repeat(np.arange(len(group)), sizes)
        task = np.concatenate([t.tasks for t in group])
        self._text += [
            (group[int(owner[i])].access, int(task[i])) for i in first.tolist()
        ]
        self._late += late[first].tolist()
        return np.split(numbers, np.cumsum(sizes)[:-1]), (lo[first], hi[first])

    def meetings(self) -> BufferMeetings:
        """Who meets whom."""
        count = len(self._text)
        tasks_of: dict[bool, Table] = {}
        none = np.zeros(0, np.int64)
        for stored in (True, False):
            mine = [(t, r) for t, r, use in self._touches if (use == "store") == stored]
            tasks, regions = (
                np.concatenate([none, *(x[i] for x in mine)]) for i in (0, 1)
            )
            tasks_of[stored] = _table(regions, tasks, count)
        left, right, sure = self._pairs(np.diff(tasks_of[True].starts) > 0)
        everywhere = np.ones(count, bool)
        everywhere[left[~sure]] = False
        writers = _follow(left, right, tasks_of[True], count)
        if self._buffer.role == "temp":
            # What is written once is read after it, or the reader is refused.
            left, right = left[:0], right[:0]
        readers = _follow(left, right, tasks_of[False], count)
        return BufferMeetings(
            self._buffer,
            list(self._interesting(writers, readers)),
            writers,
            readers,
            everywhere,
            self._text,
        )

    def _interesting(
        self, writers: Table, readers: Table
    ) -> Iterator[tuple[int, int, Use]]:
        """The touches that some other task meets, or that need a writer."""
        lone = (np.diff(writers.starts) == 1) & (np.diff(readers.starts) == 0)
        for tasks, regions, use in self._touches:
            others = np.ones(len(tasks), bool)
            if use == "store":
                others = ~lone[regions]
            for t, r in zip(tasks[others].tolist(), regions[others], strict=True):
                yield t, int(r), use

    def _pairs(
        self, written: NDArray[np.bool_]
    ) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """(region, region, sure) of which one is written and which have an element in
        common, in both directions, each region with itself."""
        starts, stops, regions = self._runs
        cuts = np.unique(np.concatenate([starts, stops]))
        segments, run = _ranges(
            np.searchsorted(cuts, starts), np.searchsorted(cuts, stops)
        )
        region = regions[run]
        stored = written[region]
        order = np.argsort(segments[stored], kind="stable")
        there, who = segments[stored][order], region[stored][order]
        at, asked = _ranges(
            np.searchsorted(there, segments, "left"),
            np.searchsorted(there, segments, "right"),
        )
        left, right = region[asked], who[at]
        left, right = np.concatenate([left, right]), np.concatenate([right, left])
        first, _ = _distinct((right, left), len(left))
        left, right = left[first], right[first]
        return self._proved(left, right)

    def _proved(self, left: Ints, right: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """The pairs without those whose run-time bounds are proved apart."""
        late = np.array(self._late, np.int64) > 0
        ask = np.flatnonzero(late[left] | late[right])
        kept, sure = np.ones(len(left), bool), np.ones(len(left), bool)
        memo: Memo = {}
        makers: dict[int, AccessRegions] = {}
        known: dict[int, Any] = {}

        def region(number: int) -> Any:
            if number not in known:
                access, task = self._text[number]
                if id(access) not in makers:
                    makers[id(access)] = AccessRegions(
                        access, self._buffer, self._shape
                    )
                one = self._graph.tasks[task]
                env = {f"g{i}": p for i, p in enumerate(one.pid)}
                env |= {"layer": one.layer, "part": one.part}
                known[number] = makers[id(access)].at(env)
            return known[number]

        for i in ask.tolist():
            how = overlap(region(int(left[i])), region(int(right[i])), memo)
            kept[i], sure[i] = how != "disjoint", how == "overlap"
        return left[kept], right[kept], sure[kept]


def _follow(left: Ints, right: Ints, tasks: Table, count: int) -> Table:
    """Per left region, the tasks of all its right regions."""
    at, pair = _ranges(tasks.starts[right], tasks.starts[right + 1])
    return _table(left[pair], tasks.tasks[at], count)


def _runs(
    view: tuple[int, ...], lo: Ints, hi: Ints, first: int
) -> tuple[Ints, Ints, Ints]:
    """(start, stop, region) of the runs of elements of each box of a view."""
    rank, inner = len(view), 1
    while (
        rank > 1
        and (lo[:, rank - 1] == 0).all()
        and (hi[:, rank - 1] == view[rank - 1]).all()
    ):
        rank, inner = rank - 1, inner * view[rank - 1]
    regions = np.arange(first, first + len(lo))
    if not rank:
        return np.zeros_like(regions), np.ones_like(regions), regions
    outer = (hi - lo)[:, : rank - 1].prod(axis=1)
    inside, box = _ranges(np.zeros_like(outer), outer)
    base = np.zeros(len(box), np.int64)
    stride = inner * view[rank - 1]
    for d in reversed(range(rank - 1)):
        size = (hi - lo)[box, d]
        base += (lo[box, d] + inside % size) * stride
        inside = inside // size
        stride *= view[d]
    starts = base + lo[box, rank - 1] * inner
    return starts, base + hi[box, rank - 1] * inner, regions[box]
