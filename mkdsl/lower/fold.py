"""A graph of thousands of tasks as one that can be read: folded by call and layer.

    Folded   ::= FoldedTask*, Edge*          a node per kind, however many layers it has
    Edge     ::= source -> target: pairs of tasks, the buffers between them, why
    FoldedEvents ::= FoldedTask*, EventGroup*
    EventGroup   ::= events that tasks of the same kinds signal and await

An edge `loops` if it goes from a layer to the next: without those, sources come before
targets. Counts are of the whole program, for pictures and texts; no pass uses them.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mkdsl.lang.program import Access, Program
from mkdsl.lower.ir import EventGraph, Kind, TaskGraph


@dataclass(frozen=True, slots=True)
class FoldedTask:
    """All tasks of a kind.

    Attributes:
        name: of its call, and its mode.
        tasks, layers: how many, in how many layers.
        reads, streams, writes: the block of each operand or result as text: what is
            resident, what passes through pages, what it writes.
    """

    name: str
    tasks: int
    layers: int
    reads: tuple[str, ...]
    streams: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """Dependences between tasks of two kinds (indices of the nodes)."""

    source: int
    target: int
    pairs: int
    buffers: tuple[str, ...]
    why: str

    @property
    def loops(self) -> bool:
        """Whether it goes from one layer to the next."""
        return self.source >= self.target


@dataclass(frozen=True, slots=True)
class Folded:
    """Kinds in program order, and the dependences between them."""

    tasks: tuple[FoldedTask, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class EventGroup:
    """Events that the same kinds signal and the same kinds await.

    Attributes:
        sources, targets: indices of kinds.
        events: how many.
        thresholds: the least and the most.
        waits: tests of their counters.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    events: int
    thresholds: tuple[int, int]
    waits: int


@dataclass(frozen=True, slots=True)
class FoldedEvents:
    """Kinds in program order, and the events between them."""

    tasks: tuple[FoldedTask, ...]
    groups: tuple[EventGroup, ...]


def fold_program(program: Program) -> Folded:
    """The calls of a program, and which buffers go from one to another."""
    calls = list(program.calls())
    number = {call: i for i, call in enumerate(calls)}
    counts: Counter[int] = Counter()
    layers: Counter[int] = Counter()
    # A layer reads what it has written itself of a state, since each has its own part.
    states = {b.name for b in program.buffers if b.role == "state"}
    writers: dict[str, tuple[int, int]] = {}
    edges: dict[tuple[int, int], dict[str, None]] = {}
    pairs: Counter[tuple[int, int]] = Counter()
    for call, layer in program.instances():
        me = number[call]
        counts[me] += math.prod(call.grid)
        layers[me] += 1
        sources: dict[int, None] = {}
        for name in (a.buffer for a in call.ins if a.buffer in writers):
            source, where = writers[name]
            if name not in states or where == layer:
                edges.setdefault((source, me), {})[name] = None
                sources[source] = None
        pairs.update((source, me) for source in sources)
        writers |= {access.buffer: (me, layer) for access in call.outs}
    tasks = tuple(
        FoldedTask(
            call.name,
            counts[i],
            layers[i],
            *_blocks(call.ins, [p.use == "stream" for p in call.task.params]),
            tuple(dict.fromkeys(map(block_text, call.outs))),
        )
        for i, call in enumerate(calls)
    )
    made = tuple(
        Edge(a, b, pairs[a, b], tuple(names), "RAW")
        for (a, b), names in sorted(edges.items())
    )
    return Folded(tasks, made)


def fold_tasks(graph: TaskGraph) -> Folded:
    """The kinds of a graph and their dependences; none before `dependences`."""
    members = [Counter(graph.tasks[m].kind for m in d.members) for d in graph.dep_sets]
    pairs: Counter[tuple[int, int]] = Counter()
    whys: dict[tuple[int, int], dict[str, None]] = {}
    for task, needs in zip(graph.tasks, graph.needs, strict=False):
        for need in needs:
            for source, count in members[need.deps].items():
                pairs[source, task.kind] += count
                whys.setdefault((source, task.kind), {})[need.why] = None
    edges = tuple(
        Edge(a, b, n, _between(graph.kinds[a], graph.kinds[b]), "+".join(whys[a, b]))
        for (a, b), n in sorted(pairs.items())
    )
    return Folded(tuple(_tasks(graph)), edges)


def fold_events(events: EventGraph) -> FoldedEvents:
    """The kinds of a graph and the events between them."""
    tasks = events.graph.tasks
    awaited: dict[int, set[int]] = {}
    waits: Counter[int] = Counter()
    for task, its in zip(tasks, events.waits, strict=True):
        for wait in its:
            awaited.setdefault(wait.event, set()).add(task.kind)
            waits[wait.event] += 1
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for e, event in enumerate(events.events):
        sources = tuple(sorted({tasks[m].kind for m in event.members}))
        groups.setdefault((sources, tuple(sorted(awaited.get(e, ())))), []).append(e)
    made: list[EventGroup] = []
    for (sources, targets), some in groups.items():
        sizes = [events.events[e].threshold for e in some]
        count = sum(waits[e] for e in some)
        both = min(sizes), max(sizes)
        made.append(EventGroup(sources, targets, len(some), both, count))
    return FoldedEvents(tuple(_tasks(events.graph)), tuple(made))


def block_text(access: Access) -> str:
    """The block of an access: the buffer, and the sizes of more than one element.

    >>> from mkdsl.lang.expr import expr, var
    >>> from mkdsl.lang.program import Axis
    >>> axes = (Axis(var("layer"), 1), Axis(var("g0") * 64, 64), Axis(expr(0), 2048))
    >>> block_text(Access("params.q", (16, 512, 2048), axes))
    'q[64 x 2048]'
    >>> block_text(Access("weights.2", (4,), axes[:1]))
    'weights.2[1]'
    """
    sizes = [str(a.size) for a in access.axes if a.size > 1]
    return f"{short_name(access.buffer)}[{' x '.join(sizes) or '1'}]"


def short_name(buffer: str) -> str:
    """The last part of a dotted name, with the one before if it is a number."""
    *_, before, last = ("", *buffer.split("."))
    return f"{before}.{last}" if last.isdecimal() else last


def _tasks(graph: TaskGraph) -> Iterator[FoldedTask]:
    counts = Counter(t.kind for t in graph.tasks)
    layers = Counter(kind for kind, _ in {(t.kind, t.layer) for t in graph.tasks})
    for i, kind in enumerate(graph.kinds):
        streamed = [
            n < len(kind.operands)
            and kind.mode != "combine"
            and kind.task.params[kind.operands[n]].use == "stream"
            for n in range(len(kind.ins))
        ]
        mode = "" if kind.mode == "full" else f", {kind.mode}"
        yield FoldedTask(
            kind.call + mode,
            counts[i],
            layers[i],
            *_blocks(kind.ins, streamed),
            tuple(dict.fromkeys(map(block_text, kind.outs))),
        )


def _blocks(
    ins: tuple[Access, ...], streamed: list[bool]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    both = list(zip(map(block_text, ins), streamed, strict=True))
    resident = dict.fromkeys(text for text, streams in both if not streams)
    through = dict.fromkeys(text for text, streams in both if streams)
    return tuple(resident), tuple(through)


def _between(source: Kind, target: Kind) -> tuple[str, ...]:
    """Buffers that one kind writes and the other touches."""
    touched = {a.buffer for a in (*target.ins, *target.outs)}
    named = dict.fromkeys(a.buffer for a in source.outs if a.buffer in touched)
    # Overwriting comes after reading: then the reader is the source.
    written = {a.buffer for a in target.outs}
    return tuple(named) or tuple(
        dict.fromkeys(a.buffer for a in source.ins if a.buffer in written)
    )
