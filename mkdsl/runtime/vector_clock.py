"""Happens-before in the simulator, and the races that it shows.

A clock is what one role of one SM knows: entry s counts the tasks of SM s whose
operands its consumer has read, entry SMs + s the tasks whose results its storer has
written. Loaders have clocks but no entry: a copy into shared memory counts as read when
the consumer has seen it arrive, and nobody can learn of it earlier. Handing over (full
slots inside an SM, counters between SMs) joins the giver's clock into the taker's.

For every buffer that some task writes, Shadow keeps the last writer of each cell (the
longest run of elements that all accesses respect) and the reads since. It reports

    a read of memory that nothing has written,
    a read that does not come after the write that it reads (RAW),
    a write that does not come after an earlier read (WAR) or write (WAW),
    two tasks of one call that write one element, ordered or not.

A race is found in any interleaving in which both accesses happen, not only in those
where it gives a wrong value. Source: FastTrack (Flanagan and Freund, 2009).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mkdsl.errors import VerifyError
from mkdsl.lower.blocked import block_accesses
from mkdsl.lower.encode import Instruction
from mkdsl.lower.ir import FETCH_GATES, LOADERS, Gate, KernelPlan, Kind, loader_of
from mkdsl.runtime.memory import Array, Block, contiguous_unit

Clock = NDArray[np.int64]
Queues = Sequence[Sequence[Instruction]]


def join(clock: Clock, other: Clock) -> None:
    """Learn what the other knew."""
    np.maximum(clock, other, out=clock)


def describe(kind: Kind, one: Instruction) -> str:
    """A task for a message."""
    mode = "" if kind.mode == "full" else f" {kind.mode}"
    part = f" part {one.part} of {kind.parts}" if kind.mode == "partial" else ""
    pid = ", ".join(map(str, one.grid))
    return f"task '{kind.call}'{mode} layer {one.layer} pid ({pid}){part}"


@dataclass(slots=True)
class _Reads:
    """Reads of one buffer: cells [first, last], by the consumer of sm at epoch."""

    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros((64, 4), np.int64))
    blocks: list[Block] = field(default_factory=list[Block])

    def add(self, first: int, last: int, sm: int, epoch: int, block: Block) -> None:
        count = len(self.blocks)
        if count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[count] = first, last, sm, epoch
        self.blocks.append(block)

    def unordered(self, first: int, last: int, clock: Clock) -> list[int]:
        """Reads of cells in [first, last] that the clock does not know."""
        starts, ends, sms, epochs = self.rows[: len(self.blocks)].T
        found = (starts <= last) & (ends >= first) & (clock[sms] < epochs)
        return np.flatnonzero(found).tolist()


@dataclass(slots=True)
class _Cells:
    """What is known of one buffer: the number of its last writer per cell, 0: none."""

    unit: int
    temp: bool
    rewritten: bool
    writer: NDArray[np.int32]
    reads: _Reads = field(default_factory=_Reads)


class Shadow:
    """Last writers and reads of every buffer that some task writes."""

    def __init__(self, plan: KernelPlan, queues: Queues) -> None:
        graph = plan.schedule.events.graph
        self._kinds, self._queues = graph.kinds, queues
        self._sms = len(queues)
        # Number n > 0 stands for a task: where and when its storer writes.
        where = [(s, i) for s, queue in enumerate(queues) for i in range(len(queue))]
        self._first = np.cumsum([1, *map(len, queues)]).tolist()
        self._where = [(-1, -1), *where]
        self._entry = np.array([0, *(self._sms + s for s, _ in where)])
        self._epoch = np.array([0, *(i + 1 for _, i in where)])
        calls: dict[tuple[int, int], int] = {}
        ids = [
            calls.setdefault((o.kind, o.layer), len(calls)) for q in queues for o in q
        ]
        self._call = np.array([-1, *ids])
        self._cells: dict[str, _Cells] = {}
        for b in graph.buffers:
            written = [a for k in graph.kinds for a in k.outs if a.buffer == b.name]
            read = [
                access
                for k in graph.kinds
                for n in range(len(k.ins))
                for _, access in block_accesses(k, n)
                if access.buffer == b.name
            ]
            if not written:
                continue
            elements = math.prod(b.shape)
            unit = contiguous_unit([*written, *read], elements)
            # A temp with one writer is read after it, or the read is reported.
            rewritten = b.role == "state" or len(written) > 1
            cells = np.zeros(elements // unit, np.int32)
            self._cells[b.name] = _Cells(unit, b.role == "temp", rewritten, cells)

    def read(
        self, sm: int, position: int, gate: Gate, block: Block, issued: Clock
    ) -> None:
        """A copy that a loader issued at clock `issued`, seen by the consumer.

        Raises:
            VerifyError: it races with a write.
        """
        cells = self._cells.get(block.buffer)
        if cells is None or block.is_empty:
            return
        shape, box = _locate(block, cells.unit)
        writers = cells.writer.reshape(shape)[box]
        known = issued[self._entry[writers]] >= self._epoch[writers]
        if cells.temp:
            known &= writers > 0
        if not known.all():
            self._report_read(sm, position, gate, block, int(writers[~known][0]))
        if cells.rewritten:
            span = _span(shape, box)
            cells.reads.add(*span, sm, position + 1, block)

    def write(self, sm: int, position: int, block: Block, clock: Clock) -> None:
        """A store by the storer of an SM.

        Raises:
            VerifyError: it races, or its call has written there already.
        """
        if block.is_empty:
            return
        cells = self._cells[block.buffer]
        shape, box = _locate(block, cells.unit)
        writers = cells.writer.reshape(shape)[box]
        number = self._first[sm] + position
        again = self._call[writers] == self._call[number]
        if again.any():
            self._report_write(sm, position, block, int(writers[again][0]), "double")
        known = clock[self._entry[writers]] >= self._epoch[writers]
        if not known.all():
            self._report_write(sm, position, block, int(writers[~known][0]), "WAW")
        for i in cells.reads.unordered(*_span(shape, box), clock):
            self._check_reader(sm, position, block, cells, i)
        cells.writer.reshape(shape)[box] = number

    def _check_reader(
        self, sm: int, position: int, block: Block, cells: _Cells, i: int
    ) -> None:
        other = cells.reads.blocks[i]
        if not _overlap(block, other, cells.unit, cells.writer.size):
            return
        _, _, s, epoch = cells.reads.rows[i].tolist()
        number = self._first[s] + epoch - 1
        self._report_write(sm, position, block, number, "WAR")

    # ------------------------------------------------------------------- messages

    def _name(self, number: int) -> str:
        sm, position = self._where[number]
        one = self._queues[sm][position]
        return f"{describe(self._kinds[one.kind], one)} on SM {sm}"

    def _signal(self, number: int) -> str:
        sm, position = self._where[number]
        event = self._queues[sm][position].signal
        return f"signals e{event}" if event >= 0 else "signals no event"

    def _fail(self, sm: int, position: int, role: str, what: str) -> NoReturn:
        one = self._queues[sm][position]
        kind = self._kinds[one.kind]
        waits = "; ".join(
            f"{gate} operands: {', '.join(f'e{e}>={n}' for e, n in waits) or 'none'}"
            for gate, waits in (
                ("stream", one.stream),
                *zip(FETCH_GATES, (one.resident, *one.blocks), strict=False),
            )
        )
        raise VerifyError(
            "simulate",
            f"race: {describe(kind, one)}, {role} of SM {sm}, {what}\n"
            f"    its waits: {waits}",
            kind.src,
        )

    def _report_read(
        self, sm: int, position: int, gate: Gate, block: Block, number: int
    ) -> NoReturn:
        writers = {
            k.call for k in self._kinds for a in k.outs if a.buffer == block.buffer
        }
        what = (
            f"reads {block} before all of it has been written (by "
            f"{', '.join(sorted(writers))})"
        )
        if number:
            what = (
                f"reads {block} but nothing orders it after the write by "
                f"{self._name(number)} (storer, {self._signal(number)})"
            )
        self._fail(sm, position, LOADERS[loader_of(gate)], what)

    def _report_write(
        self, sm: int, position: int, block: Block, number: int, why: str
    ) -> NoReturn:
        other = f"{self._name(number)} ({self._signal(number)})"
        what = {
            "double": f"writes {block}, which its own call has written: {other}",
            "WAW": f"writes {block} but nothing orders it after the write by {other}",
            "WAR": f"writes {block} but nothing orders it after the read by {other}",
        }
        self._fail(sm, position, "storer", what[why])


def _locate(block: Block, unit: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """The block in cells: a shape of the array of cells, and an index of it."""
    inner = 1
    for axis in reversed(range(len(block.view))):
        low, high, dim = block.low[axis], block.high[axis], block.view[axis]
        if not (low * inner % unit or high * inner % unit or dim * inner % unit):
            shape = (*block.view[:axis], dim * inner // unit)
            last = slice(low * inner // unit, high * inner // unit)
            return shape, (*block.box[:axis], last)
        inner *= dim
    return (1,), (slice(0, 1),)


def _span(shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[int, int]:
    """First and last cell of a box."""
    first = last = 0
    for dim, side in zip(shape, box, strict=True):
        first = first * dim + side.start
        last = last * dim + side.stop - 1
    return first, last


def _overlap(a: Block, b: Block, unit: int, count: int) -> bool:
    cells: Any = np.arange(count)
    sets: list[Array] = []
    for block in (a, b):
        shape, box = _locate(block, unit)
        sets.append(cells.reshape(shape)[box].ravel())
    return np.intersect1d(*sets, assume_unique=True).size > 0
