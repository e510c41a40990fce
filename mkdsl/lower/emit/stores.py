"""The copies that take a result from shared memory to its array."""

from typing import Any

from jax.experimental import pallas as pl

from mkdsl.errors import PlanError
from mkdsl.lang.expr import Expr
from mkdsl.lower.emit.blocks import (
    MAX_COPY,
    Block,
    Copy,
    Eval,
    column_copies,
    place_index,
    plain_result,
    split_spans,
)
from mkdsl.lower.layout import Layout, Operand, Place, place, rows_in_view


def _one_run(block: Block, layout: Layout) -> bool:
    """True if the rows of a result written in another view follow each other."""
    axes, view = block.operand.access.axes, block.operand.access.view
    kept = [i for i, a in enumerate(axes) if not a.squeezed]
    adjacent = len(kept) == 2 and kept[0] == kept[1] - 1
    whole = adjacent and block.features == block.padded == view[kept[1]]
    return whole and layout.shape[-1] % (block.rows * block.features) == 0


def stores(
    block: Block, layout: Layout, eval_: Eval, *, flat: bool = True
) -> list[Copy]:
    """The copies that take a result from shared memory to its array.

    flat: shared memory may be seen as one row of all rows.

    Elements past the array are not written; a copy is skipped where a run-time index
    is past a dimension (its guard).
    """
    name, operand = layout.buffer.name, block.operand
    guard = _guard(operand)
    if layout.column is not None:
        where = place(layout, operand)
        n = block.columns
        found = column_copies(block, where, name, block.features, n, eval_)
        return [c._replace(guard=guard) for c in found]
    if block.wide or block.column:
        return _row_stores(block, layout, eval_)
    if operand.access.view != layout.view and flat and _one_run(block, layout):
        where = next(rows_in_view(layout, operand))
        return [
            Copy(True, (pl.ds(*span),), name, place_index(where, eval_, 1, span), guard)
            for span in split_spans(block.rows * block.features, MAX_COPY)
        ]
    if operand.access.view != layout.view:
        return [
            Copy(
                False,
                (pl.ds(r, 1), pl.ds(*span)),
                name,
                _row_index(where, eval_, 1, span),
                guard,
            )
            for r, where in enumerate(rows_in_view(layout, operand))
            for span in split_spans(block.features, MAX_COPY)
        ]
    where = place(layout, operand, written=True)
    rows = block.rows
    make = place_index if where.axis("row") is not None else _row_index
    if plain_result(block, layout):
        if block.features % 8:
            raise PlanError(
                f"{name}: blocks of {block.features} features are written inside rows "
                f"of {operand.access.view[-1]}",
                operand.access.src,
                "write multiples of 8 features, or whole rows",
            )
        return [
            Copy(
                False,
                (pl.ds(r, 1), pl.ds(*span)),
                name,
                make(where, eval_, 1, span, row=r),
                guard,
            )
            for r in range(rows)
            for span in split_spans(block.features, MAX_COPY)
        ]
    return [
        Copy(
            True,
            (at // 64, pl.ds(0, rows)),
            name,
            make(where, eval_, rows, (at, 64)),
            guard,
        )
        for at in range(0, block.padded, 64)
    ]


def _row_stores(block: Block, layout: Layout, eval_: Eval) -> list[Copy]:
    """A 32-bit vector, or 16-bit columns: they lie in their array as they stand."""
    name, operand = layout.buffer.name, block.operand
    length = block.columns if block.column else block.features
    same = operand.access.view == layout.view
    if block.wide and (length % 32 or not same):
        raise PlanError(
            f"{name}: a vector of {block.features} {operand.param.dtype} is written",
            operand.access.src,
            "write multiples of 32 features, in the shape in which it is read; or "
            "round it to bfloat16",
        )
    where = place(layout, operand) if same else next(rows_in_view(layout, operand))
    return [
        Copy(
            False,
            (pl.ds(*span),),
            name,
            place_index(where, eval_, 1, span),
            _guard(operand),
        )
        for span in split_spans(length, MAX_COPY)
    ]


def _row_index(
    where: Place, eval_: Eval, rows: int, feature: tuple[int, int], row: int = 0
) -> Any:
    """As place_index, with the merged leading dimension for the only row."""
    lead, *rest = place_index(where, eval_, rows, feature)
    return (pl.ds(lead, 1), *rest)


def _guard(operand: Operand) -> tuple[tuple[Expr, int], ...]:
    access = operand.access
    return tuple(
        (axis.start, n)
        for axis, n in zip(access.axes, access.view, strict=True)
        if axis.start.reads
    )
