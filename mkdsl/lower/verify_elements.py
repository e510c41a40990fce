"""Check that every element of a temp that is read is written, and by one task.

What it does: compares the elements that tasks write with those that they read, in each
buffer that a program makes for itself; refuses writes to an argument.
Needs: a TaskGraph whose task ids are in range.
Guarantees: no two tasks write one element of a temp, and every element that a task
reads is written by some task. Temps that are written at run-time positions are left
out, and so are reads at such positions.
Why it is correct: the written elements are runs (runs.py); sorted by their starts, two
have an element in common if and only if two neighbours have. If none have, the written
elements below a position are a sum over runs, and those of a run the difference at its
ends.
Cost: sorts of the runs; 0.05 s for 12,091 tasks of Llama-3.2-1B.
Source: sweep over sorted endpoints, as in meetings.py.
"""

import numpy as np

from mkdsl.errors import SrcInfo, VerifyError
from mkdsl.lang.program import Buffer
from mkdsl.lower.ir import TaskGraph
from mkdsl.lower.runs import (
    Ints,
    Touches,
    distinct,
    region_text,
    runs_of,
    written_touches,
)

STAGE = "tasks"


def verify_elements(graph: TaskGraph) -> None:
    """Check the elements of all temps of a graph.

    Raises:
        VerifyError: an element is written twice, or read and not written.
    """
    for buffer, touches in written_touches(graph):
        if buffer.role == "input":
            what = f"{buffer.name} is an argument but some task writes it"
            raise VerifyError(STAGE, what)
        writes = [t for t in touches if t.use == "store"]
        if buffer.role == "temp" and not any(t.run_time.any() for t in writes):
            reads = [t for t in touches if t.use != "store"]
            _Temp(graph, buffer, writes).verify(reads)


class _Temp:
    """The elements of one buffer that are written, as runs sorted by their starts."""

    def __init__(self, graph: TaskGraph, buffer: Buffer, writes: list[Touches]) -> None:
        self._graph, self._buffer, self._writes = graph, buffer, writes
        none = np.zeros(0, np.int64)
        runs = [runs_of(t.access.view, t.lo, t.hi, 0) for t in writes]
        starts, stops, at = (
            np.concatenate([none, *(run[i] for run in runs)]) for i in range(3)
        )
        which = np.repeat(np.arange(len(runs)), [len(run[0]) for run in runs])
        order = np.argsort(starts, kind="stable")
        self._starts, self._stops = starts[order], stops[order]
        self._which, self._at = which[order], at[order]
        self._before = np.cumsum(self._stops - self._starts)

    def verify(self, reads: list[Touches]) -> None:
        """Each element is written once, and those that are read are written."""
        twice = np.flatnonzero(self._starts[1:] < self._stops[:-1])
        if len(twice):
            self._fail_twice(int(twice[0]))
        for touches in reads:
            self._verify_reads(touches)

    def _verify_reads(self, touches: Touches) -> None:
        view = touches.access.view
        strides = np.cumprod([1, *view[:0:-1]])[::-1]
        # Two boxes of one view are equal if their first and last elements are.
        ends = touches.lo @ strides, (touches.hi - 1) @ strides, touches.run_time
        first, _ = distinct(ends, len(touches.tasks))
        first = first[touches.run_time[first] == 0]
        starts, stops, box = runs_of(view, touches.lo[first], touches.hi[first], 0)
        count = len(first)
        found = np.bincount(box, self._below(stops) - self._below(starts), count)
        wanted = np.bincount(box, stops - starts, count)
        missing = np.flatnonzero(found < wanted)
        if len(missing):
            worst = missing[np.argmin(touches.tasks[first[missing]])]
            task = int(touches.tasks[first[worst]])
            where = region_text(self._graph, self._buffer, touches.access, task)
            raise VerifyError(
                STAGE,
                f"{self._name(task)} reads the {int(wanted[worst])} elements {where}, "
                f"of which only {int(found[worst])} are written",
                self._src(task),
                "let the calls that write the array cover it",
            )

    def _below(self, positions: Ints) -> Ints:
        """How many elements below each position are written."""
        run = np.searchsorted(self._starts, positions, "right") - 1
        if not len(self._starts):
            return np.zeros_like(positions)
        over = np.maximum(self._stops[run] - positions, 0)
        return np.where(run >= 0, self._before[run] - over, 0)

    def _fail_twice(self, at: int) -> None:
        pair = [
            (int(self._writes[int(self._which[i])].tasks[self._at[i]]), i)
            for i in (at, at + 1)
        ]
        (first, i), (second, _) = sorted(pair)
        access = self._writes[int(self._which[i])].access
        where = region_text(self._graph, self._buffer, access, first)
        raise VerifyError(
            STAGE,
            f"{where} of {self._buffer.name} is written by {self._name(first)} and by "
            f"{self._name(second)}",
            self._src(second),
            "let every task of a call write a block of its own",
        )

    def _name(self, t: int) -> str:
        task = self._graph.tasks[t]
        return (
            f"call {self._graph.kinds[task.kind].call} {task.pid} of layer {task.layer}"
        )

    def _src(self, t: int) -> SrcInfo:
        return self._graph.kinds[self._graph.tasks[t].kind].src
