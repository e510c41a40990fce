"""Brute force: which elements every task touches, and which pairs of tasks meet.

Shares nothing with the passes but which loader brings an operand.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkdsl.lang.expr import Expr
from mkdsl.lang.program import Access
from mkdsl.lower.ir import GATES, Gate, TaskGraph
from mkdsl.lower.touches import gate_of


@dataclass(frozen=True, slots=True)
class Touched:
    """Elements of each buffer as bits: read at each gate, and written."""

    reads: dict[Gate, dict[str, int]]
    writes: dict[str, int]

    @property
    def all_reads(self) -> dict[str, int]:
        """What it reads at any gate."""
        both: dict[str, int] = {}
        for reads in self.reads.values():
            for name, bits in reads.items():
                both[name] = both.get(name, 0) | bits
        return both


def mask_of(access: Access, env: dict[str, int], n: Sequence[int]) -> Any:
    """The elements of an access where the scalars are n: bool, flat."""

    def value(e: Expr) -> int:
        return e.evaluate(env, lambda buffer, index: n[index[0]])

    box: list[slice] = []
    for axis, size in zip(access.axes, access.view, strict=True):
        start = value(axis.start)
        length = axis.size
        if axis.extent is not None:
            length = min(length, value(axis.extent))
        low = min(max(0, start), size)
        box.append(slice(low, min(size, max(low, start + length))))
    mask = np.zeros(access.view, bool)
    mask[tuple(box)] = True
    return mask.ravel()


def environment_of(graph: TaskGraph, t: int) -> dict[str, int]:
    """The variables of a task."""
    one = graph.tasks[t]
    env = {f"g{i}": p for i, p in enumerate(one.pid)}
    return env | {"layer": one.layer, "part": one.part}


def elements(graph: TaskGraph, n: Sequence[int]) -> list[Touched]:
    """What every task touches where the scalars are n."""
    every: list[Touched] = []
    for t, one in enumerate(graph.tasks):
        kind, env = graph.kinds[one.kind], environment_of(graph, t)
        touched = Touched({gate: {} for gate in GATES}, {})
        assert kind.blocks == 1
        for i, access in enumerate(kind.ins):
            _add(touched.reads[gate_of(kind, i)], access, env, n)
        for access in kind.outs:
            _add(touched.writes, access, env, n)
        every.append(touched)
    return every


def _add(
    to: dict[str, int], access: Access, env: dict[str, int], n: Sequence[int]
) -> None:
    bits = np.packbits(mask_of(access, env, n), bitorder="little")
    to[access.buffer] = to.get(access.buffer, 0) | int.from_bytes(bits, "little")


def meet(a: dict[str, int], b: dict[str, int]) -> bool:
    """Whether two sets of elements have one in common."""
    return any(bits & b.get(name, 0) for name, bits in a.items())


def same_call(graph: TaskGraph, i: int, j: int) -> bool:
    """Whether two tasks are of one call."""
    one, other = graph.tasks[i], graph.tasks[j]
    return (one.kind, one.layer) == (other.kind, other.layer)


def conflicts(graph: TaskGraph, touched: Sequence[Touched]) -> list[tuple[int, int]]:
    """(earlier, later) of all tasks that must be ordered."""
    return [
        (i, j)
        for i, j in itertools.combinations(range(len(touched)), 2)
        if meet(touched[i].writes, touched[j].writes)
        or meet(touched[i].writes, touched[j].all_reads)
        or meet(touched[i].all_reads, touched[j].writes)
    ]


def illegal(graph: TaskGraph, touched: Sequence[Touched]) -> list[tuple[int, int]]:
    """Pairs of one call of which the later touches what the earlier has written."""
    return [
        (i, j)
        for i, j in itertools.combinations(range(len(touched)), 2)
        if same_call(graph, i, j)
        and (
            meet(touched[i].writes, touched[j].writes)
            or meet(touched[i].writes, touched[j].all_reads)
        )
    ]


def unwritten(graph: TaskGraph, touched: Sequence[Touched]) -> bool:
    """Whether some task reads an element of a temp that no earlier one has written."""
    temps = {b.name for b in graph.buffers if b.role == "temp"}
    written: dict[str, int] = {}
    for one in touched:
        for name, bits in one.all_reads.items():
            if name in temps and bits & ~written.get(name, 0):
                return True
        for name, bits in one.writes.items():
            written[name] = written.get(name, 0) | bits
    return False


def closure(count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Per task, the set of all tasks before it, by pairs of (lower id, higher id)."""
    before = [0] * count
    for i, j in sorted(pairs, key=lambda p: p[1]):
        before[j] |= 1 << i | before[i]
    return before
