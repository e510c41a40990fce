"""How many rows of a weight one task should have.

What it does: chooses the tile of a projection for a machine.
Needs: the rows and the depth of the projection.
Guarantees: 16, 32 or 64 rows, few only where their pages are full (pages.stacks).
Why it is correct: any tile is; this is about speed alone.
How: the tasks of one stage run in waves of one per SM. The time is the number of waves
times that of a task; the largest tile wins unless a smaller one gains 5 %.
Cost: arithmetic.
Source: a step of Llama-3.2-1B (docs/performance_log.md).
"""

from mkdsl.lang.expr import cdiv
from mkdsl.lower.machine import H200, Machine
from mkdsl.lower.pages import PIECE, PIECES, dot_page, tile_bytes

TILES = (64, 32, 16)
LEAST_GAIN = 0.05


def projection_rows(
    count: int, depth: int, columns: int, machine: Machine = H200
) -> int:
    """Rows of a [count, depth] weight that one task should have.

    Args:
        count: rows of all the weights that are read in one stage, such as those of gate
            and up together.
        depth: bfloat16 elements of a row.
        columns: rows of the batch.
        machine: where it runs.

    >>> projection_rows(2048, 2048, 1), projection_rows(3072, 2048, 8)
    (16, 32)
    >>> projection_rows(8192, 2048, 1), projection_rows(640, 640, 1)
    (64, 64)

    A depth that has to be split, because a task has no room for the whole of its other
    operand, is split for balance as well.

    >>> projection_rows(2048, 8192, 8), projection_rows(2048, 8192, 1)
    (64, 16)
    """
    in_pieces = columns == 1 and depth % (PIECE * PIECES) == 0
    resident = tile_bytes(columns, depth, "bfloat16") // (PIECES if in_pieces else 1)
    if resident > machine.smem_bytes // 3:
        return TILES[0]
    best, best_ns = TILES[0], float("inf")
    for rows in TILES:
        if dot_page(rows, depth, machine.page_bytes)[0] != rows:
            continue
        waves = cdiv(cdiv(count, rows), machine.sms)
        one = machine.task_ns + machine.page_ns + machine.read_ns(rows * depth * 2)
        if waves * one < best_ns * (1 - LEAST_GAIN):
            best, best_ns = rows, waves * one
    return best
