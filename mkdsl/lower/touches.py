"""Which region of which buffer every task reads and writes.

What it does: evaluates the accesses of all tasks to buffers that some task writes.
Needs: a TaskGraph; neither dependences nor an order.
Guarantees: equal regions of one buffer have one number; all regions of a buffer count
in one shape, the common refinement of the views in which the program uses it.
Why it is correct: a buffer that nothing writes takes no part in any dependence; regions
are those of region.py.
Cost: linear in the accesses. Bounds are computed once per value of the variables they
depend on, so a task costs a few look-ups.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mkdsl.lang.program import Access, Buffer
from mkdsl.lang.region import AccessRegions, Region, refine
from mkdsl.lower.blocked import block_accesses
from mkdsl.lower.ir import Gate, Kind, Loader, Task, TaskGraph


@dataclass(frozen=True, slots=True)
class Touch:
    """One region of one buffer that a task reads or writes, by its number there."""

    buffer: str
    region: int
    gate: Gate = "resident"


@dataclass(slots=True)
class Uses:
    """The distinct regions of a buffer and the tasks that read and write them."""

    regions: list[Region] = field(default_factory=list[Region])
    numbers: dict[tuple[object, ...], int] = field(
        default_factory=dict[tuple[object, ...], int]
    )
    writers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    readers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def number(self, region: Region) -> int:
        """The number of a region of this buffer.

        Run-time bounds are told apart by identity: hashing them costs more than the
        little that merging equal regions of different accesses would save. The first
        region of a number is kept, and with it the identities of its bounds.
        """
        box = (i if i.is_constant else id(i) for i in region.box)
        known = self.numbers.setdefault((region.exact, *box), len(self.regions))
        if known == len(self.regions):
            self.regions.append(region)
        return known


@dataclass(frozen=True, slots=True)
class Touches:
    """Every access of every task to a buffer that some task writes."""

    uses: dict[str, Uses]
    reads: tuple[tuple[Touch, ...], ...]
    writes: tuple[tuple[Touch, ...], ...]


def touches_of(graph: TaskGraph) -> Touches:
    """The touches of all tasks of a graph."""
    written = {a.buffer for k in graph.kinds for a in k.outs}
    shapes = common_shapes(graph)
    buffers = {b.name: b for b in graph.buffers}
    uses = {b.name: Uses() for b in graph.buffers if b.name in written}
    makers = [_makers(k, buffers, shapes, uses) for k in graph.kinds]
    reads: list[tuple[Touch, ...]] = []
    writes: list[tuple[Touch, ...]] = []
    for t, task in enumerate(graph.tasks):
        env = environment(task)
        ins, outs = makers[task.kind]
        mine = tuple([m.touch(env) for m in ins])
        reads.append(tuple(dict.fromkeys(mine)))
        writes.append(tuple([m.touch(env) for m in outs]))
        for touch in reads[-1]:
            _append(uses[touch.buffer].readers, touch.region, t)
        for touch in writes[-1]:
            _append(uses[touch.buffer].writers, touch.region, t)
    return Touches(uses, tuple(reads), tuple(writes))


def _append(tasks: dict[int, list[int]], region: int, task: int) -> None:
    """Add a task to those of a region, once."""
    known = tasks.setdefault(region, [])
    if not known or known[-1] != task:
        known.append(task)


class _Maker:
    """The touches of one access of a kind, one per region."""

    def __init__(self, regions: AccessRegions, gate: Gate, uses: Uses) -> None:
        self._regions = regions
        self._gate: Gate = gate
        self._uses = uses
        self._known: dict[tuple[int, ...], Touch] = {}

    def touch(self, env: dict[str, int]) -> Touch:
        key = tuple([env[v] for v in self._regions.variables])
        known = self._known.get(key)
        if known is None:
            region = self._regions.at(env)
            number = self._uses.number(region)
            known = self._known[key] = Touch(region.buffer, number, self._gate)
        return known


def _makers(
    kind: Kind,
    buffers: dict[str, Buffer],
    shapes: dict[str, tuple[int, ...]],
    uses: dict[str, Uses],
) -> tuple[list[_Maker], list[_Maker]]:
    def maker(access: Access, gate: Gate = "resident") -> _Maker:
        name = access.buffer
        regions = AccessRegions(access, buffers[name], shapes[name])
        return _Maker(regions, gate, uses[name])

    ins = [
        maker(block, gate)
        for i, access in enumerate(kind.ins)
        if access.buffer in uses
        for gate, block in loads_of(kind, i)
    ]
    return ins, [maker(access) for access in kind.outs]


def loads_of(kind: Kind, i: int) -> Iterator[tuple[Gate, Access]]:
    """The loads of the i-th operand of a kind, and which gate holds each back."""
    if gate_of(kind, i) == "stream":
        yield "stream", kind.ins[i]
    else:
        yield from block_accesses(kind, i)


def gate_of(kind: Kind, i: int) -> Loader:
    """Which loader brings the i-th operand of a kind."""
    if i >= len(kind.operands):
        return "resident"
    use = kind.task.params[kind.operands[i]].use
    return "stream" if use == "stream" else "resident"


def environment(task: Task) -> dict[str, int]:
    """The values of the variables of a task."""
    env = {f"g{i}": p for i, p in enumerate(task.pid)}
    env["layer"], env["part"] = task.layer, task.part
    return env


def common_shapes(graph: TaskGraph) -> dict[str, tuple[int, ...]]:
    """Per buffer the common refinement of the views in which it is accessed."""
    views: dict[str, dict[tuple[int, ...], None]] = {
        b.name: {b.shape: None} for b in graph.buffers
    }
    for kind in graph.kinds:
        for access in (*kind.ins, *kind.outs):
            views[access.buffer][access.view] = None
    return {name: refine(tuple(shapes)) for name, shapes in views.items()}
