"""Operands that come in blocks, so that a dot starts on the first of them.

What it does: says which operand of a kind its dot takes block by block, into how many
blocks it may be divided, and the access of each.
Needs: a kind as decompose makes it.
Guarantees: the blocks of an operand are disjoint and cover it; each is a whole number
of pages of the dot.
Why it is correct: an operand that is the left side of a dot as it stands is read by
dots alone (lang/task.py), here by one, from first to last page, so nothing
of block k is needed before the first page of that block.
How: `count_blocks` divides where it helps: where the producers of the operand run in
several waves, the first of them are long done when the last are not.
Cost: arithmetic.
Source: a down-projection that waits for chunks of what it reads: 652 -> 643 us per step
(gpu_facts.md, H200, 2026-11-29).
"""

from collections.abc import Iterator
from dataclasses import replace

from mkdsl.lang.program import Access, Axis, Dot
from mkdsl.lower.ir import FETCH_GATES, MOST_BLOCKS, Gate, Kind
from mkdsl.lower.pages import PIECE, PIECES, stream_page


def blocked_operand(kind: Kind) -> int:
    """Position among `ins` of the operand that may come in blocks, or -1."""
    if kind.mode != "full" or len(kind.task.streams) != 1:
        return -1
    (dot,) = kind.task.streams
    if not isinstance(dot, Dot) or dot.lhs is None:
        return -1
    n = kind.operands.index(dot.lhs)
    last = kind.ins[n].axes[-1]
    whole = not last.squeezed and last.extent is None and last.size == dot.depth
    constant = last.start.is_constant and int(last.start) == 0
    return n if whole and constant and last.size == kind.ins[n].view[-1] else -1


def legal_blocks(kind: Kind, page_bytes: int) -> tuple[int, ...]:
    """Numbers of blocks that a kind allows, most first; 1 is always legal."""
    n = blocked_operand(kind)
    if n < 0:
        return (1,)
    (dot,) = kind.task.streams
    assert isinstance(dot, Dot)
    page = stream_page(kind, dot, page_bytes)[1]
    step = max(page, PIECE * PIECES) if kind.pieces else page
    if step % page:
        return (1,)
    return (
        *(b for b in range(MOST_BLOCKS, 1, -1) if dot.depth % (b * step) == 0),
        1,
    )


def block_accesses(kind: Kind, n: int) -> Iterator[tuple[Gate, Access]]:
    """Operand n as it is loaded: (gate, access) of each block, or of the whole."""
    access = kind.ins[n]
    if kind.blocks == 1 or n != blocked_operand(kind):
        yield "resident", access
        return
    last = access.axes[-1]
    size = last.size // kind.blocks
    for k in range(kind.blocks):
        axis = Axis(last.start + k * size, size)
        yield FETCH_GATES[k], replace(access, axes=(*access.axes[:-1], axis))
