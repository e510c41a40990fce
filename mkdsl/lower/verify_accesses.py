"""The last proof: every two accesses that meet are ordered, found from the accesses.

What it does: checks a Schedule against what its tasks read and write. The needs that
`dependences` found are not looked at: a need that is missing, or that belongs to other
regions, does not help a schedule that lacks the wait.
Needs: a Schedule without deadlocks (verify_schedule), tasks of one kind and layer
contiguous and in program order (verify_tasks, verify_kinds).
Guarantees: a task that reads an element comes, at the gate of that operand, after all
earlier tasks (lower ids) that write it; a task that writes an element comes after all
earlier tasks that read or write it. No task reads or writes what an earlier one of its
call has written; no temp is read before it is written.
Why it is correct: what a loader knows is that of the model in verify.py; who meets whom
is found by meetings.py for all pairs, not for the last writer alone, so nothing rests
on transitivity. A store follows both loaders of its task: what either knows will do.
Cost: a few bitset operations (tasks / 8 bytes) per distinct region and SM; with
meetings.py 0.5 to 0.9 s for 13,117 tasks of Llama-3.2-1B (its docstring says where).
"""

from collections.abc import Sequence
from typing import NoReturn

from mkdsl.errors import VerifyError
from mkdsl.lower.ir import FETCH_GATES, EventGraph, Gate, Schedule, TaskGraph
from mkdsl.lower.meetings import BufferMeetings, Table, find_meetings
from mkdsl.lower.runs import Use, region_text
from mkdsl.lower.verify import hint_of, remedy_of, task_name
from mkdsl.lower.verify_schedule import knowledge

STAGE = "accesses"


def verify_accesses(schedule: Schedule) -> None:
    """Check that all accesses that meet are ordered.

    Raises:
        VerifyError: two of them race, with the tasks and the region.
    """
    graph = schedule.events.graph
    uses: list[list[tuple[_Regions, int, Use]]] = [[] for _ in graph.tasks]
    calls = _calls(graph)
    for meetings in find_meetings(graph):
        regions = _Regions(schedule.events, meetings, calls)
        for task, number, use in meetings.uses:
            uses[task].append((regions, number, use))
    proved: set[tuple[int, int, Use, int, int]] = set()
    for task, sm, seen in knowledge(schedule, STAGE):
        both = 0
        for regions, number, use in uses[task]:
            key = (sm, id(regions), use, number, calls[task][0])
            if key in proved:
                continue
            if use == "store":
                both = both or seen[FETCH_GATES[-1]] | seen["stream"]
                regions.check_write(task, number, both)
            else:
                alike = regions.check_read(task, number, use, seen[use])
                # Knowledge only grows: what held once for this loader holds for good.
                if alike:
                    proved.add(key)


def _calls(graph: TaskGraph) -> list[tuple[int, int]]:
    """Per task, the first task of its kind and layer, and the one after the last."""
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for t, task in enumerate(graph.tasks):
        key = task.kind, task.layer
        ends[key] = ends.get(key, (t, t))[0], t + 1
    return [ends[task.kind, task.layer] for task in graph.tasks]


class _Regions:
    """The regions of one buffer, and the checks of those that touch them."""

    def __init__(
        self,
        events: EventGraph,
        meetings: BufferMeetings,
        calls: Sequence[tuple[int, int]],
    ) -> None:
        self._events, self._graph = events, events.graph
        self._meetings, self._calls = meetings, calls
        self._temp = meetings.buffer.role == "temp"
        self._bits: dict[tuple[int, bool], int] = {}

    def check_read(self, task: int, number: int, use: Gate, seen: int) -> bool:
        """A read at a gate whose loader sees the stores of these tasks.

        Returns:
            whether it reads after the same tasks as every task of its call.
        """
        writers = self._members(self._meetings.writers, number) & ~(1 << task)
        first, past = self._calls[task]
        own = writers >> first & (1 << past - first) - 1
        earlier = own & (1 << task - first) - 1
        if earlier:
            self._fail_own(task, number, "reads", first + _lowest(earlier))
        if self._temp and writers >> task:
            self._fail_early(task, number, task + _lowest(writers >> task))
        missing = writers & (1 << first) - 1 & ~seen
        if missing:
            why = f"the loader of its {use} operands does not wait for that task"
            other = _lowest(missing)
            remedy = remedy_of(self._events, task, use, other)
            self._fail(task, number, "reads", "writes", other, why, remedy)
        return not own

    def check_write(self, task: int, number: int, seen: int) -> None:
        """A store of a task whose loaders see the stores of these tasks."""
        writers = self._members(self._meetings.writers, number) & ~(1 << task)
        first, _ = self._calls[task]
        own = writers >> first & (1 << task - first) - 1
        if own and self._meetings.sure[number]:
            self._fail_own(task, number, "writes", first + _lowest(own))
        below = (1 << task) - 1
        missing = writers & below & ~seen
        if missing:
            self._fail_write(task, number, "writes", _lowest(missing))
        readers = self._members(self._meetings.readers, number)
        missing = readers & below & ~seen
        if missing:
            self._fail_write(task, number, "reads", _lowest(missing))

    def _members(self, table: Table, number: int) -> int:
        key = number, table is self._meetings.writers
        if key not in self._bits:
            members = table.of(number)
            data = bytearray((members[-1] >> 3) + 1 if members else 0)
            for m in members:
                data[m >> 3] |= 1 << (m & 7)
            self._bits[key] = int.from_bytes(data, "little")
        return self._bits[key]

    # ------------------------------------------------------------------- messages

    def _region(self, number: int) -> str:
        access, task = self._meetings.text[number]
        return region_text(self._graph, self._meetings.buffer, access, task)

    def _fail_write(self, task: int, number: int, did: str, other: int) -> NoReturn:
        remedy = remedy_of(self._events, task, "resident", other)
        why = "neither loader waits for that task"
        self._fail(task, number, "writes", did, other, why, remedy)

    def _fail(
        self,
        task: int,
        number: int,
        does: str,
        did: str,
        other: int,
        why: str,
        remedy: str = "",
    ) -> NoReturn:
        raise VerifyError(
            STAGE,
            f"race: {task_name(self._graph, task)} {does} {self._region(number)}, of "
            f"which {task_name(self._graph, other)} {did} an element, but {why}",
            self._graph.kinds[self._graph.tasks[task].kind].src,
            hint_of(remedy),
        )

    def _fail_early(self, task: int, number: int, other: int) -> NoReturn:
        self._fail(
            task,
            number,
            "reads",
            "writes",
            other,
            "that task comes later in the program: it would read memory that nothing "
            "has written",
        )

    def _fail_own(self, task: int, number: int, does: str, other: int) -> NoReturn:
        raise VerifyError(
            STAGE,
            f"{task_name(self._graph, task)} {does} {self._region(number)}, of which "
            f"{task_name(self._graph, other)} of the same call writes an element",
            self._graph.kinds[self._graph.tasks[task].kind].src,
            "let the tasks of a call write blocks of their own, and read what others "
            "write in a call of its own",
        )


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
