"""Device memory of the simulator: arrays, and the blocks that tasks move.

    Block ::= buffer (as view) [start : start + size, real in [low, high)] per axis

A Block is an access of a kind with every index expression evaluated. Elements that are
not real (past the array, or past the extent of a bounded slice) read as zeros and are
not written; a copy that touches them on the device is masked, so they are no reads.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mkdsl.errors import VerifyError
from mkdsl.lang.program import Access, Program
from mkdsl.lower.ir import KernelPlan

Array = NDArray[Any]
Read = Callable[[str, tuple[Any, ...]], int]

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a buffer at run time.

    Attributes:
        low, high: per axis of the view, the elements of the block that are real.
        kept: the axes that the task sees.
    """

    buffer: str
    view: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    kept: tuple[int, ...]

    def __str__(self) -> str:
        real = zip(self.low, self.high, strict=True)
        return f"{self.buffer}[{', '.join(f'{a}:{b}' for a, b in real)}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value that the task sees."""
        return tuple(self.sizes[i] for i in self.kept)

    @property
    def extents(self) -> tuple[int, ...]:
        """Per axis that the task sees, how many of its elements are real."""
        return tuple(max(0, self.high[i] - self.starts[i]) for i in self.kept)

    @property
    def box(self) -> tuple[slice, ...]:
        """The real elements, as an index of the view."""
        return tuple(map(slice, self.low, self.high))

    @property
    def elements(self) -> int:
        """How many elements are real."""
        return math.prod(b - a for a, b in zip(self.low, self.high, strict=True))

    @property
    def is_empty(self) -> bool:
        """True if no element is real."""
        return any(a >= b for a, b in zip(self.low, self.high, strict=True))

    def narrow(self, axis: int, first: int, size: int) -> "Block":
        """Elements [first, first + size) of the axis-th axis that the task sees."""
        i = self.kept[axis]
        start = self.starts[i] + first
        low = max(self.low[i], start)

        def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:i], value, *values[i + 1 :])

        return replace(
            self,
            starts=put(self.starts, start),
            sizes=put(self.sizes, size),
            low=put(self.low, low),
            high=put(self.high, max(low, min(self.high[i], start + size))),
        )


def block_of(access: Access, env: Mapping[str, int], read: Read) -> Block:
    """The block that an access means for the variables of one task."""
    starts: list[int] = []
    low: list[int] = []
    high: list[int] = []
    for axis, dim in zip(access.axes, access.view, strict=True):
        start = axis.start.evaluate(env, read)
        size = axis.size
        if axis.extent is not None:
            size = min(size, axis.extent.evaluate(env, read))
        starts.append(start)
        low.append(max(0, start))
        high.append(max(low[-1], min(dim, start + size)))
    return Block(
        access.buffer,
        access.view,
        tuple(starts),
        tuple(a.size for a in access.axes),
        tuple(low),
        tuple(high),
        tuple(i for i, a in enumerate(access.axes) if not a.squeezed),
    )


def poison(array: Array) -> None:
    """Fill with what no task should see: NaN, or the largest integer."""
    if array.dtype == np.bool_:
        array.fill(True)
    elif array.dtype.kind == "i":
        array.fill(np.iinfo(array.dtype).max)
    else:
        array.fill(np.nan)


class Memory:
    """Every buffer of a program: inputs and states are copied, temps are poisoned."""

    def __init__(self, plan: KernelPlan, inputs: Sequence[Array]) -> None:
        graph = plan.schedule.events.graph
        arrays = map(np.asarray, inputs)
        given = dict(zip(graph.program.inputs, arrays, strict=True))
        self.arrays: dict[str, Array] = {}
        for b in graph.buffers:
            if b.name not in given:
                self.arrays[b.name] = np.empty(b.shape, DTYPES[b.dtype])
                poison(self.arrays[b.name])
                continue
            array = given[b.name]
            if array.shape != b.shape or array.dtype != DTYPES[b.dtype]:
                raise VerifyError(
                    "simulate",
                    f"input {b.name} is {array.dtype}{list(array.shape)}, the program "
                    f"was traced for {b.dtype}{list(b.shape)}",
                    b.src,
                )
            # Nothing writes an input: only states need a copy of their own.
            writable = b.role == "state" or not array.flags.c_contiguous
            self.arrays[b.name] = np.array(array, order="C") if writable else array
        self._scalars = {n: a for n, a in given.items() if a.dtype.kind == "i"}

    def scalar(self, buffer: str, index: tuple[Any, ...]) -> int:
        """An element of an integer input, for index expressions."""
        return int(self._scalars[buffer][index])

    def load(self, block: Block) -> Array:
        """A copy of the block as it is now, zeros where it is not real."""
        array = self.arrays[block.buffer].reshape(block.view)
        if _whole(block):
            return array[block.box].reshape(block.shape).copy()
        value = np.zeros(block.sizes, array.dtype)
        value[_inner(block)] = array[block.box]
        return value.reshape(block.shape)

    def store(self, block: Block, value: Array) -> None:
        """Write the real elements of the block."""
        array = self.arrays[block.buffer].reshape(block.view)
        array[block.box] = value.reshape(block.sizes)[_inner(block)]

    def outputs(self, program: Program) -> list[Array]:
        """The results of the program."""
        results: list[Array] = []
        for out in program.outputs:
            array = self.arrays[out.buffer]
            array = array if out.layer is None else array[out.layer]
            results.append(array.reshape(out.shape or array.shape).copy())
        return results


def _whole(block: Block) -> bool:
    spans = zip(block.low, block.high, strict=True)
    return all(
        a == s and b - a == n
        for (a, b), s, n in zip(spans, block.starts, block.sizes, strict=True)
    )


def _inner(block: Block) -> tuple[slice, ...]:
    """The real elements, as an index of the block."""
    spans = zip(block.low, block.high, block.starts, strict=True)
    return tuple(slice(a - s, b - s) for a, b, s in spans)


def contiguous_unit(accesses: Sequence[Access], elements: int) -> int:
    """The largest n such that every access is made of runs of n elements, aligned to n.

    >>> from mkdsl.lang.expr import expr, var
    >>> from mkdsl.lang.program import Axis
    >>> axes = (Axis(expr(0), 8), Axis(var("g0") * 64, 64))
    >>> contiguous_unit([Access("x", (8, 256), axes)], 2048)
    64
    """
    unit = elements
    for access in accesses:
        inner = 1
        for axis, dim in zip(reversed(access.axes), reversed(access.view), strict=True):
            whole = axis.start.is_constant and int(axis.start) == 0
            if whole and axis.size == dim and axis.extent is None:
                inner *= dim
                continue
            ends = [axis.start, *([] if axis.extent is None else [axis.extent])]
            steps = [axis.size, dim]
            for end in ends:
                steps += [end.constant, *(k for _, k in end.terms)]
            unit = math.gcd(unit, *(inner * step for step in steps))
            break
    return max(unit, 1)
