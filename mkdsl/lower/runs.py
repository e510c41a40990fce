"""What tasks read and write in the buffers that some task writes, as runs of elements.

What it does: gives the boxes of all instances of every access, and the runs of a box.
Needs: a TaskGraph; its needs are not looked at.
Guarantees: every access of every task is there, but for instances without an element.
Why it is correct: the block of an access is a set of runs of elements that lie one
after the other in memory, in whatever view it counts. A dimension whose bounds are
known only at run time counts as the whole dimension here.
Why not touches.py: that serves the pass that finds dependences, this the verifiers
(verify_elements.py, verify_accesses.py), which must not share its faults.
Cost: numpy operations on arrays of an element per task.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mkdsl.lang.expr import Expr, Ops
from mkdsl.lang.program import Access, Axis, Buffer, Dot
from mkdsl.lang.region import region
from mkdsl.lower.ir import FETCH_GATES, Gate, Kind, Task, TaskGraph

Ints = NDArray[np.int64]
Use = Gate | Literal["store"]
ARRAYS = Ops(np.floor_divide, np.mod, np.minimum, np.maximum)


@dataclass(frozen=True, slots=True)
class Touches:
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


def written_touches(graph: TaskGraph) -> Iterator[tuple[Buffer, list[Touches]]]:
    """Every buffer that some task writes, and all accesses to it."""
    written = {a.buffer for k in graph.kinds for a in k.outs}
    touches: dict[str, list[Touches]] = {name: [] for name in sorted(written)}
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
            yield buffer, touches[buffer.name]


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
) -> tuple[Touches, int]:
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
        _, number = distinct(keys, len(tasks))
        run_time = number + (count + 1)
        count = int(run_time.max())
    some = (hi > lo).all(axis=1)
    made = Touches(access, use, tasks[some], lo[some], hi[some], run_time[some])
    return made, count


def _values(value: Expr, env: Mapping[str, Ints]) -> Any:
    return value.evaluate(env, ops=ARRAYS)


def distinct(keys: Sequence[Ints], count: int) -> tuple[Ints, Ints]:
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


def environment(task: Task) -> dict[str, int]:
    """The variables of one task."""
    env = {f"g{i}": p for i, p in enumerate(task.pid)}
    return env | {"layer": task.layer, "part": task.part}


def region_text(graph: TaskGraph, buffer: Buffer, access: Access, task: int) -> str:
    """What an access of a task touches, for a message."""
    return str(region(access, buffer, environment(graph.tasks[task]), access.view))


def ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """All integers of all ranges, and the range of each."""
    sizes = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return starts[owner] + inside, owner


def runs_of(
    view: tuple[int, ...], lo: Ints, hi: Ints, first: int
) -> tuple[Ints, Ints, Ints]:
    """(start, stop, number) of the runs of elements of each box of a view.

    Args:
        first: number of the first box.
    """
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
    inside, box = ranges(np.zeros_like(outer), outer)
    base = np.zeros(len(box), np.int64)
    stride = inner * view[rank - 1]
    for d in reversed(range(rank - 1)):
        size = (hi - lo)[box, d]
        base += (lo[box, d] + inside % size) * stride
        inside = inside // size
        stride *= view[d]
    starts = base + lo[box, rank - 1] * inner
    return starts, base + hi[box, rank - 1] * inner, regions[box]
