"""The four roles of one simulated SM, as generators that take one small step at a time.

    weight loader      per task: stream waits, hand over, then page by page: an empty
                       slot, the page before the last `in_flight` landed, issue
    activation loader  per task: resident waits, an empty arena slot, issue each operand
    transfer           one asynchronous copy: lands some time after it was issued
    consumer           per task: both loaders, its pages (freed step by step), the
                       body, an empty staging slot, results; frees the arena slot
    storer             per task: a full staging slot, each result to memory, frees the
                       slot; signal

The interleaving is the choice of who steps next (interpret_schedule.py).
A full slot hands over what its filler knows. An empty one hands over nothing: that the
bytes of a staging slot have left says little about when others see them, and an order
that rests on how many slots there are is not one that the compiler planned.
Slots hold values that are poisoned when they are freed, so that whoever uses a slot too
early or too late computes with NaN, and filling one that is in use is an error.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mkdsl.lang.program import Dot
from mkdsl.lower.blocked import block_accesses, blocked_operand
from mkdsl.lower.encode import Instruction
from mkdsl.lower.ir import MOST_BLOCKS, Gate, KernelPlan, Kind
from mkdsl.lower.pages import kind_streams, stream_operands
from mkdsl.lower.stamps import (
    BEGAN,
    BEGAN_PAGES,
    COMPUTED,
    ENDED_PAGES,
    FETCHED,
    FIRST_PAGE,
    LANDED,
    SIGNALLED,
    STORED,
    WAITED,
)
from mkdsl.runtime.barriers import Agent, Counter, Slot, Steps
from mkdsl.runtime.memory import Array, Block, Memory, block_of
from mkdsl.runtime.paging import (
    Page,
    begins_block,
    key_of,
    make_page,
    put_page,
    streamed_operands,
)
from mkdsl.runtime.vector_clock import Clock, Shadow, describe, join

Role = Literal["weight loader", "activation loader", "consumer", "storer"]
ROLES: tuple[Role, ...] = ("weight loader", "activation loader", "consumer", "storer")

# Values of the operands of a task (None: extents alone), their blocks -> its results.
Values = Sequence[Array | None]
Evaluate = Callable[[Instruction, Values, Sequence[Block]], list[Array]]


@dataclass(frozen=True, slots=True)
class Device:
    """What all SMs share.

    note: called with (SM, position in its queue, one of lower/stamps.py).
    """

    plan: KernelPlan
    memory: Memory
    shadow: Shadow | None
    events: tuple[Counter, ...]
    evaluate: Evaluate
    spawn: Callable[[Agent], None]
    note: Callable[[int, int, int], None] = lambda *_: None

    def kind(self, one: Instruction) -> Kind:
        """The kind of an instruction."""
        return self.plan.schedule.events.graph.kinds[one.kind]


class Sm:
    """One SM: its queue, slots and barriers; `at[role]` is the task of each role."""

    def __init__(
        self, device: Device, sm: int, queue: Sequence[Instruction], sms: int
    ) -> None:
        self.device, self.sm, self.queue = device, sm, queue
        self.at: dict[str, Instruction] = {}
        plan, wake, self._sms = device.plan, device.spawn, sms
        self._clock: dict[Role, Clock] = {r: np.zeros(2 * sms, np.int64) for r in ROLES}

        def slots(count: int, name: str) -> list[Slot]:
            return [Slot(f"{name} {i} of SM {sm}") for i in range(count)]

        def counters(count: int, name: str, state: str) -> list[Counter]:
            return [Counter(f"{name} {i} {state}", wake, False) for i in range(count)]

        self._ring = slots(plan.ring, "page slot")
        self._landed = counters(plan.ring, "page slot", "to be full")
        self._freed = counters(plan.ring, "page slot", "to be free")
        self._arena = slots(plan.arena_slots, "arena slot")
        self._arena_full = counters(plan.arena_slots, "arena slot", "to be full")
        # As long as blocks come one by one, each has a barrier of its own.
        self._block_full = counters(MOST_BLOCKS - 1, "block", "to be full")
        self._arena_free = counters(plan.arena_slots, "arena slot", "to be free")
        self._staging = slots(plan.staging_slots, "staging slot")
        self._staged = counters(plan.staging_slots, "staging slot", "to be full")
        self._stored = counters(plan.staging_slots, "staging slot", "to be free")
        self._handed = Counter("the weight loader", wake)
        # Every role needs them, at about the same time.
        self._blocks = functools.lru_cache(maxsize=32)(self._blocks_of)

    def agents(self) -> list[Agent]:
        """The four roles."""
        runs = (self._load_weights, self._load_activations, self._consume, self._store)
        return [Agent(self.sm, r, run()) for r, run in zip(ROLES, runs, strict=True)]

    # ---------------------------------------------------------------------- roles

    def _load_weights(self) -> Steps:
        plan, clock, page = self.device.plan, self._clock["weight loader"], 0
        for i, one in enumerate(self.queue):
            self.at["weight loader"] = one
            for event, threshold in one.stream:
                yield self.device.events[event], threshold
                self.device.events[event].acquire(threshold, clock)
                yield "poll"
            self._handed.signal(clock)
            yield None
            if kind_streams(self.device.kind(one)):
                self._note(i, FIRST_PAGE)
            for page_of in itertools.chain.from_iterable(self._pages(one)):
                slot, turn = page % plan.ring, page // plan.ring
                yield self._freed[slot], turn
                before = page - plan.in_flight
                if before >= 0:
                    yield self._landed[before % plan.ring], before // plan.ring + 1
                landed, size = self._landed[slot], self._bytes(page_of.block)
                self._issue(self._ring[slot], 0, page_of.block, landed, size)
                page += 1
                yield None

    def _load_activations(self) -> Steps:
        slots, clock = self.device.plan.arena_slots, self._clock["activation loader"]
        for i, one in enumerate(self.queue):
            self.at["activation loader"] = one
            for event, threshold in one.resident:
                yield self.device.events[event], threshold
                self.device.events[event].acquire(threshold, clock)
                yield "poll"
            slot = i % slots
            yield self._arena_free[slot], i // slots
            self._note(i, WAITED)
            full = self._arena_full[slot]
            for operand, block in self._resident(one):
                (_, first), *_ = self._in_blocks(one, operand, block)
                self._issue(self._arena[slot], operand, first, full)
                yield None
            full.signal(clock)
            for k, waits in enumerate(one.blocks):
                for event, threshold in waits:
                    yield self.device.events[event], threshold
                    self.device.events[event].acquire(threshold, clock)
                    yield "poll"
                operand = blocked_operand(self.device.kind(one))
                block = self._blocks(one)[operand]
                _, later = self._in_blocks(one, operand, block)[k + 1]
                there = self._block_full[k]
                self._issue(self._arena[slot], key_of(operand, k + 1), later, there)
                yield None
                there.signal(clock)
            self._note(i, FETCHED)

    def _consume(self) -> Steps:
        plan, clock, page = self.device.plan, self._clock["consumer"], 0
        arrived = [0] * plan.arena_slots
        arrived_blocks = [0] * (MOST_BLOCKS - 1)
        for i, one in enumerate(self.queue):
            self.at["consumer"] = one
            yield self._handed, i + 1
            stream_clock = self._clock_of(self._handed, i + 1)
            arena = i % plan.arena_slots
            arrived[arena] += 1 + len(list(self._resident(one)))
            yield self._arena_full[arena], arrived[arena]
            resident_clock = self._clock_of(self._arena_full[arena], arrived[arena])
            join(clock, stream_clock)
            join(clock, resident_clock)
            self._note(i, LANDED)
            yield "body"
            self._note(i, BEGAN_PAGES)
            blocks = self._blocks(one)
            loaded: dict[int, Array] = {}
            clocks = [resident_clock]
            starts = self._block_starts(one)
            for step in self._pages(one):
                while len(clocks) <= len(starts) and begins_block(
                    step, starts[len(clocks) - 1]
                ):
                    k = len(clocks) - 1
                    arrived_blocks[k] += 2
                    yield self._block_full[k], arrived_blocks[k]
                    clocks.append(
                        self._clock_of(self._block_full[k], arrived_blocks[k])
                    )
                    join(clock, clocks[-1])
                held = [(page + n) % plan.ring for n in range(len(step))]
                for slot, page_of in zip(held, step, strict=True):
                    yield self._landed[slot], page // plan.ring + 1
                    put_page(loaded, blocks, page_of, self._ring[slot].values[0])
                    page += 1
                for slot in held:
                    self._ring[slot].release()
                    self._freed[slot].signal()
                    yield None
            self._note(i, ENDED_PAGES)
            there = self._joined(one, self._arena[arena].values)
            values = self._values(one, blocks, loaded | there)
            self._note_reads(i, one, blocks, stream_clock, clocks)
            clock[self.sm] = i + 1
            results = self.device.evaluate(one, values, blocks)
            yield None
            staging, turn = i % plan.staging_slots, i // plan.staging_slots
            yield self._stored[staging], turn
            for n, result in enumerate(results):
                self._staging[staging].fill(n, result)
            self._note(i, COMPUTED)
            self._staged[staging].signal(clock)
            self._arena[arena].release()
            self._arena_free[arena].signal()

    def _store(self) -> Steps:
        device, clock = self.device, self._clock["storer"]
        slots = device.plan.staging_slots
        for i, one in enumerate(self.queue):
            self.at["storer"] = one
            slot, turn = i % slots, i // slots
            yield self._staged[slot], turn + 1
            self._staged[slot].acquire(turn + 1, clock)
            clock[self._sms + self.sm] = i + 1
            self._note(i, BEGAN)
            env = _env(one)
            for n, access in enumerate(device.kind(one).outs):
                block = block_of(access, env, device.memory.scalar)
                if device.shadow is not None:
                    device.shadow.write(self.sm, i, block, clock)
                device.memory.store(block, self._staging[slot].values[n])
                yield None
            self._note(i, STORED)
            self._staging[slot].release()
            self._stored[slot].signal()
            if one.signal >= 0:
                yield "signal"
                self.device.events[one.signal].signal(clock)
            self._note(i, SIGNALLED)

    # ---------------------------------------------------------------------- parts

    def _issue(
        self, slot: Slot, key: int, block: Block, full: Counter, size: int = 0
    ) -> None:
        """Start a copy of a block into a slot; it is made when its agent steps."""
        copy = _transfer(self.device.memory, slot, key, block, full)
        self.device.spawn(Agent(self.sm, "transfer", copy, size_bytes=size))

    def _bytes(self, block: Block) -> int:
        array = self.device.memory.arrays[block.buffer]
        return block.elements * array.dtype.itemsize

    def _note(self, position: int, what: int) -> None:
        self.device.note(self.sm, position, what)

    def _clock_of(self, counter: Counter, count: int) -> Clock:
        clock = np.zeros(2 * self._sms, np.int64)
        counter.acquire(count, clock)
        return clock

    def _note_reads(
        self,
        position: int,
        one: Instruction,
        blocks: Sequence[Block],
        stream_clock: Clock,
        resident_clocks: Sequence[Clock],
    ) -> None:
        if self.device.shadow is None:
            return
        kind = self.device.kind(one)
        streamed = streamed_operands(kind)
        for n, block in enumerate(blocks):
            if n in streamed and kind.mode == "combine":
                continue
            if n in streamed:
                self.device.shadow.read(
                    self.sm, position, "stream", block, stream_clock
                )
                continue
            parts = self._in_blocks(one, n, block)
            for (gate, part), clock in zip(parts, resident_clocks, strict=False):
                self.device.shadow.read(self.sm, position, gate, part, clock)

    def _blocks_of(self, one: Instruction) -> tuple[Block, ...]:
        env, read = _env(one), self.device.memory.scalar
        return tuple(block_of(a, env, read) for a in self.device.kind(one).ins)

    def _resident(self, one: Instruction) -> Iterator[tuple[int, Block]]:
        streamed = streamed_operands(self.device.kind(one))
        for n, block in enumerate(self._blocks(one)):
            if n not in streamed:
                yield n, block

    def _in_blocks(
        self, one: Instruction, n: int, block: Block
    ) -> list[tuple[Gate, Block]]:
        """Operand n as it is loaded: whole, or one block after the other."""
        kind, read = self.device.kind(one), self.device.memory.scalar
        if kind.blocks == 1:
            return [("resident", block)]
        env = _env(one)
        return [(g, block_of(a, env, read)) for g, a in block_accesses(kind, n)]

    def _block_starts(self, one: Instruction) -> list[int]:
        """Where in the depth of the dot the later blocks begin."""
        kind = self.device.kind(one)
        if kind.blocks == 1:
            return []
        depth = self._blocks(one)[blocked_operand(kind)].shape[-1]
        return [k * depth // kind.blocks for k in range(1, kind.blocks)]

    def _joined(self, one: Instruction, values: dict[int, Array]) -> dict[int, Array]:
        """The contents of the arena, an operand that came in blocks in one piece."""
        kind = self.device.kind(one)
        if kind.blocks == 1:
            return values
        n = blocked_operand(kind)
        blocks = [values[n], *(values[key_of(n, k)] for k in range(1, kind.blocks))]
        return values | {n: np.concatenate(blocks, axis=-1)}

    def _values(
        self, one: Instruction, blocks: Sequence[Block], loaded: dict[int, Array]
    ) -> list[Array | None]:
        """Operands in the order of the kind; a stream without a page is all zeros."""
        kind, arrays = self.device.kind(one), self.device.memory.arrays
        values: list[Array | None] = []
        for n, block in enumerate(blocks):
            value = loaded.get(n)
            if value is None and kind.mode != "combine":
                value = np.zeros(block.shape, arrays[block.buffer].dtype)
            values.append(value)
        return values

    def _pages(self, one: Instruction) -> Iterator[list[Page]]:
        """Pages in the order of the loader, those that the body holds at once together.

        Both loader and consumer walk them: a page along the depth of a dot; one page
        per operand for each block of the rows that a fold has.
        """
        kind, blocks = self.device.kind(one), self._blocks(one)
        for number, stream in enumerate(kind_streams(kind)):
            operands = [kind.operands.index(i) for i in stream_operands(stream)]
            if isinstance(stream, Dot):
                _, step = self.device.plan.kinds[one.kind].pages[number]
                axis, end = 1, blocks[operands[0]].shape[1]
            else:
                axis, step, end = 0, stream.block, blocks[operands[0]].extents[0]
            for first in range(0, end, step):
                yield [make_page(n, blocks[n], axis, first, step) for n in operands]


def _transfer(
    memory: Memory, slot: Slot, key: int, block: Block, full: Counter
) -> Steps:
    slot.fill(key, memory.load(block))
    full.signal()
    yield None


def _env(one: Instruction) -> dict[str, int]:
    return {"layer": one.layer, "part": one.part} | {
        f"g{i}": n for i, n in enumerate(one.grid)
    }


def blocked_on(agent: Agent, sm: Sm) -> str:
    """Who waits for what, for the report of a deadlock."""
    assert agent.wanted is not None
    counter, count = agent.wanted
    what = f"{counter.name}"
    if counter in sm.device.events:
        what += f" >= {count}, seen {counter.count}"
    one = sm.at[agent.role]
    name = describe(sm.device.kind(one), one)
    return f"SM {agent.sm} {agent.role}, {name}: waits for {what}"
