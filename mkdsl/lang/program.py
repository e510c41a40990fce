"""IR 1, the Program: what the user wrote, as data.

    Program ::= Buffer* Step* Output*
    Buffer  ::= name: dtype[shape] role              role: input | state | temp
    Step    ::= Call | Scan
    Scan    ::= layer in [0, length): variants[choice[layer]]   a variant is Call*
    Call    ::= name = task over grid, Access per operand and result
    Access  ::= buffer (as view) [Axis, ...]
    Axis    ::= start : start + size, squeezed or not, valid up to start + extent
    TaskDef ::= name, Param*, Param*, Stream*, cut   the body is opaque here
    Stream  ::= Dot(lhs, rhs, rows, depth) | Fold(operands, block, carries)

`input` buffers are arguments that nothing writes; `state` buffers are arguments that
some call writes in place; `temp` buffers are written by calls. A buffer made inside a
scan has the layer as its leading dimension: every layer has memory of its own, so
activations are never overwritten. Positions are index expressions (expr.py) over the
grid axes g0, g1, .., `layer`, and scalars of integer inputs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from mkdsl.errors import NO_SRC, SrcInfo
from mkdsl.lang.expr import Expr

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "bool": 1,
}

Role = Literal["input", "state", "temp"]
Use = Literal["tile", "vector", "scalar", "stream"]
Cut = Literal["none", "dot", "fold"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array in device memory.

    Attributes:
        name: unique in the program.
        shape: elements; the layer comes first for buffers made inside a scan.
        dtype: a key of ITEM_BYTES.
        role: who writes it, see the module.
        column: the dimension that holds columns when 4-byte tiles are stored with
            columns innermost (see docs/decisions), or None for row-major arrays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    column: int | None = None
    src: SrcInfo = field(default=NO_SRC, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ValueError(f"{self.name}: dtype {self.dtype} is not one of {known}")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of an access, in elements of the view.

    Attributes:
        start: first element.
        size: elements of the block, a constant; may reach past the array.
        squeezed: the dimension is absent from the task's value.
        extent: valid elements from `start` where that is known only at run time
            (a bounded slice); elements beyond read as zero and are not written.
    """

    start: Expr
    size: int
    squeezed: bool = False
    extent: Expr | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """A block of a buffer, as one instance of a call reads or writes it.

    Attributes:
        view: the row-major shape in which `axes` count; the buffer's own shape unless
            the program reshaped it.
    """

    buffer: str
    view: tuple[int, ...]
    axes: tuple[Axis, ...]
    src: SrcInfo = field(default=NO_SRC, compare=False)

    def __post_init__(self) -> None:
        if len(self.view) != len(self.axes):
            raise ValueError(f"{self.buffer}: {self.view=} has not one axis each")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value that the task sees."""
        return tuple(a.size for a in self.axes if not a.squeezed)


@dataclass(frozen=True, slots=True)
class Param:
    """An operand or result of a task.

    `tile` is [columns, features]; `vector` is [features] or [1, features], the same
    for every column; `scalar` is an int32; `stream` passes through pages.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    use: Use


@dataclass(frozen=True, slots=True)
class Dot:
    """`mk.dot(lhs, rhs)`: rhs [rows, depth] streams through pages over depth.

    `lhs` is the operand that is contracted as it stands, or None where the task
    computes it (a norm, say) from whole operands.
    """

    lhs: int | None
    rhs: int
    rows: int
    depth: int


@dataclass(frozen=True, slots=True)
class Fold:
    """`mk.fold` over blocks of `block` rows of the operands, in their order.

    carries: (shape, dtype) of each leaf of the carry.
    """

    operands: tuple[int, ...]
    block: int
    carries: tuple[tuple[tuple[int, ...], str], ...]


Stream = Dot | Fold


@dataclass(frozen=True, slots=True)
class Scratch:
    """Shared memory that a body needs for a value of its own.

    `operand`: a computed left side of mk.dot, 16-bit, [columns, features].
    `roll`: the tile of an mk.roll, twice, 32-bit, [2 * features, columns].
    after_cut: the part of the body after the cut needs it, not the part before.
    """

    use: Literal["operand", "roll"]
    features: int
    after_cut: bool = False


@dataclass(frozen=True, slots=True)
class TaskDef:
    """A pure function from tiles to tiles.

    Attributes:
        digest: hash of the body; with `name` it identifies the task in text.
        columns: columns of its tiles (batch rows or heads), before padding.
        streams: what passes through pages, in the order of the body.
        cut: where the planner may split it: at the accumulators of its dots, at its
            fold, or nowhere.
        scratch: shared memory for values of the body.
        before: operands that the part before the cut needs.
        after: operands that the part after the cut needs.
        long: depth of its dots if their left sides may be in pieces (lang/pieces.py),
            or 0.
        body: for the emitter and the interpreters; opaque to the compiler.
    """

    name: str
    digest: str
    params: tuple[Param, ...]
    results: tuple[Param, ...]
    columns: int
    streams: tuple[Stream, ...]
    scratch: tuple[Scratch, ...] = ()
    cut: Cut = "none"
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    long: int = 0
    body: Any = field(default=None, compare=False, repr=False)
    src: SrcInfo = field(default=NO_SRC, compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """All instances of a task over a grid; grid axis i is the variable g<i>."""

    name: str
    task: TaskDef
    grid: tuple[int, ...]
    ins: tuple[Access, ...]
    outs: tuple[Access, ...]
    src: SrcInfo = field(default=NO_SRC, compare=False)


@dataclass(frozen=True, slots=True)
class Scan:
    """Layers in order: layer i runs the calls of variants[choice[i]]."""

    length: int
    variants: tuple[tuple[Call, ...], ...]
    choice: tuple[int, ...]
    src: SrcInfo = field(default=NO_SRC, compare=False)

    def __post_init__(self) -> None:
        if len(self.choice) != self.length:
            raise ValueError(f"{self.length} layers but {len(self.choice)} choices")


Step = Call | Scan


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the program: a buffer, or one layer of it."""

    buffer: str
    layer: int | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A whole traced program. `inputs` are buffer names in argument order."""

    name: str
    buffers: tuple[Buffer, ...]
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        for b in self.buffers:
            if b.name == name:
                return b
        raise KeyError(name)

    def calls(self) -> Iterator[Call]:
        """Every distinct call, in program order: variants of a scan may share some."""
        every: dict[Call, None] = {}
        for step in self.steps:
            variants = ((step,),) if isinstance(step, Call) else step.variants
            for variant in variants:
                every |= dict.fromkeys(variant)
        yield from every

    def instances(self) -> Iterator[tuple[Call, int]]:
        """Every call as it runs, with its layer (0 outside a scan)."""
        for step in self.steps:
            if isinstance(step, Call):
                yield step, 0
                continue
            for layer, which in enumerate(step.choice):
                for call in step.variants[which]:
                    yield call, layer
