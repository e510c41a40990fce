"""Which tasks write what a task reads or writes, from the accesses alone.

What it does: finds, for every region that a task touches in a buffer that some task
writes, all tasks that write an element of it, and all that read one.
Needs: a TaskGraph; its needs are not looked at.
Guarantees: no pair is missing: a pair is left out only if the two accesses share no
element, whatever the run-time scalars are.
Why it is correct: runs of elements (runs.py) compare as they are, whatever views the
blocks count in. The ends of all runs of a buffer cut it into segments, a run is a range
of segments, and two blocks meet if they have a segment in common. A dimension whose
bounds are known only at run time counts as the whole dimension here; pairs that meet
then, and have such a dimension, are asked of `overlap` (region.py).
Cost: numpy sorts of the runs, and the pairs that are found. Llama-3.2-1B on a 2-core
CPU that others use too (2026-11-30): 13,117 tasks (batch 8) 0.4 to 0.5 s, most of it
proofs about the rows of the cache; 25,688 (batch 1, tiles of 16 rows) 0.1 s.
Source: sweep over sorted endpoints, as for intersections of intervals.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkdsl.lang.program import Access, Buffer
from mkdsl.lang.region import AccessRegions, Memo, overlap, refine
from mkdsl.lower.ir import TaskGraph
from mkdsl.lower.runs import (
    Ints,
    Touches,
    Use,
    distinct,
    environment,
    ranges,
    runs_of,
    written_touches,
)


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


def find_meetings(graph: TaskGraph) -> Iterator[BufferMeetings]:
    """What meets in each buffer that some task writes."""
    for buffer, touches in written_touches(graph):
        yield _Buffer(graph, buffer, touches).meetings()


def _table(regions: Ints, tasks: Ints, count: int) -> Table:
    """Pairs of region and task, in any order and perhaps several times, as lists."""
    first, _ = distinct((tasks, regions), len(tasks))
    regions, tasks = regions[first], tasks[first]
    return Table(np.searchsorted(regions, np.arange(count + 1)), tasks)


class _Buffer:
    """The regions of one buffer, numbered, and what meets what."""

    def __init__(
        self, graph: TaskGraph, buffer: Buffer, touches: Sequence[Touches]
    ) -> None:
        self._graph, self._buffer = graph, buffer
        self._text: list[tuple[Access, int]] = []
        self._late: list[int] = []
        views: dict[tuple[int, ...], list[Touches]] = {}
        for t in touches:
            views.setdefault(t.access.view, []).append(t)
        self._shape = refine((buffer.shape, *views))
        tasks: list[Ints] = []
        regions: list[Ints] = []
        uses: list[Use] = []
        runs: list[tuple[Ints, Ints, Ints]] = []
        for view, group in views.items():
            numbers, boxes = self._number(view, group)
            runs.append(runs_of(view, *boxes, len(self._text) - len(boxes[0])))
            regions += numbers
            tasks += [t.tasks for t in group]
            uses.extend(t.use for t in group)
        self._touches = list(zip(tasks, regions, uses, strict=True))
        self._runs = [np.concatenate(x) for x in zip(*runs, strict=True)]

    def _number(
        self, view: tuple[int, ...], group: Sequence[Touches]
    ) -> tuple[list[Ints], tuple[Ints, Ints]]:
        """The regions of the touches in one view, and the distinct boxes."""
        lo, hi = (np.concatenate([getattr(t, x) for t in group]) for x in ("lo", "hi"))
        late = np.concatenate([t.run_time for t in group])
        strides = np.array(
            [math.prod(view[d + 1 :]) for d in range(len(view))], np.int64
        )
        # Two boxes of one view are equal if their first and last elements are.
        first, numbers = distinct((lo @ strides, (hi - 1) @ strides, late), len(lo))
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
        segments, run = ranges(
            np.searchsorted(cuts, starts), np.searchsorted(cuts, stops)
        )
        region = regions[run]
        stored = written[region]
        order = np.argsort(segments[stored], kind="stable")
        there, who = segments[stored][order], region[stored][order]
        at, asked = ranges(
            np.searchsorted(there, segments, "left"),
            np.searchsorted(there, segments, "right"),
        )
        left, right = region[asked], who[at]
        left, right = np.concatenate([left, right]), np.concatenate([right, left])
        first, _ = distinct((right, left), len(left))
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
                env = environment(self._graph.tasks[task])
                known[number] = makers[id(access)].at(env)
            return known[number]

        for i in ask.tolist():
            how = overlap(region(int(left[i])), region(int(right[i])), memo)
            kept[i], sure[i] = how != "disjoint", how == "overlap"
        return left[kept], right[kept], sure[kept]


def _follow(left: Ints, right: Ints, tasks: Table, count: int) -> Table:
    """Per left region, the tasks of all its right regions."""
    at, pair = ranges(tasks.starts[right], tasks.starts[right + 1])
    return _table(left[pair], tasks.tasks[at], count)
