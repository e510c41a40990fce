"""IR 2 to 5: TaskGraph, EventGraph, Schedule, KernelPlan.

    TaskGraph  ::= Buffer* Kind* Task* (deps of each Task)*
    Kind       ::= a call in one mode (full | partial | combine), code of the kernel
    Task       ::= kind, layer, pid, part              one instruction
    DepSet     ::= {task, ...} because, exact | conservative    a set of predecessors
    EventGraph ::= TaskGraph with Event*, the signal and the waits of each Task
    Event      ::= counter; complete when all its `members` have signalled
    Wait       ::= event >= threshold, before the loads of `gate`
    gate       ::= resident | block1 | block2 | block3 | stream
    Schedule   ::= EventGraph with one queue of tasks per SM
    KernelPlan ::= Schedule with shared memory: pages, arena, staging, words

Task ids are dense and in program order, so every dependence points to a lower id.
A kind may take its blocked operand (Kind.blocks) in blocks: the first with the other
resident ones, block k behind gate `block k`. A task has four roles on its SM: the
weight loader (free streams), the activation loader (resident operands; holds the
waits), the consumer (the body) and the storer (writes and signals).
"""

from dataclasses import dataclass, field
from typing import Literal

from mkdsl.errors import NO_SRC, SrcInfo
from mkdsl.lang.program import Access, Buffer, Program, TaskDef

Mode = Literal["full", "partial", "combine"]
Gate = Literal["resident", "block1", "block2", "block3", "stream"]
Loader = Literal["resident", "stream"]

# In the order in which the activation loader passes its own.
FETCH_GATES: tuple[Gate, ...] = ("resident", "block1", "block2", "block3")
GATES: tuple[Gate, ...] = (*FETCH_GATES, "stream")
MOST_BLOCKS = len(FETCH_GATES)

# How reports name the loaders.
LOADERS: dict[Loader, str] = {
    "stream": "weight loader",
    "resident": "activation loader",
}


def loader_of(gate: Gate) -> Loader:
    """Which loader of a task holds a gate."""
    return "stream" if gate == "stream" else "resident"


@dataclass(frozen=True, slots=True)
class Kind:
    """A call in one mode: one branch of the kernel's switch.

    Attributes:
        call: name of the call.
        mode: `full`; or `partial`, the body up to the cut over one part of the
            depth (dots) or of the blocks (fold), whose results are accumulators or
            carries; or `combine`, the rest of the body from all parts of them.
        parts: how many parts the call is split into (1 if full).
        grid: sizes of the grid axes.
        ins: operands of this mode, aligned with `operands`; for a combine, first
            those of `operands`, then one per accumulator or carry (all parts).
        operands: index of each of `ins` among the parameters of the task.
        outs: results of this mode.
        pieces: whether its long operands are in pieces (lower/pieces.py).
        blocks: in how many blocks its blocked operand comes (lower/blocked.py).
        accesses of a partial kind may use the variable `part`.
    """

    call: str
    mode: Mode
    parts: int
    task: TaskDef
    grid: tuple[int, ...]
    operands: tuple[int, ...]
    ins: tuple[Access, ...]
    outs: tuple[Access, ...]
    src: SrcInfo = field(default=NO_SRC, compare=False)
    pieces: bool = False
    blocks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= MOST_BLOCKS:
            raise ValueError(f"{self.call}: {self.blocks=} of at most {MOST_BLOCKS}")


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction: the instance of a kind at a layer, grid point and part."""

    kind: int
    layer: int
    pid: tuple[int, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class DepSet:
    """Tasks that some other task must come after.

    Attributes:
        members: task ids, ascending.
        exact: False where the grammar could not decide and overlap was assumed.
    """

    members: tuple[int, ...]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """A task must come after every member of a DepSet, before loading `gate`."""

    deps: int
    gate: Gate
    why: Literal["RAW", "WAR", "WAW"]


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks, and (after dependences) what each must wait for.

    Attributes:
        buffers: those of the program, then those of values between parts.
        needs: needs[t] are the Needs of task t; empty before the pass `dependences`.
    """

    program: Program
    buffers: tuple[Buffer, ...]
    kinds: tuple[Kind, ...]
    tasks: tuple[Task, ...]
    dep_sets: tuple[DepSet, ...] = ()
    needs: tuple[tuple[Need, ...], ...] = ()

    def __post_init__(self) -> None:
        own = self.program.buffers
        if self.buffers[: len(own)] != own:
            raise ValueError(f"buffers of {self.program.name} do not come first")


@dataclass(frozen=True, slots=True)
class Event:
    """A counter that each member raises by one when its writes are visible."""

    members: tuple[int, ...]

    @property
    def threshold(self) -> int:
        """The count at which the event is complete."""
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until counter `event` has reached `threshold`, before loading `gate`."""

    event: int
    threshold: int
    gate: Gate


@dataclass(frozen=True, slots=True)
class EventGraph:
    """TaskGraph with counters: signals[t] is the event of task t or -1."""

    graph: TaskGraph
    events: tuple[Event, ...]
    signals: tuple[int, ...]
    waits: tuple[tuple[Wait, ...], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """queues[sm] are task ids in the order in which SM `sm` runs them."""

    events: EventGraph
    queues: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class KindPlan:
    """Shared memory of one kind, bytes rounded up to the alignment of each buffer.

    Attributes:
        pages: per stream of the kind, (rows, features) of one page of each operand.
        arena_bytes: its resident operands.
        scratch_bytes: values that its body stores for mk.dot and mk.roll.
        staging_bytes: its results on their way to memory.
    """

    pages: tuple[tuple[int, int], ...]
    arena_bytes: int
    scratch_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Everything the emitter needs besides the task bodies.

    Attributes:
        columns: columns of every tile, padded to a multiple of 8.
        page_bytes, ring: size and number of the slots of the page ring.
        in_flight: most page loads of one SM under way at a time.
        arena_bytes, arena_slots: resident operands of one task; slots.
        scratch_bytes: operands that a body computes for mk.dot, mk.roll.
        staging_bytes, staging_slots: results on their way to memory.
        smem_bytes: all of it, instructions included.
        instruction_bytes: the instruction words of one SM.
        reserved_bytes: barriers, scalars, and what Mosaic takes for reductions.
    """

    schedule: Schedule
    kinds: tuple[KindPlan, ...]
    columns: int
    page_bytes: int
    ring: int
    in_flight: int
    arena_bytes: int
    arena_slots: int
    scratch_bytes: int
    staging_bytes: int
    staging_slots: int
    smem_bytes: int
    instruction_bytes: int = 0
    reserved_bytes: int = 0
