"""TaskGraph -> TaskGraph with edges: RAW, WAR and WAW from overlapping regions.

What it does: fills `dep_sets` and `needs` of a graph.
Needs: tasks of one kind and layer contiguous, in program order (decompose).
Guarantees: every member of a need has a lower id than the task that needs it. Two tasks
of which one writes what the other reads or writes are ordered, directly or through
others, unless their regions are proved disjoint; a set whose overlap was assumed and
not proved is marked as not exact.
Why it is correct: a task reads what was there before its call, so it depends on earlier
calls' writers of its regions; a writer depends on every earlier reader and writer of
its regions. Of several writers of one region only the last counts, and readers before
it do not: it is ordered after them by its own needs. A task that would read what an
earlier task of its own call has overwritten has no right order, nor have two tasks of
one call that write one block: both are errors.
How: only buffers that some task writes are looked at, so weights cost nothing. Regions
are interned per buffer, their meetings found once through a RegionIndex, and the answer
for a region and a call shared by all tasks that ask the same.
Cost: near-linear; 14,700 tasks of Llama-3.2-1B at batch 8 take 1.3 s on a 2-core CPU
that others use too (2026-11-29), a third of it in the garbage collector.
Source: Exo's and isl's dependence analysis, reduced to boxes; design.md section 3.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from mkdsl.errors import InternalError, VerifyError
from mkdsl.lang.region import contains
from mkdsl.lower.ir import DepSet, Gate, Need, TaskGraph
from mkdsl.lower.region_index import RegionIndex
from mkdsl.lower.touches import Touch, Touches, touches_of

STAGE = "dependences"
Why = Literal["RAW", "WAR", "WAW"]
Found = tuple[tuple[int, ...], bool]
NOTHING: Found = ((), True)


def find_dependences(graph: TaskGraph) -> TaskGraph:
    """The graph with what each task must wait for.

    Raises:
        VerifyError: a temp is read before it is written, two tasks of one call write
            one block, or a task reads what another task of its call overwrites.
    """
    touches = touches_of(graph)
    starts = run_starts(graph)
    sets: dict[Found, int] = {}
    needs: dict[tuple[int, Gate, Why], Need] = {}
    finder = _Finder(graph, touches, starts)

    def need(found: Found, gate: Gate, why: Why) -> Need:
        deps = sets.setdefault(found, len(sets))
        return needs.setdefault((deps, gate, why), Need(deps, gate, why))

    every: list[tuple[Need, ...]] = []
    for t in range(len(graph.tasks)):
        mine: dict[Need, None] = {}
        for touch in touches.reads[t]:
            found = finder.producers(t, touch)
            if found[0]:
                mine[need(found, touch.gate, "RAW")] = None
        for touch in touches.writes[t]:
            for found, why in finder.predecessors(t, touch):
                if found[0]:
                    mine[need(found, "resident", why)] = None
        every.append(tuple(mine))
    dep_sets = tuple(DepSet(members, exact) for members, exact in sets)
    return replace(graph, dep_sets=dep_sets, needs=tuple(every))


def run_starts(graph: TaskGraph) -> list[int]:
    """Per task, the first task of its kind and layer."""
    starts: list[int] = []
    seen: dict[tuple[int, int], int] = {}
    for t, task in enumerate(graph.tasks):
        key = (task.kind, task.layer)
        first = seen.setdefault(key, t)
        if first != t and starts[-1] != first:
            call = graph.kinds[task.kind].call
            raise InternalError(f"tasks of {call}, layer {task.layer}, are interrupted")
        starts.append(first)
    return starts


# ------------------------------------------------------------------ finding edges


class _Finder:
    """Answers "which earlier tasks" for one graph; remembers its answers."""

    def __init__(self, graph: TaskGraph, touches: Touches, starts: list[int]) -> None:
        self._graph, self._uses, self._starts = graph, touches.uses, starts
        self._roles = {b.name: b.role for b in graph.buffers}
        self._outs = [{a.buffer for a in k.outs} for k in graph.kinds]
        self._indexes: dict[str, tuple[RegionIndex, list[int]]] = {}
        self._met: dict[tuple[str, int], list[tuple[int, bool]]] = {}
        self._produced: dict[tuple[str, int, int], Found] = {}
        self._read_before: dict[tuple[str, int], list[tuple[int, bool]]] = {}
        for written, read, proved in self._overwritten():
            self._read_before.setdefault(written, []).append((read, proved))

    def producers(self, t: int, touch: Touch) -> Found:
        """Tasks of earlier calls that write what `t` reads."""
        uses, start = self._uses[touch.buffer], self._starts[t]
        if touch.buffer in self._outs[self._graph.tasks[t].kind]:
            self._refuse_overwritten(t, touch)
        key = (touch.buffer, touch.region, start)
        found = self._produced.get(key)
        if found is None:
            found = self._produced[key] = self._writers(touch, start)
        empty = not found[0] and self._roles[touch.buffer] == "temp"
        if empty and not uses.regions[touch.region].is_empty:
            raise VerifyError(
                STAGE,
                f"{self._name(t)} reads {uses.regions[touch.region]}, which no earlier "
                "task writes",
                self._graph.kinds[self._graph.tasks[t].kind].src,
                "write the array in an earlier call, or pass it as an argument",
            )
        return found

    def predecessors(self, t: int, touch: Touch) -> Iterator[tuple[Found, Why]]:
        """Earlier readers and writers of what `t` writes."""
        self._refuse_double(t, touch)
        yield self._writers(touch, t), "WAW"
        uses = self._uses[touch.buffer]
        members: set[int] = set()
        exact = True
        for region, proved in self._read_before.get((touch.buffer, touch.region), ()):
            readers = uses.readers[region]
            first = bisect_left(readers, self._last_cover(touch.buffer, region, t))
            past = bisect_left(readers, t)
            members.update(readers[first:past])
            exact = exact and (proved or first == past)
        members.discard(t)
        yield (tuple(sorted(members)), exact) if members else NOTHING, "WAR"

    def _overwritten(self) -> Iterator[tuple[tuple[str, int], int, bool]]:
        """(buffer, written region), read region, proved: where a write follows a read.

        Found from the readers' side, whose regions are few and whose meetings are
        needed anyway; activations of a layer are never among them.
        """
        for name, uses in self._uses.items():
            for region, readers in uses.readers.items():
                for other, proved in self._meeting(name, region):
                    if uses.writers[other][-1] > readers[0]:
                        yield (name, other), region, proved

    def _writers(self, touch: Touch, before: int) -> Found:
        """The last writer below `before` of every region that meets this one."""
        uses = self._uses[touch.buffer]
        last: list[tuple[int, bool]] = []
        for region, proved in self._meeting(touch.buffer, touch.region):
            writers = uses.writers[region]
            past = bisect_left(writers, before)
            if past:
                last.append((writers[past - 1], proved))
        if not last:
            return NOTHING
        cover = 0
        if len(last) > 1:
            cover = self._last_cover(touch.buffer, touch.region, before)
        kept = [(w, proved) for w, proved in last if w >= cover]
        members = tuple(sorted({w for w, _ in kept}))
        return members, all(proved for _, proved in kept)

    def _last_cover(self, buffer: str, region: int, before: int) -> int:
        """The last task below `before` that writes all of a region, or 0."""
        uses = self._uses[buffer]
        inner = uses.regions[region]
        latest = 0
        for other, proved in self._meeting(buffer, region):
            writers = uses.writers[other]
            past = bisect_left(writers, before)
            if not past or not proved or writers[past - 1] <= latest:
                continue
            if other == region or contains(uses.regions[other], inner):
                latest = writers[past - 1]
        return latest

    def _meeting(self, buffer: str, region: int) -> list[tuple[int, bool]]:
        """(region, proved) of the written regions that meet this one or may do so."""
        known = self._met.get((buffer, region))
        if known is not None:
            return known
        uses = self._uses[buffer]
        if buffer not in self._indexes:
            numbers = list(uses.writers)
            index = RegionIndex([uses.regions[n] for n in numbers])
            self._indexes[buffer] = index, numbers
        index, numbers = self._indexes[buffer]
        box = uses.regions[region]
        if index.is_partition and region in uses.writers:
            met = [(region, box.exact)]
        else:
            met = [(numbers[i], proved) for i, proved in index.meeting(box)]
        self._met[buffer, region] = met
        return met

    # -------------------------------------------------------------------- errors

    def _in_call(self, t: int, touch: Touch) -> Iterator[tuple[int, bool]]:
        """(task, proved) below `t` of its own call that write what it touches."""
        uses = self._uses[touch.buffer]
        for region, proved in self._meeting(touch.buffer, touch.region):
            writers = uses.writers[region]
            at = bisect_left(writers, self._starts[t])
            if at < len(writers) and writers[at] < t:
                yield writers[at], proved

    def _refuse_double(self, t: int, touch: Touch) -> None:
        for other, proved in self._in_call(t, touch):
            if proved:
                task = self._graph.tasks[t]
                kind = self._graph.kinds[task.kind]
                raise VerifyError(
                    STAGE,
                    f"call {kind.call}: tasks {self._graph.tasks[other].pid} and "
                    f"{task.pid} both write "
                    f"{self._uses[touch.buffer].regions[touch.region]} of "
                    f"{touch.buffer}",
                    kind.src,
                    "let the index map of the output use every grid axis, or "
                    "accumulate inside one task",
                )

    def _refuse_overwritten(self, t: int, touch: Touch) -> None:
        for other, proved in self._in_call(t, touch):
            kind = self._graph.kinds[self._graph.tasks[t].kind]
            region = self._uses[touch.buffer].regions[touch.region]
            raise VerifyError(
                STAGE,
                f"call {kind.call}: task {self._graph.tasks[t].pid} reads {region}, "
                f"which task {self._graph.tasks[other].pid} of the same call "
                f"{'overwrites' if proved else 'may overwrite'}",
                kind.src,
                "read the new value in a call of its own, or write into another array",
            )

    def _name(self, t: int) -> str:
        task = self._graph.tasks[t]
        kind = self._graph.kinds[task.kind]
        part = f" part {task.part}" if kind.mode == "partial" else ""
        return f"call {kind.call}: task {task.pid}{part} of layer {task.layer}"
