"""Pages that no machine could load, refused with the shape and the user's line.

What it does: checks that a page of every streamed operand of a call fits a slot.
Needs: a Call and the buffers of its program; a Machine.
Guarantees: returns, or raises a PlanError that names the operand and what would fit.
Why it is correct: a page of a dot holds all rows of its operand and at least 64 columns
of the depth; a page of a fold holds one block of an operand whole.
Source: pages.py; an asynchronous copy takes at most 256 elements along each dimension
(gpu_facts.md, pitfalls).
"""

from collections.abc import Mapping

from mkdsl.errors import PlanError
from mkdsl.lang.program import Buffer, Call, Dot, Fold
from mkdsl.lower.machine import Machine
from mkdsl.lower.pages import (
    MAX_PAGE_COLUMNS,
    dot_page,
    round_up,
    stream_item_bytes,
)

MAX_PAGE_ROWS = 256


def check_pages(call: Call, buffers: Mapping[str, Buffer], machine: Machine) -> None:
    """Raise a PlanError if a streamed operand of the call has no page that fits."""
    for stream in call.task.streams:
        if isinstance(stream, Dot):
            _check_dot(call, stream, buffers, machine)
        else:
            _check_fold(call, stream, buffers, machine)


def _check_dot(
    call: Call, dot: Dot, buffers: Mapping[str, Buffer], machine: Machine
) -> None:
    item = stream_item_bytes(call.task, dot)
    rows, columns = dot_page(dot.rows, dot.depth, machine.page_bytes, item)
    if columns >= 64 and rows <= MAX_PAGE_ROWS:
        return
    most = machine.page_bytes // (64 * item) // 64 * 64
    raise _error(
        call,
        dot.rhs,
        buffers,
        f"a page of it is at least {rows} rows x 64 columns = "
        f"{rows * 64 * item} bytes; a page has {machine.page_bytes} bytes "
        f"and at most {MAX_PAGE_ROWS} rows",
        f"give each task at most {min(most, MAX_PAGE_ROWS)} rows",
    )


def _check_fold(
    call: Call, fold: Fold, buffers: Mapping[str, Buffer], machine: Machine
) -> None:
    item = stream_item_bytes(call.task, fold)
    for i in fold.operands:
        features = round_up(call.ins[i].shape[-1], 64)
        row_bytes = features * item
        size = round_up(fold.block, 64) * row_bytes
        if features > MAX_PAGE_COLUMNS:
            raise _error(
                call,
                i,
                buffers,
                f"its rows have {features} features (padded to 64), more than the "
                f"{MAX_PAGE_COLUMNS} that one copy takes",
                "split the features over a grid axis",
            )
        if fold.block > MAX_PAGE_ROWS or size > machine.page_bytes:
            most = min(machine.page_bytes // row_bytes // 64 * 64, MAX_PAGE_ROWS)
            raise _error(
                call,
                i,
                buffers,
                f"a block of it is {fold.block} rows x {features} features = {size} "
                f"bytes; a page has {machine.page_bytes} bytes and at most "
                f"{MAX_PAGE_ROWS} rows",
                f"fold over blocks of at most {most} rows",
            )


def _error(
    call: Call, operand: int, buffers: Mapping[str, Buffer], why: str, hint: str
) -> PlanError:
    param, access = call.task.params[operand], call.ins[operand]
    shape = ", ".join(map(str, access.shape))
    return PlanError(
        f"call {call.name}: task {call.task.name} streams {param.name}: "
        f"{buffers[access.buffer].dtype}[{shape}] of {access.buffer}, but {why}",
        call.src,
        hint,
    )
