"""How many rows of a weight one task should have.

What it does: chooses the tile of a projection for a machine.
Needs: the rows and the depth of the projection.
Guarantees: one of `tiles`; fewer than 64 rows only where their pages are full
(pages.stacks), more only where a page holds all of them.
Why it is correct: any tile is; this is about speed alone.
How: the tasks of one stage run in waves of one per SM. The time is the number of waves
times that of a task; the largest tile wins unless a smaller one gains 5 %. While a task
computes its operand, the loader gets as far as the ring, and then has to wait.
Cost: arithmetic.
Source: a step of Llama-3.2-1B (docs/performance_log.md).
"""

from mkdsl.lang.expr import cdiv
from mkdsl.lower.machine import H200, Machine
from mkdsl.lower.pages import PIECE, PIECES, dot_page, round_up, tile_bytes
from mkdsl.lower.pieces import page_allows

TILES = (64, 32, 16)
LEAST_GAIN = 0.05


def projection_rows(
    count: int,
    depth: int,
    columns: int,
    machine: Machine | None = None,
    *,
    weights: int = 1,
    computed: bool = False,
    tiles: tuple[int, ...] = TILES,
) -> int:
    """Rows of a [count, depth] weight that one task should have.

    Args:
        count: rows of the weight, or of all those that share a stage.
        depth: bfloat16 elements of a row.
        columns: rows of the batch.
        machine: where it runs; an H200 if None.
        weights: how many such weights a task reads, such as gate and up.
        computed: whether a task computes the operand that they meet, a norm say.
        tiles: rows to choose from, the best first where they are equally fast; 64 or
            the next below where none leaves room for the other operand.

    >>> projection_rows(2048, 2048, 1), projection_rows(3072, 2048, 8)
    (16, 32)
    >>> projection_rows(8192, 2048, 1), projection_rows(640, 640, 1)
    (64, 64)

    A depth that has to be split, because a task has no room for the whole of its other
    operand, is split for balance as well.

    >>> [projection_rows(2048, 8192, batch) for batch in (1, 8, 16)]
    [16, 64, 64]

    Few rows even out what each SM streams, unless each task norms eight columns first.

    >>> gate_up = {"weights": 2, "computed": True}
    >>> [projection_rows(14336, 4096, batch, **gate_up) for batch in (1, 8)]
    [16, 64]

    >>> projection_rows(151936, 4096, 1, computed=True, tiles=(256, 128, 64))
    128
    """
    machine = machine or H200
    best, best_ns = max(t for t in tiles if t <= 64), float("inf")
    pages = {rows: dot_page(rows, depth, machine.page_bytes) for rows in tiles}
    pages = {rows: p for rows, p in pages.items() if p[0] == rows and p[1] >= 64}
    sizes = [_resident_bytes(page, depth, columns) for page in pages.values()]
    room = machine.smem_bytes // 3
    if computed:
        # The whole operand has to fit, where a part of it would do without that.
        room = max(room, min(sizes, default=0))
    for (rows, page), size in zip(pages.items(), sizes, strict=True):
        if size > room:
            continue
        waves = cdiv(cdiv(count, rows), machine.sms)
        one = read = machine.read_ns(weights * rows * depth * 2)
        if computed:
            ahead = min(read, 2 * machine.in_flight * machine.page_ns)
            one = max(read, _computed_ns(page, depth, columns, machine) + read - ahead)
        ns = machine.page_ns + waves * (machine.task_ns + one)
        if ns < best_ns * (1 - LEAST_GAIN):
            best, best_ns = rows, ns
    return best


def _in_pieces(page: tuple[int, int], depth: int, columns: int) -> bool:
    return columns == 1 and depth % (PIECE * PIECES) == 0 and page_allows(*page)


def _resident_bytes(page: tuple[int, int], depth: int, columns: int) -> int:
    """Bytes of the operand that stays while pages stream past it."""
    pieces = PIECES if _in_pieces(page, depth, columns) else 1
    return tile_bytes(columns, depth, "bfloat16") // pieces


def _computed_ns(
    page: tuple[int, int], depth: int, columns: int, machine: Machine
) -> float:
    """Until a task has its operand: what it is computed from arrives, and is used."""
    lanes = 1 if _in_pieces(page, depth, columns) else round_up(columns, 8)
    return machine.operands_ns + machine.computed_ns * lanes * depth
