"""How buffers lie in device memory for the kernel.

What it does: chooses for every buffer a physical shape that bulk copies can address,
    and turns each access into physical indices.
Needs: the kinds of a TaskGraph.
Guarantees: 2-byte arrays stay row-major, in the one shape that tiles are read in;
    4-byte tiles are stored with columns innermost, padded to a multiple of 8, since
    only 16-bit values can be transposed on the way to shared memory. Leading
    dimensions that every access squeezes are merged into one, because a tensor map has
    at most five dimensions.
Why it is correct: a physical index is the row-major position of the logical one; a
    write in another view of the array goes row by row, through that position.
Cost: linear in accesses.
Source: docs/decisions (memory layouts); CUDA driver API, cuTensorMapEncodeTiled.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mkdsl.errors import PlanError
from mkdsl.lang.expr import Expr, expr
from mkdsl.lang.program import Access, Axis, Buffer, Param
from mkdsl.lower.ir import Kind
from mkdsl.lower.pages import accumulators, round_up
from mkdsl.lower.pieces import buffers_in_pieces, in_pieces, long_operands, one_row

# A bulk load moves a multiple of 128 bytes (Mosaic, one warpgroup): 32 columns.
COLUMN_PAD = 32
# Strides of a tensor map are multiples of 16 bytes (cuTensorMapEncodeTiled).
COPY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand or result of a kind, with its access.

    Attributes:
        param: what the task sees; for parts of a split task, one part.
        parts: number of parts that the operand of a combine holds, or 0.
    """

    param: Param
    access: Access
    parts: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Physical form of a buffer.

    Attributes:
        view: logical shape in which it is addressed.
        lead: number of leading dimensions merged into physical dimension 0.
        column: logical dimension moved innermost and padded, or None.
        shape: physical shape.
        chunk: vectors that are read whole lie in rows of `chunk`, so that one copy
            brings them (a copy moves 256 elements along a dimension at most), or 0.
    """

    buffer: Buffer
    view: tuple[int, ...]
    lead: int
    column: int | None
    shape: tuple[int, ...]
    chunk: int = 0


AxisRole = Literal["index", "row", "feature"]


@dataclass(frozen=True, slots=True)
class PlaceAxis:
    """One physical dimension of a block.

    Attributes:
        start: first element.
        size: elements of the block that exist in the task.
        dim: physical size of the dimension.
        role: `index` (one element, dropped), `row` (columns of a tile, rows of a
            stream) or `feature`.
    """

    start: Expr
    size: int
    dim: int
    role: AxisRole


@dataclass(frozen=True, slots=True)
class Place:
    """Physical position of a block: the merged index, then the other dimensions."""

    lead: Expr
    axes: tuple[PlaceAxis, ...]

    def axis(self, role: AxisRole) -> PlaceAxis | None:
        """The dimension with that role."""
        return next((a for a in self.axes if a.role == role), None)


def handed_on(kind: Kind) -> tuple[Param, ...]:
    """What a part of a split task hands on, as operands of the combine."""
    return tuple(
        Param(f"part{i}", shape, dtype, "tile")
        for i, (shape, dtype) in enumerate(accumulators(kind.task))
    )


def operands(kind: Kind, pieced: frozenset[str]) -> tuple[Operand, ...]:
    """Operands of a kind in the order of `kind.ins`.

    Args:
        pieced: buffers in pieces.
    """
    own = [kind.task.params[i] for i in kind.operands]
    found = [Operand(_seen(p, a), a) for p, a in zip(own, kind.ins, strict=False)]
    long = long_operands(kind) if kind.pieces else ()
    for n, o in enumerate(found):
        if o.access.buffer in pieced:
            access = in_pieces(o.access, n in long)
            param = replace(o.param, shape=access.shape) if n in long else o.param
            found[n] = Operand(param, access)
    if kind.mode == "combine":
        rest = kind.ins[len(own) :]
        pairs = zip(handed_on(kind), rest, strict=True)
        found += [Operand(p, a, kind.parts) for p, a in pairs]
    return tuple(found)


def _seen(param: Param, access: Access) -> Param:
    """The parameter with the features of the access: a part has some of its depth."""
    if param.use not in ("tile", "vector", "stream") or param.shape[-1] == 1:
        return param
    return replace(param, shape=(*param.shape[:-1], access.shape[-1]))


def results(kind: Kind, pieced: frozenset[str]) -> tuple[Operand, ...]:
    """Results of a kind in the order of `kind.outs`.

    Args:
        pieced: buffers in pieces.
    """
    own = handed_on(kind) if kind.mode == "partial" else kind.task.results
    return tuple(
        Operand(p, in_pieces(a, long=False) if a.buffer in pieced and one_row(a) else a)
        for p, a in zip(own, kind.outs, strict=True)
    )


def _column_axis(o: Operand) -> int | None:
    """The dimension of the access that holds columns."""
    if o.param.use != "tile":
        return None
    kept = [i for i, a in enumerate(o.access.axes) if not a.squeezed]
    kept = kept[1:] if o.parts else kept
    return kept[0] if kept else None


def plan_layouts(
    buffers: Sequence[Buffer], kinds: Sequence[Kind], *, chunks: bool = True
) -> dict[str, Layout]:
    """The layout of every buffer that some kind uses.

    Args:
        chunks: allow rows of vectors, see Layout.chunk.

    Raises:
        PlanError: two accesses of one buffer need different layouts.
    """
    reads: dict[str, list[Operand]] = {}
    writes: dict[str, list[Operand]] = {}
    pieced = buffers_in_pieces(kinds)
    for kind in kinds:
        for o in operands(kind, pieced):
            if o.param.use != "scalar":
                reads.setdefault(o.access.buffer, []).append(o)
        for o in results(kind, pieced):
            writes.setdefault(o.access.buffer, []).append(o)
    table = {b.name: b for b in buffers}
    return {
        name: _layout(table[name], reads.get(name, []), writes.get(name, []), chunks)
        for name in table
        if name in reads or name in writes
    }


def _layout(
    buffer: Buffer, reads: list[Operand], writes: list[Operand], chunks: bool
) -> Layout:
    views = list(dict.fromkeys(o.access.view for o in reads or writes))
    if len(views) > 1:
        raise PlanError(
            f"{buffer.name} is read as {views[0]} and as {views[1]}",
            reads[1].access.src,
            "read an array in one shape only; write it in any",
        )
    view = views[0]
    columns = {_column_axis(o) for o in (*reads, *writes)}
    if buffer.item_bytes == 2:
        columns = {None}
    same = all(o.access.view == view for o in writes)
    if len(columns) > 1 or (columns != {None} and not same):
        raise PlanError(
            f"{buffer.name}: {buffer.dtype}{list(view)} is used with columns on "
            f"different axes {sorted(map(str, columns))}",
            (reads or writes)[0].access.src,
            "4-byte arrays have their columns on one axis for all tasks; store it as "
            "bfloat16, or copy it in a task",
        )
    column = next(iter(columns), None)
    if column is not None:
        outer = [n for i, n in enumerate(view) if i != column]
        features = 1
        if _has_features((reads or writes)[0]):
            features = outer.pop()
        if features > 1:
            # Whole blocks: a bulk store is not clipped at an inner dimension.
            features = round_up(features, max(map(_features, (*reads, *writes))))
            features = round_up(features, 64)
        pad = 8 if features > 1 else COLUMN_PAD
        shape = (math.prod(outer), features, round_up(view[column], pad))
        return Layout(buffer, view, len(view), column, shape)
    same_view = [o.access for o in (*reads, *writes) if o.access.view == view]
    lead = min(min(map(_squeezed, same_view)), len(view) - 1)
    shape = (math.prod(view[:lead]), *view[lead:])
    row_bytes = shape[-1] * buffer.item_bytes
    if row_bytes % COPY_BYTES:
        whole = round_up(row_bytes, COPY_BYTES) // buffer.item_bytes
        raise PlanError(
            f"{buffer.name}: rows of {buffer.dtype}{list(view)} have {row_bytes} "
            f"bytes, no multiple of {COPY_BYTES}",
            (reads or writes)[0].access.src,
            f"pad its last axis to {whole} elements",
        )
    chunk = 0
    if chunks and not writes and all(_whole_vector(o) for o in reads):
        chunk = next((c for c in (256, 192, 128, 64) if view[-1] % c == 0), 0)
        if chunk:
            shape = (*shape[:-1], view[-1] // chunk, chunk)
    return Layout(buffer, view, lead, None, shape, chunk)


def _whole_vector(o: Operand) -> bool:
    last, n = o.access.axes[-1], o.access.view[-1]
    whole = last.start == expr(0) and last.size == n and not last.squeezed
    return o.param.use == "vector" and whole


def _features(o: Operand) -> int:
    return next(a.size for a in reversed(o.access.axes) if not a.squeezed)


def _has_features(o: Operand) -> bool:
    """Column blocks [columns] have no feature axis; tiles [columns, features] do."""
    kept = [a for a in o.access.axes if not a.squeezed]
    return len(kept) - bool(o.parts) == 2


def _squeezed(access: Access) -> int:
    count = 0
    for a in access.axes:
        if not a.squeezed:
            break
        count += 1
    return count


def place(layout: Layout, operand: Operand, *, written: bool = False) -> Place:
    """Physical position of a block read or written in the view of the layout.

    The parts of an operand of a combine follow the place given, in the merged
    dimension.

    Args:
        written: it is a result: a vector then has a row, too.
    """
    axes = operand.access.axes
    kept = [i for i, a in enumerate(axes) if not a.squeezed]
    if operand.parts:
        kept = kept[1:]
    if layout.column is not None:
        return _column_place(layout, axes, kept)
    rowed = len(kept) == 2 and (written or operand.param.use in ("tile", "stream"))
    roles: dict[int, AxisRole] = {kept[-1]: "feature"}
    if rowed or (len(kept) == 2 and axes[kept[0]].size == 1):
        roles[kept[0]] = "row" if rowed else "index"
    n = layout.lead
    lead = _flat([a.start for a in axes[:n]], layout.view[:n])
    dims = layout.view[n:] if layout.chunk else layout.shape[1:]
    rest = enumerate(zip(axes[n:], dims, strict=True), n)
    return Place(
        lead,
        tuple(
            PlaceAxis(a.start, a.size, dim, roles.get(i, "index"))
            for i, (a, dim) in rest
        ),
    )


def _column_place(layout: Layout, axes: Sequence[Axis], kept: Sequence[int]) -> Place:
    column = kept[0]
    feature = kept[1] if len(kept) == 2 else None
    block = axes[column]
    if block.start != expr(0) or block.size < layout.view[column]:
        raise PlanError(
            f"{layout.buffer.name}: {layout.buffer.dtype}{list(layout.view)} is used "
            f"by columns [{block.start}, {block.start} + {block.size}) only",
            layout.buffer.src,
            "a 4-byte array is read and written with all its columns at once; store "
            "it as bfloat16, or let one task handle all columns",
        )
    outer = [i for i in range(len(axes)) if i not in (column, feature)]
    lead = _flat([axes[i].start for i in outer], [layout.view[i] for i in outer])
    start, size = (expr(0), 1)
    if feature is not None:
        start, size = axes[feature].start, axes[feature].size
    return Place(
        lead,
        (
            PlaceAxis(start, size, layout.shape[1], "feature"),
            PlaceAxis(expr(0), block.size, layout.shape[2], "row"),
        ),
    )


def _flat(starts: Sequence[Expr], sizes: Sequence[int]) -> Expr:
    total = expr(0)
    for start, n in zip(starts, sizes, strict=True):
        total = total * n + start
    return total


def rows_in_view(layout: Layout, operand: Operand) -> Iterator[Place]:
    """Positions of the rows of a 2-byte block written in another view, in order.

    Each row of features must be contiguous in the last physical dimension.
    """
    access = operand.access
    strides = [math.prod(access.view[i + 1 :]) for i in range(len(access.view))]
    start = expr(0)
    for axis, stride in zip(access.axes, strides, strict=True):
        start = start + axis.start * stride
    kept = [i for i, a in enumerate(access.axes) if not a.squeezed]
    features = access.axes[kept[-1]].size
    if layout.shape[-1] % features:
        raise PlanError(
            f"{layout.buffer.name} is written as {list(access.view)} in rows of "
            f"{features} and read as {list(layout.view)}",
            access.src,
            "rows of features must divide the last dimension of the other shape",
        )
    count, step = 1, 0
    if len(kept) == 2:
        count, step = access.axes[kept[0]].size, strides[kept[0]]
    for r in range(count):
        offset = start + r * step
        inner = list(enumerate(layout.shape))[1:]
        axes = [
            PlaceAxis(
                offset // math.prod(layout.shape[i + 1 :]) % n,
                features if i == len(layout.shape) - 1 else 1,
                n,
                "feature" if i == len(layout.shape) - 1 else "index",
            )
            for i, n in inner
        ]
        yield Place(offset // math.prod(layout.shape[1:]), tuple(axes))
