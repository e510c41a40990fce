"""The four roles of one simulated SM, as generators that take one small step at a time.

    weight loader      per task: stream waits, hand over, then page by page: an empty
                       slot, the page before the last `in_flight` landed, issue
    activation loader  per task: resident waits, an empty arena slot, issue each operand
    transfer           one asynchronous copy: lands some time after it was issued
    consumer           per task: both loaders, its pages (freed one by one), the body,
                       an empty staging slot, results; frees the arena slot
    storer             per task: a full staging slot, each result to memory, signal

A generator yields None after a step, or (counter, count) to be resumed when the counter
has that count. The interleaving is the choice of who steps next (interpret_schedule).
A full slot hands over what its filler knows. An empty one hands over nothing: that the
bytes of a staging slot have left says little about when others see them, and an order
that rests on how many slots there are is not one that the compiler planned.
Slots hold values that are poisoned when they are freed, so that whoever uses a slot too
early or too late computes with NaN, and filling one that is in use is an error.
"""

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mkdsl.errors import VerifyError
from mkdsl.lang.program import Dot
from mkdsl.lower.encode import Instruction
from mkdsl.lower.ir import KernelPlan, Kind
from mkdsl.lower.pages import kind_streams, stream_operands
from mkdsl.runtime.memory import Array, Block, Memory, block_of, poison
from mkdsl.runtime.vector_clock import Clock, Shadow, describe, join

Role = Literal["weight loader", "activation loader", "consumer", "storer"]
ROLES: tuple[Role, ...] = ("weight loader", "activation loader", "consumer", "storer")

# Values of the operands of a task (None: extents alone), their blocks -> its results.
Values = Sequence[Array | None]
Evaluate = Callable[[Instruction, Values, Sequence[Block]], list[Array]]


class Counter:
    """A barrier or an event: a count that only rises, and what its signallers knew.

    Attributes:
        name: what one waits for.
        waiters: (count, agent) of those that wait; `wake` is called with an agent
            whose count has been reached.
    """

    def __init__(self, name: str, wake: "Callable[[Agent], None]") -> None:
        self.name, self.count, self._wake = name, 0, wake
        self.waiters: list[tuple[int, Agent]] = []
        # Clock after each signal: who waits for the first k has learnt of k, not all.
        self._known: list[Clock] = []

    def signal(self, clock: Clock | None = None) -> None:
        """Raise the count by one; with a clock, hand over what it knows."""
        if clock is not None:
            known = clock.copy()
            if self._known:
                join(known, self._known[-1])
            self._known.append(known)
        self.count += 1
        if self.waiters:
            ready = [a for count, a in self.waiters if count <= self.count]
            self.waiters = [w for w in self.waiters if w[0] > self.count]
            for agent in ready:
                self._wake(agent)

    def acquire(self, count: int, clock: Clock) -> None:
        """Learn what a wait for `count` proves; it must have been reached."""
        join(clock, self._known[count - 1])


Step = tuple[Counter, int] | None
Steps = Generator[Step, None, None]


@dataclass(eq=False, slots=True)
class Agent:
    """A role of an SM, or a transfer, with what it waits for."""

    sm: int
    role: str
    steps: Steps
    wanted: Step = None


@dataclass(slots=True)
class Slot:
    """A slot of the ring, of the arena or of the staging buffer."""

    name: str
    values: dict[int, Array] = field(default_factory=dict[int, Array])

    def fill(self, key: int, value: Array) -> None:
        """A block has arrived.

        Raises:
            VerifyError: the slot still holds one.
        """
        if key in self.values:
            raise VerifyError(
                "simulate", f"{self.name} is filled again before it was freed"
            )
        self.values[key] = value

    def release(self) -> None:
        """Free the slot: what it held must not be used any more."""
        for value in self.values.values():
            poison(value)
        self.values = {}


@dataclass(frozen=True, slots=True)
class Machine:
    """What all SMs share."""

    plan: KernelPlan
    memory: Memory
    shadow: Shadow | None
    events: tuple[Counter, ...]
    evaluate: Evaluate
    spawn: Callable[[Agent], None]

    def kind(self, one: Instruction) -> Kind:
        """The kind of an instruction."""
        return self.plan.schedule.events.graph.kinds[one.kind]


class Sm:
    """One SM: its queue, slots and barriers; `at[role]` is the task of each role."""

    def __init__(
        self, machine: Machine, sm: int, queue: Sequence[Instruction], sms: int
    ) -> None:
        self.machine, self.sm, self.queue = machine, sm, queue
        self.at: dict[str, Instruction] = {}
        plan, wake, self._sms = machine.plan, machine.spawn, sms
        self._clock: dict[Role, Clock] = {r: np.zeros(2 * sms, np.int64) for r in ROLES}

        def slots(count: int, name: str) -> list[Slot]:
            return [Slot(f"{name} {i} of SM {sm}") for i in range(count)]

        def counters(count: int, name: str, state: str) -> list[Counter]:
            return [Counter(f"{name} {i} {state}", wake) for i in range(count)]

        self._ring = slots(plan.ring, "page slot")
        self._landed = counters(plan.ring, "page slot", "to be full")
        self._freed = counters(plan.ring, "page slot", "to be free")
        self._arena = slots(plan.arena_slots, "arena slot")
        self._arena_full = counters(plan.arena_slots, "arena slot", "to be full")
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
        plan, clock, page = self.machine.plan, self._clock["weight loader"], 0
        for one in self.queue:
            self.at["weight loader"] = one
            for event, threshold in one.stream:
                yield self.machine.events[event], threshold
                self.machine.events[event].acquire(threshold, clock)
            self._handed.signal(clock)
            yield None
            for _, block, _ in self._pages(one):
                slot, turn = page % plan.ring, page // plan.ring
                yield self._freed[slot], turn
                before = page - plan.in_flight
                if before >= 0:
                    yield self._landed[before % plan.ring], before // plan.ring + 1
                landing = self._landed[slot]
                self._transfer("page", self._ring[slot], 0, block, landing, clock)
                page += 1
                yield None

    def _load_activations(self) -> Steps:
        slots, clock = self.machine.plan.arena_slots, self._clock["activation loader"]
        for i, one in enumerate(self.queue):
            self.at["activation loader"] = one
            for event, threshold in one.resident:
                yield self.machine.events[event], threshold
                self.machine.events[event].acquire(threshold, clock)
            slot = i % slots
            yield self._arena_free[slot], i // slots
            full = self._arena_full[slot]
            for operand, block in self._resident(one):
                self._transfer(
                    "operand", self._arena[slot], operand, block, full, clock
                )
                yield None
            full.signal(clock)

    def _consume(self) -> Steps:
        plan, clock, page = self.machine.plan, self._clock["consumer"], 0
        arrived = [0] * plan.arena_slots
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
            blocks = self._blocks(one)
            pages: dict[int, Array | None] = {}
            for operand, _, place in self._pages(one):
                slot = page % plan.ring
                yield self._landed[slot], page // plan.ring + 1
                value = self._ring[slot].values[0]
                whole = pages.get(operand)
                if whole is None:
                    whole = pages[operand] = np.zeros(
                        blocks[operand].shape, value.dtype
                    )
                whole[place] = value
                self._ring[slot].release()
                self._freed[slot].signal()
                page += 1
                yield None
            values = self._values(one, blocks, self._arena[arena], pages)
            self._note_reads(i, one, blocks, stream_clock, resident_clock)
            clock[self.sm] = i + 1
            results = self.machine.evaluate(one, values, blocks)
            yield None
            staging, turn = i % plan.staging_slots, i // plan.staging_slots
            yield self._stored[staging], turn
            for n, result in enumerate(results):
                self._staging[staging].fill(n, result)
            self._staged[staging].signal(clock)
            self._arena[arena].release()
            self._arena_free[arena].signal()

    def _store(self) -> Steps:
        machine, clock = self.machine, self._clock["storer"]
        slots = machine.plan.staging_slots
        for i, one in enumerate(self.queue):
            self.at["storer"] = one
            slot, turn = i % slots, i // slots
            yield self._staged[slot], turn + 1
            self._staged[slot].acquire(turn + 1, clock)
            clock[self._sms + self.sm] = i + 1
            env = _env(one)
            for n, access in enumerate(machine.kind(one).outs):
                block = block_of(access, env, machine.memory.scalar)
                if machine.shadow is not None:
                    machine.shadow.write(self.sm, i, block, clock)
                machine.memory.store(block, self._staging[slot].values[n])
                yield None
            if one.signal >= 0:
                self.machine.events[one.signal].signal(clock)
            self._staging[slot].release()
            self._stored[slot].signal()

    # ---------------------------------------------------------------------- parts

    def _transfer(
        self,
        name: str,
        slot: Slot,
        key: int,
        block: Block,
        full: Counter,
        clock: Clock,
    ) -> None:
        """Issue a copy of a block into a slot; it is made when the agent steps."""

        def steps(issued: Clock = clock.copy()) -> Steps:  # noqa: B008
            slot.fill(key, self.machine.memory.load(block))
            full.signal(issued)
            yield None

        self.machine.spawn(Agent(self.sm, f"transfer of {name} {block}", steps()))

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
        resident_clock: Clock,
    ) -> None:
        if self.machine.shadow is None:
            return
        streamed = _streamed(self.machine.kind(one))
        for n, block in enumerate(blocks):
            gate = "stream" if n in streamed else "resident"
            clock = stream_clock if n in streamed else resident_clock
            self.machine.shadow.read(self.sm, position, gate, block, clock)

    def _blocks_of(self, one: Instruction) -> tuple[Block, ...]:
        env, read = _env(one), self.machine.memory.scalar
        return tuple(block_of(a, env, read) for a in self.machine.kind(one).ins)

    def _resident(self, one: Instruction) -> Iterator[tuple[int, Block]]:
        streamed = _streamed(self.machine.kind(one))
        for n, block in enumerate(self._blocks(one)):
            if n not in streamed:
                yield n, block

    def _values(
        self,
        one: Instruction,
        blocks: Sequence[Block],
        arena: Slot,
        pages: dict[int, Array | None],
    ) -> list[Array | None]:
        """Operands in the order of the kind; a stream without a page is all zeros."""
        kind, arrays = self.machine.kind(one), self.machine.memory.arrays
        loaded = pages | arena.values
        for n in _streamed(kind) - loaded.keys():
            zeros = np.zeros(blocks[n].shape, arrays[blocks[n].buffer].dtype)
            loaded[n] = None if kind.mode == "combine" else zeros
        return [loaded[n] for n in range(len(blocks))]

    def _pages(
        self, one: Instruction
    ) -> Iterator[tuple[int, Block, tuple[slice, slice]]]:
        """Pages in the order of the loader: (operand, block, place in the operand).

        Both loader and consumer walk them; a dot has pages along its depth, a fold one
        page per operand for each block of the rows that exist.
        """
        kind, blocks = self.machine.kind(one), self._blocks(one)
        if kind.mode == "combine":
            return
        sizes = self.machine.plan.kinds[one.kind].pages
        for stream, (_, features) in zip(kind_streams(kind), sizes, strict=True):
            operands = [kind.operands.index(i) for i in stream_operands(stream)]
            if isinstance(stream, Dot):
                (n,) = operands
                depth = blocks[n].shape[1]
                for first in range(0, depth, features):
                    size = min(features, depth - first)
                    place = (slice(None), slice(first, first + size))
                    yield n, blocks[n].narrow(1, first, size), place
                continue
            for first in range(0, blocks[operands[0]].extents[0], stream.block):
                for n in operands:
                    size = min(stream.block, blocks[n].shape[0] - first)
                    place = (slice(first, first + size), slice(None))
                    yield n, blocks[n].narrow(0, first, size), place


def _streamed(kind: Kind) -> set[int]:
    """Positions among `ins` of what passes through pages."""
    return {
        kind.operands.index(i) for s in kind_streams(kind) for i in stream_operands(s)
    }


def _env(one: Instruction) -> dict[str, int]:
    return {"layer": one.layer, "part": one.part} | {
        f"g{i}": n for i, n in enumerate(one.grid)
    }


def blocked_on(agent: Agent, sm: Sm) -> str:
    """Who waits for what, for the report of a deadlock."""
    assert agent.wanted is not None
    counter, count = agent.wanted
    what = f"{counter.name}"
    if counter in sm.machine.events:
        what += f" >= {count}, seen {counter.count}"
    one = sm.at[agent.role]
    name = describe(sm.machine.kind(one), one)
    return f"SM {agent.sm} {agent.role}, {name}: waits for {what}"
