"""What a program function handles: symbolic arrays and the specs of their blocks.

The vocabulary follows pallas.BlockSpec: a block shape and an index map from grid
indices to block indices. An index map is run once on symbols, so it must be a formula
(expr.py).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mkdsl.errors import TraceError, caller
from mkdsl.lang.expr import Expr, ExprLike, expr, read


@dataclass(frozen=True, slots=True)
class Array:
    """A symbolic array of a program: shape, dtype, reshape and leading indices.

    version: how many times mk.Into has written it.
    """

    buffer: str
    view: tuple[int, ...]
    dtype: str
    prefix: tuple[Expr, ...] = ()
    version: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the leading indices already chosen."""
        return self.view[len(self.prefix) :]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def reshape(self, *shape: Any) -> "Array":
        """The same elements, row-major, in another shape; one size may be -1."""
        new = list(shape[0] if len(shape) == 1 and not is_int(shape[0]) else shape)
        total = math.prod(self.shape)
        if new.count(-1) == 1:
            new[new.index(-1)] = total // max(1, -math.prod(new))
        if math.prod(new) != total:
            raise TraceError(
                f"reshape of {self.buffer}{list(self.shape)} to {list(shape)}: the "
                "number of elements differs",
                caller(),
                "only sizes of the same product; one of them may be -1",
            )
        prefix = self.view[: len(self.prefix)]
        return replace(self, view=(*prefix, *map(int, new)))

    def __getitem__(self, index: Any) -> Any:
        """Leading indices give a sub-array; all indices of an int32 input a scalar."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > self.ndim or not all(is_index(i) for i in index):
            raise TraceError(
                f"{self.buffer}{list(self.shape)}[{', '.join(map(str, index))}]: only "
                "leading integer or grid indices are allowed",
                caller(),
                "blocks are selected by the specs of mk.call",
            )
        prefix = (*self.prefix, *map(expr, index))
        if len(prefix) < len(self.view) or self.dtype != "int32":
            return replace(self, prefix=prefix)
        return read(self.buffer, *prefix)

    def __array__(self, *_: Any) -> Any:
        raise TraceError(
            f"{self.buffer} is a symbol of a program, not an array",
            caller(),
            "inside a program use mk.call; compute with jnp outside of it",
        )

    def __iter__(self) -> Iterator[Any]:
        raise TraceError(
            f"iteration over {self.buffer}{list(self.shape)} of a program",
            caller(),
            "scan over layers with mk.scan, or index it with integers",
        )

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.buffer}"

    def _compute(self, *_: Any) -> Any:
        raise TraceError(
            f"arithmetic on {self.buffer}{list(self.shape)}, a symbol of a program",
            caller(),
            "inside a program use mk.call; compute with jnp outside of it",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _compute
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _compute
    __neg__ = _compute


def is_int(x: Any) -> bool:
    return isinstance(x, int | np.integer)


def is_index(x: Any) -> bool:
    return is_int(x) or isinstance(x, Expr)


@dataclass(frozen=True, slots=True)
class Squeezed:
    """A block dimension of one element that the task does not see (as None)."""


@dataclass(frozen=True, slots=True)
class Element:
    """A block dimension whose index map gives the first element, not the block."""

    size: int


@dataclass(frozen=True, slots=True)
class BoundedSlice:
    """A block dimension whose index map gives mk.ds(start, size) at run time.

    max_size: the largest size; elements from `size` on read as zero.
    """

    max_size: int


@dataclass(frozen=True, slots=True)
class Slice:
    """What an index map returns for a BoundedSlice: elements [start, start + size)."""

    start: Expr
    size: Expr


def ds(start: ExprLike, size: ExprLike) -> Slice:
    """A run-time range of elements, for a BoundedSlice dimension."""
    return Slice(expr(start), expr(size))


BlockDim = int | None | Squeezed | Element | BoundedSlice


@dataclass(frozen=True, slots=True)
class Spec:
    """Which block of an array each instance sees, as pallas.BlockSpec.

    Args:
        block: per dimension an int (block-indexed), None or Squeezed (one element,
            dropped), Element (element-indexed) or BoundedSlice (run-time range).
        index_map: from grid indices to one index per dimension; a formula of the
            grid indices, the layer, constants and scalars of int32 inputs.
        column: a one-dimensional block holds one value per column, not per feature.
    """

    block: tuple[BlockDim, ...]
    index_map: Callable[..., Any]
    column: bool = False


class Whole:
    """The spec of an operand that every instance sees whole."""

    def __repr__(self) -> str:
        return "mk.whole"


whole = Whole()


@dataclass(frozen=True, slots=True)
class Into:
    """An output spec that writes a block of an existing array in place.

    The result of the call is the new version of the array; the old one must not be
    used again.
    """

    array: Array
    block: tuple[BlockDim, ...]
    index_map: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of an output of mk.call."""

    shape: tuple[int, ...]
    dtype: Any
