"""A call as kinds: whole, or a partial kind and its combine.

What it does: builds the kinds of one call split into a given number of parts, and the
buffers of accumulators or carries between them.
Needs: parts that `legal_parts` allows.
Guarantees: the partial kind reads what the task needs before its cut, with the streamed
operands narrowed to one part; the combine reads what it needs after the cut, and all
parts of every accumulator or carry.
Why it is correct: parts of a dot are whole pages of the depth, so they cover it once.
Parts of a fold are blocks [part*nb//parts, (part+1)*nb//parts) of the nb that the
extent has: consecutive parts share their bounds, part 0 starts at 0 and the last ends
at nb, so every block is in one part at every length. Accumulators have memory of their
own for every layer, part and grid point.
Cost: linear in the operands.
"""

import math
from dataclasses import dataclass, replace

from mkdsl.lang.expr import Expr, cdiv, expr, minimum, var
from mkdsl.lang.program import Access, Axis, Buffer, Call, Dot, Fold
from mkdsl.lower.ir import Kind
from mkdsl.lower.machine import Machine
from mkdsl.lower.pages import accumulators, dot_page, stream_item_bytes

LAYER, PART = var("layer"), var("part")


@dataclass(frozen=True, slots=True)
class Site:
    """A call in one way to split it: its kinds and the buffers between them."""

    kinds: tuple[Kind, ...]
    temps: tuple[Buffer, ...] = ()


def legal_parts(call: Call, machine: Machine) -> tuple[int, ...]:
    """Every number of parts that the task allows, 1 included."""
    task = call.task
    dots = [s for s in task.streams if isinstance(s, Dot)]
    folds = [s for s in task.streams if isinstance(s, Fold)]
    if task.cut == "dot" and dots and not folds:
        depth = dots[0].depth
        columns = [
            dot_page(d.rows, depth, machine.page_bytes, stream_item_bytes(task, d))[1]
            for d in dots
        ]
        whole = all(d.depth == depth for d in dots) and not any(
            depth % c for c in columns
        )
        pages = math.gcd(*(depth // c for c in columns)) if whole else 1
        return tuple(p for p in range(1, pages + 1) if pages % p == 0)
    if task.cut == "fold" and len(folds) == 1 and not dots:
        return tuple(range(1, _most_blocks(call, folds[0]) + 1))
    return (1,)


def _most_blocks(call: Call, fold: Fold) -> int:
    return max(cdiv(call.ins[i].shape[0], fold.block) for i in fold.operands)


def site_of(
    call: Call, parts: int, layers: int | None, *, pieces: bool = False
) -> Site:
    """The kinds of a call in so many parts.

    Args:
        pieces: whether its long operands are in pieces, if it is whole.
    """
    task = call.task
    if parts == 1:
        every = tuple(range(len(call.ins)))
        full = Kind(
            call.name,
            "full",
            1,
            task,
            call.grid,
            every,
            call.ins,
            call.outs,
            call.src,
            pieces,
        )
        return Site((full,))
    temps, outs, ins = _between(call, parts, layers)
    cuts = _narrowed(call, parts)
    partial = Kind(
        call.name,
        "partial",
        parts,
        task,
        call.grid,
        task.before,
        tuple(cuts.get(i, call.ins[i]) for i in task.before),
        outs,
        src=call.src,
    )
    combine = Kind(
        call.name,
        "combine",
        parts,
        task,
        call.grid,
        task.after,
        (*(call.ins[i] for i in task.after), *ins),
        call.outs,
        src=call.src,
    )
    return Site((partial, combine), temps)


def _between(
    call: Call, parts: int, layers: int | None
) -> tuple[tuple[Buffer, ...], tuple[Access, ...], tuple[Access, ...]]:
    """Buffers of accumulators or carries, their writes by part, their reads of all."""
    word = "acc" if call.task.cut == "dot" else "carry"
    layer = () if layers is None else (Axis(LAYER, 1, squeezed=True),)
    pid = tuple(Axis(var(f"g{i}"), 1, squeezed=True) for i in range(len(call.grid)))
    temps: list[Buffer] = []
    writes: list[Access] = []
    reads: list[Access] = []
    for n, ((columns, features), dtype) in enumerate(accumulators(call.task)):
        lead = () if layers is None else (layers,)
        # Parts of one task lie side by side: the combine loads them with one copy.
        shape = (*lead, *call.grid, parts, columns, features)
        buffer = Buffer(f"{call.name}.{word}{n}", shape, dtype, "temp", src=call.src)
        if buffer.item_bytes == 4:
            buffer = replace(buffer, column=len(shape) - 2)
        tile = (Axis(expr(0), columns), Axis(expr(0), features))
        one, every = Axis(PART, 1, squeezed=True), Axis(expr(0), parts)
        temps.append(buffer)
        writes.append(Access(buffer.name, shape, (*layer, *pid, one, *tile), call.src))
        reads.append(Access(buffer.name, shape, (*layer, *pid, every, *tile), call.src))
    return tuple(temps), tuple(writes), tuple(reads)


def _narrowed(call: Call, parts: int) -> dict[int, Access]:
    """The accesses of part `part` that differ from those of the whole task."""
    cuts: dict[int, Access] = {}
    for stream in call.task.streams:
        if isinstance(stream, Fold):
            for i in stream.operands:
                cuts[i] = _narrow(call.ins[i], 0, parts, stream.block)
            continue
        for i in (stream.lhs, stream.rhs):
            if i is not None:
                cuts[i] = _narrow(call.ins[i], -1, parts, None)
    return cuts


def _narrow(access: Access, at: int, parts: int, block: int | None) -> Access:
    """The access with its at-th visible axis cut: by depth, or in blocks of rows."""
    where = [i for i, axis in enumerate(access.axes) if not axis.squeezed][at]
    axis = access.axes[where]
    cut = _piece(axis, parts) if block is None else _blocks(axis, parts, block)
    axes = (*access.axes[:where], cut, *access.axes[where + 1 :])
    return replace(access, axes=axes)


def _piece(axis: Axis, parts: int) -> Axis:
    size = axis.size // parts
    extent = None if axis.extent is None else minimum(axis.extent - PART * size, size)
    return Axis(axis.start + PART * size, size, extent=extent)


def _blocks(axis: Axis, parts: int, block: int) -> Axis:
    rows: Expr = expr(axis.size) if axis.extent is None else axis.extent
    most = cdiv(axis.size, block)
    blocks = expr(cdiv(rows, block))
    before = _part_times(blocks, most, parts)
    first, last = before // parts, (before + blocks) // parts
    extent = minimum(rows - first * block, (last - first) * block)
    size = cdiv(most, parts) * block
    return Axis(axis.start + first * block, size, extent=extent)


def _part_times(value: Expr, most: int, parts: int) -> Expr:
    """part * value, for 0 <= part < parts and 0 <= value <= most.

    The grammar has products with constants only, so run-time values are added up by
    the binary digits of the part: digit * value = min(value, most * digit).
    """
    if value.is_constant:
        return PART * value
    total = expr(0)
    for bit in range((parts - 1).bit_length()):
        digit = PART // 2**bit % 2 if parts > 2 else PART
        total = total + minimum(value, digit * most) * 2**bit
    return total
