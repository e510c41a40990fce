"""Rows of one column in pieces: which calls and buffers have them, and where they lie.

What it does: finds the calls whose long operands lie in shared memory as [pieces,
PIECE] instead of [8 columns, depth], seven of which are padding, and rewrites accesses
to their buffers accordingly.
Needs: a verified Program.
Guarantees: all accesses to a buffer in pieces stay inside one piece, or take all.
Why it is correct: [1, F] and [F / PIECE, PIECE] are the same bytes of a row-major
array. The body was checked for what it does with them (lang/pieces.py).
Cost: linear in accesses, times the rounds until nothing changes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mkdsl.lang.program import Access, Axis, Call, Dot, Program
from mkdsl.lower.ir import Kind
from mkdsl.lower.pages import PIECE, PIECES, dot_page, stacks


def calls_in_pieces(
    program: Program, page_bytes: int, without: Iterable[str] = ()
) -> frozenset[str]:
    """Names of the calls whose long operands are in pieces.

    Args:
        without: calls that are to be left as they are.
    """
    calls = list(program.calls())
    buffers = {b.name: b for b in program.buffers}
    found = {
        c.name: c
        for c in calls
        if c.name not in without and _task_allows(c, page_bytes)
    }
    while True:
        wanted = {a.buffer for c in found.values() for a in _long_reads(c)}
        bad = {name for name in wanted if not _buffer_allows(name, calls, found)}
        bad |= {name for name in wanted if buffers[name].item_bytes != 2}
        left = {
            name: c
            for name, c in found.items()
            if not bad & {a.buffer for a in _long_reads(c)}
        }
        if len(left) == len(found):
            return frozenset(found)
        found = left


def _task_allows(call: Call, page_bytes: int) -> bool:
    task = call.task
    if not task.long or task.long % (PIECE * PIECES):
        return False
    for s in task.streams:
        if not isinstance(s, Dot):
            return False
        if not page_allows(*dot_page(s.rows, s.depth, page_bytes)):
            return False
    return True


def page_allows(rows: int, columns: int) -> bool:
    """True if pages of so many rows and columns may meet an operand in pieces."""
    width = columns // stacks(rows)
    return width == PIECE or (rows >= 64 and width > 0 and PIECE % width == 0)


def long_operands(kind_or_call: Kind | Call) -> tuple[int, ...]:
    """Positions among `ins` of the tiles as long as the depth of the dots."""
    c = kind_or_call
    which = c.operands if isinstance(c, Kind) else range(len(c.ins))
    return tuple(
        n
        for n, i in enumerate(which)
        if c.task.params[i].use == "tile" and c.task.params[i].shape[-1] == c.task.long
    )


def _long_reads(call: Call) -> list[Access]:
    return [call.ins[n] for n in long_operands(call)]


def _buffer_allows(name: str, calls: Iterable[Call], found: Mapping[str, Call]) -> bool:
    for c in calls:
        long = set(long_operands(c)) if c.name in found else set[int]()
        for n, access in enumerate(c.ins):
            if access.buffer != name:
                continue
            whole = n in long and _is_whole(access)
            if not whole and not (c.task.params[n].use == "tile" and _inside(access)):
                return False
        for access in c.outs:
            if access.buffer == name and not (_inside(access) or _rows_fit(access)):
                return False
    return True


def one_row(access: Access) -> bool:
    """True if it takes features of the one row of [.., 1, features]."""
    row = access.axes[-2] if len(access.axes) > 1 else None
    return row is not None and access.view[-2] == 1 and not row.squeezed


def _is_whole(access: Access) -> bool:
    last, n = access.axes[-1], access.view[-1]
    whole = last.start.is_constant and int(last.start) == 0 and last.size == n
    return one_row(access) and whole and not last.squeezed


def _inside(access: Access) -> bool:
    """True if a block [1, R] lies in one piece."""
    last = access.axes[-1]
    if not one_row(access) or last.squeezed or PIECE % last.size:
        return False
    terms = (last.start.constant, *(k for _, k in last.start.terms))
    return last.extent is None and all(k % last.size == 0 for k in terms)


def _rows_fit(access: Access) -> bool:
    """True if rows of a block in another view of the array lie in one piece each."""
    kept = [a for a in access.axes if not a.squeezed]
    last = access.axes[-1]
    fits = not last.squeezed and last.size == access.view[-1]
    return fits and PIECE % last.size == 0 and not one_row(access) and len(kept) <= 2


# ----------------------------------------------------------------- after decompose


def buffers_in_pieces(kinds: Iterable[Kind]) -> frozenset[str]:
    """Names of the buffers that some kind reads in pieces."""
    return frozenset(
        k.ins[n].buffer for k in kinds if k.pieces for n in long_operands(k)
    )


def in_pieces(access: Access, long: bool) -> Access:
    """The access in the view [.., pieces, PIECE].

    Args:
        long: it takes all pieces.
    """
    *outer, _, last = access.axes
    n = access.view[-1] // PIECE
    if long:
        axes = Axis(last.start, n), Axis(last.start, PIECE)
    else:
        axes = Axis(last.start // PIECE, 1), Axis(last.start % PIECE, last.size)
    view = (*access.view[:-2], n, PIECE)
    return replace(access, view=view, axes=(*outer, *axes))
