"""Shared memory of operands, results and pages, and the copies that fill and drain it.

Forms of a block of a task with N columns (a multiple of 8), F features:

    tile, 16-bit       [N, F] with tiling (8, 64) and a 128-byte swizzle: operand B of
                       wgmma, and transposed on its way to registers
    tile, 32-bit       [F, N] plain
    columns            [N] plain; 16-bit ones are a row of their array
    vector             [F] plain
    page               [F / 64, rows, 64] with a 128-byte swizzle: operand A of wgmma

Blocks of 64 16-bit features have the same bytes with a swizzle alone (`raw`) and with
tiling and swizzle (`tiled`). Copies into or out of `raw` may start at any row and reach
past any dimension; the tiled form may not (measured, H200, 2026-11-29: a tiled load
from a row that is no multiple of 8 returns other rows).
"""

# pyright: reportAbstractUsage=false
# (Pallas is typed in part.)

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.errors import PlanError
from mkdsl.lang.expr import Expr, var
from mkdsl.lower.layout import (
    COLUMN_PAD,
    Layout,
    Operand,
    Place,
    place,
)
from mkdsl.lower.pages import PIECE, columns_features, round_up

Ref = Any
Value = Any

SWIZZLE = plgpu.SwizzleTransform(128)
TILED = (plgpu.TilingTransform((8, 64)), SWIZZLE)
RAW = (SWIZZLE,)
# One asynchronous copy takes at most 256 elements along an untiled dimension.
MAX_COPY = 256
# Single columns of 16 bits come in 128 bytes, as 32-bit ones do (layout.COLUMN_PAD).
ROW_COLUMNS = 64


class Block(NamedTuple):
    """How one operand or result lies in shared memory.

    Attributes:
        long: it is in pieces, one of which is a column of the block.
    """

    operand: Operand
    columns: int
    features: int
    padded: int
    wide: bool
    long: bool = False

    @property
    def rows(self) -> int:
        """Columns of the task that a result has: all, or 1."""
        return columns_features(self.operand.param.shape)[0]

    @property
    def lanes(self) -> int:
        """Columns of a block of columns as they are loaded."""
        return round_up(self.columns, COLUMN_PAD)

    @property
    def dtype(self) -> Any:
        """Element type."""
        return jnp.dtype(self.operand.param.dtype)

    @property
    def vector(self) -> bool:
        """The same for every column."""
        return self.operand.param.use == "vector"

    @property
    def column(self) -> bool:
        """One value per column."""
        return not self.vector and self.features == 1


def block_of(operand: Operand, task_columns: int, long: int = 0) -> Block:
    """The form of an operand or result.

    Args:
        long: features of those that are in pieces.

    Raises:
        PlanError: a form that the kernel has not.
    """
    param = operand.param
    _, features = columns_features(param.shape)
    padded = round_up(features, 64) if features > 1 else 1
    wide = jnp.dtype(param.dtype).itemsize == 4
    narrow = param.dtype in ("bfloat16", "float16")
    if not wide and not (narrow and (features > 1 or _columns_in_a_row(operand))):
        raise PlanError(
            f"{operand.access.buffer}: a block {param.dtype}{list(param.shape)}",
            operand.access.src,
            "tiles are bfloat16 or 32-bit; single columns are 32-bit, or a multiple of "
            f"{ROW_COLUMNS} along the last axis of an array in such multiples: "
            "mk.Spec((.., None, N), .., column=True)",
        )
    if long and math.prod(param.shape) == long:
        return Block(operand, long // PIECE, PIECE, PIECE, wide=False, long=True)
    return Block(operand, round_up(task_columns, 8), features, padded, wide)


def _columns_in_a_row(operand: Operand) -> bool:
    """True if single columns lie side by side, in whole copies."""
    access = operand.access
    *outer, last = access.axes
    alone = not last.squeezed and all(a.squeezed for a in outer)
    whole = last.size % ROW_COLUMNS == 0 and access.view[-1] % ROW_COLUMNS == 0
    return operand.param.use == "tile" and alone and whole


def resident_types(block: Block, layout: Layout) -> tuple[Any, Any]:
    """(tiled, raw) shared memory of a resident operand."""
    if block.vector and block.long:
        pieces = plgpu.SMEM((block.columns, PIECE), block.dtype)
        return pieces, pieces
    if block.vector:
        flat = plgpu.SMEM((block.padded,), block.dtype)
        if not layout.chunk:
            return flat, flat
        rows = block.features // layout.chunk
        return flat, plgpu.SMEM((rows, layout.chunk), block.dtype)
    if block.column:
        parts = (block.operand.parts,) if block.operand.parts else ()
        plain = plgpu.SMEM((*parts, block.lanes), block.dtype)
    elif block.wide:
        parts = (block.operand.parts,) if block.operand.parts else ()
        plain = plgpu.SMEM((*parts, block.padded, block.columns), block.dtype)
    else:
        n, f = block.columns, block.padded
        tiled = plgpu.SMEM((n, f), block.dtype, transforms=TILED)
        raw = plgpu.SMEM((f // 64, n, 64), block.dtype, transforms=RAW)
        return tiled, raw
    return plain, plain


def result_types(block: Block, layout: Layout) -> tuple[Any, Any]:
    """(tiled, raw) shared memory of a result on its way out."""
    if block.column:
        plain = plgpu.SMEM((block.columns,), block.dtype)
    elif block.wide and block.vector:
        plain = plgpu.SMEM((block.padded,), block.dtype)
    elif block.wide:
        plain = plgpu.SMEM((block.padded, block.columns), block.dtype)
    elif plain_result(block, layout):
        plain = plgpu.SMEM((block.columns, block.padded), block.dtype)
        return plain, plgpu.SMEM((block.columns * block.padded,), block.dtype)
    else:
        shape = (block.padded // 64, block.columns, 64)
        return (
            plgpu.SMEM(shape, block.dtype, transforms=TILED),
            plgpu.SMEM(shape, block.dtype, transforms=RAW),
        )
    return plain, plain


class Copy(NamedTuple):
    """One bulk copy: where in shared memory (raw or tiled), where in device memory."""

    raw: bool
    shared: tuple[Any, ...]
    array: str
    place: tuple[Any, ...]
    guard: tuple[tuple[Expr, int], ...] = ()


Eval = Callable[[Expr], Value]


def multiple(value: Expr, of: int) -> bool:
    """True if the value is a multiple of `of` whatever its variables are."""
    return value.constant % of == 0 and all(k % of == 0 for _, k in value.terms)


def place_index(
    where: Place, eval_: Eval, rows: int, feature: tuple[Value, int], row: Value = None
) -> Any:
    """Indices into the physical array.

    Args:
        rows: how many, from `row` of the block on (its first, if None).
        feature: (offset, size) inside the block.
    """
    index = [eval_(where.lead)]
    for axis in where.axes:
        start = eval_(axis.start)
        if axis.role == "row":
            start = start if row is None else start + row
            start = _span(start, rows, axis.dim, eval_)
        elif axis.role == "feature":
            start = _span(start + feature[0], feature[1], axis.dim, eval_)
        index.append(start)
    return tuple(index)


def _span(start: Value, size: int, dim: int, eval_: Eval) -> Any:
    """Elements [start, start + size); copies may reach past the dimension."""
    if isinstance(start, int) and start + size > dim:
        # Pallas refuses a constant slice out of bounds, not one known at run time.
        start = eval_(var("layer")) * 0 + start
    return pl.ds(start, size)


def split_spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(step, total - at)) for at in range(0, total, step)]


def loads(
    block: Block, layout: Layout, eval_: Eval, part: int = 0, parts: int = 1
) -> list[Copy]:
    """The copies that bring a resident operand to shared memory.

    Args:
        part, parts: which of how many equal pieces of its features; a block in one
            piece may have any form, in several it is a 16-bit tile.
    """
    name, operand = layout.buffer.name, block.operand
    if layout.column is not None:
        where = place(layout, operand)
        if block.column and layout.shape[2] < block.lanes:
            raise PlanError(
                f"{name}: single columns of {list(layout.view)} are read",
                operand.access.src,
                "read the whole tile, or keep columns in an array of their own",
            )
        n = block.lanes if block.column else block.columns
        copies = column_copies(block, where, name, block.padded, n, eval_)
        if not operand.parts:
            return copies
        return [
            c._replace(
                shared=(pl.ds(0, operand.parts), *c.shared),
                place=(pl.ds(c.place[0], operand.parts), *c.place[1:]),
            )
            for c in copies
        ]
    where = place(layout, operand)
    if block.vector and block.long and layout.chunk != PIECE:
        return [
            Copy(False, (k,), name, place_index(where, eval_, 1, (k * PIECE, PIECE)))
            for k in range(block.columns)
        ]
    if block.vector and layout.chunk:
        *lead, _ = place_index(where, eval_, 1, (0, block.features))
        return [Copy(True, (), name, tuple(lead))]
    if block.vector or block.column:
        length = block.columns if block.column else block.features
        spans = split_spans(round_up(length, 8), MAX_COPY)
        return [
            Copy(False, (pl.ds(*span),), name, place_index(where, eval_, 1, span))
            for span in spans
        ]
    if block.long and parts > 1:
        rows = block.columns // parts
        index = place_index(where, eval_, rows, (0, block.padded), row=part * rows)
        return [Copy(False, (pl.ds(part * rows, rows),), name, index)]
    size = block.padded // parts
    span = part * size, size
    if _aligned(where):
        index = place_index(where, eval_, block.columns, span)
        shared = (slice(None), pl.ds(*span)) if parts > 1 else ()
        return [Copy(False, shared, name, index)]
    if block.columns != 8 and block.padded != 64:
        raise PlanError(
            f"{name}: a block of {block.columns} columns does not start at a multiple "
            f"of 8 rows, or {list(layout.view)} does not divide by (8, 64)",
            operand.access.src,
            "give the columns a dimension of their own, of 8 or a multiple of 8",
        )
    return [
        Copy(
            True, (at // 64,), name, place_index(where, eval_, block.columns, (at, 64))
        )
        for at in range(span[0], sum(span), 64)
    ]


def _aligned(where: Place) -> bool:
    row, feature = where.axis("row"), where.axis("feature")
    if row is None or feature is None:
        return False
    whole = [(row, 8), (feature, 64)]
    return all(
        multiple(a.start, t) and (a.dim <= t or a.dim % t == 0) for a, t in whole
    )


def column_copies(
    block: Block,
    where: Place,
    name: str,
    features: int,
    columns: int,
    eval_: Eval,
) -> list[Copy]:
    if block.column:
        index = place_index(where, eval_, columns, (0, 1))
        feature = index[1].start
        return [Copy(False, (), name, (index[0], feature, index[2]))]
    return [
        Copy(
            False,
            (pl.ds(*span),),
            name,
            place_index(where, eval_, columns, span),
        )
        for span in split_spans(features, MAX_COPY)
    ]


def plain_result(block: Block, layout: Layout) -> bool:
    """True if a result is written row by row: in another view of its array, or to a
    piece of its rows that is no multiple of 64 features."""
    access = block.operand.access
    return not block.wide and (access.view != layout.view or _inside_rows(block))


def _inside_rows(block: Block) -> bool:
    access = block.operand.access
    last, n = access.axes[-1], access.view[-1]
    to_end = last.start.is_constant and int(last.start) + block.features == n
    return block.features % 64 != 0 and not to_end


def tiled_page(operand: Operand, layout: Layout, page: tuple[int, int]) -> bool:
    """True if one tiled copy may bring every page of a streamed block."""
    where = place(layout, operand)
    row, feature = where.axis("row"), where.axis("feature")
    assert row is not None
    assert feature is not None
    whole = [(row, 8, page[0]), (feature, 64, page[1])]
    return all(
        multiple(a.start, t) and a.dim % t == 0 and step % t == 0
        for a, t, step in whole
    )


def page_copies(
    operand: Operand,
    layout: Layout,
    page: tuple[int, int],
    row: Value,
    column: Value,
    eval_: Eval,
    *,
    tiled: bool,
    pieces: int = 1,
) -> list[Copy]:
    """The copies of a page at `row`, `column` of a streamed block.

    Tiled: one copy into [rows, features]. Else one per 64 features into [rows, 64].

    Args:
        page: rows, and features of each of its pieces.
        pieces: pieces of the depth that follow each other, each below the one before.
    """
    where = place(layout, operand)
    rows, features = page
    step = features if tiled else 64
    return [
        Copy(
            not tiled,
            (*(() if tiled else (at // 64,)), *_below(piece, rows, pieces)),
            layout.buffer.name,
            place_index(
                where, eval_, rows, (column + piece * features + at, step), row
            ),
        )
        for piece in range(pieces)
        for at in range(0, features, step)
    ]


def _below(piece: int, rows: int, pieces: int) -> tuple[Any, ...]:
    return (pl.ds(piece * rows, rows),) if pieces > 1 else ()
