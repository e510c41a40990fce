"""Shapes and bytes of blocks in shared memory.

What it does: says how a tile, a vector and a page of a stream lie in shared memory, so
that decompose, plan_pages and the emitter agree on every byte.
Needs: tasks whose tiles are [columns, features].
Guarantees: every block starts at a multiple of ALIGNMENT; a page of a stream has a
multiple of 64 features, 16, 32 or a multiple of 64 rows, and never more bytes than a
slot of the ring.
Why it is correct: streamed rows are the M side of wgmma (multiples of 64), columns its
N side (multiples of 8); a 128-byte swizzle repeats every 1024 bytes.
Cost: arithmetic.
Source: gpu_facts.md, "One orientation for everything".
"""

import math
from collections.abc import Sequence

from mkdsl.lang.program import ITEM_BYTES, Dot, Fold, Stream, TaskDef
from mkdsl.lower.ir import Kind

# Swizzle 128 repeats after 8 rows of 128 bytes; Mosaic aligns buffers alike.
ALIGNMENT = 1024
# Columns beyond 256 need several copies: one asynchronous copy takes at most 256
# elements along each dimension (gpu_facts.md, pitfalls).
MAX_PAGE_COLUMNS = 256
# A row of one column may be seen as pieces of so many features (lower/pieces.py); a
# matrix operand has a multiple of so many of them.
PIECE, PIECES = 256, 8
# Rows of the scratch in which the pieces of a stacked product are added up: each of 64
# rows twice, so that they can be read with any offset.
STACK_ROWS = 128


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def aligned(size: int) -> int:
    """Bytes that a block of `size` bytes takes among aligned blocks."""
    return round_up(size, ALIGNMENT)


def dot_page(
    rows: int, depth: int, page_bytes: int, item_bytes: int = 2
) -> tuple[int, int]:
    """(rows, columns) of one page of a streamed [rows, depth] operand.

    Columns count along depth; 0 columns say that not even 64 of them fit. Few rows are
    stacked (see `stacks`) where that fills pages; else they are padded to 64.

    >>> dot_page(64, 2048, 32768)
    (64, 256)
    >>> dot_page(16, 2048, 32768)
    (16, 1024)
    >>> dot_page(100, 2048, 32768)
    (128, 128)
    >>> dot_page(16, 100, 32768)
    (64, 128)
    >>> dot_page(64, 2048, 32768, item_bytes=4)
    (64, 128)
    """
    for few in (16, 32):
        columns = page_bytes // (few * item_bytes)
        width = columns // stacks(few)
        if rows <= few and not depth % columns and width % 64 == 0:
            if width <= MAX_PAGE_COLUMNS:
                return few, columns
    rows = round_up(rows, 64)
    fit = page_bytes // (rows * item_bytes) // 64 * 64
    return rows, min(fit, MAX_PAGE_COLUMNS, round_up(depth, 64))


def stacks(rows: int) -> int:
    """Pieces of the depth that lie below each other in a page, 64 rows in all.

    The M side of wgmma has 64 rows. A page of 16 rows holds 4 pieces of their depth as
    64 rows, and is multiplied with the 4 pieces of the other operand side by side; of
    the 4 x 4 products those of equal pieces are added up. So a product is as fast with
    16 rows a task as with 64, and a call has four times the tasks to balance.

    >>> stacks(16), stacks(32), stacks(64), stacks(128)
    (4, 2, 1, 1)
    """
    return max(1, 64 // rows)


def tile_bytes(columns: int, features: int, dtype: str) -> int:
    """Bytes of a [columns, features] tile: 16-bit ones as [columns, features] with a
    swizzle, others as [features, columns]; single columns as they are."""
    columns, item = round_up(columns, 8), ITEM_BYTES[dtype]
    if features > 1:
        features = round_up(features, 64)
    return aligned(columns * features * item)


def parts_bytes(parts: int, columns: int, features: int, dtype: str) -> int:
    """Bytes of one accumulator or carry of all parts of a split task: 32-bit, columns
    padded to 32 where they are single values."""
    item = ITEM_BYTES[dtype]
    if features == 1:
        return aligned(parts * round_up(columns, 32) * item)
    return aligned(parts * round_up(columns, 8) * round_up(features, 64) * item)


def vector_bytes(features: int, dtype: str) -> int:
    """Bytes of a vector that is the same for every column."""
    return aligned(round_up(features, 64) * ITEM_BYTES[dtype])


def columns_features(shape: Sequence[int]) -> tuple[int, int]:
    """A tile's shape as (columns, features); one number is columns of one feature."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def accumulators(task: TaskDef) -> tuple[tuple[tuple[int, int], str], ...]:
    """((columns, features), dtype) of each value that crosses the cut of a task."""
    if task.cut == "dot":
        dots = (s for s in task.streams if isinstance(s, Dot))
        return tuple(((task.columns, dot.rows), "float32") for dot in dots)
    if task.cut == "fold":
        folds = (s for s in task.streams if isinstance(s, Fold))
        carries = (carry for fold in folds for carry in fold.carries)
        return tuple((columns_features(shape), dtype) for shape, dtype in carries)
    return ()


def stream_operands(stream: Stream) -> tuple[int, ...]:
    """The parameters that pass through pages."""
    return (stream.rhs,) if isinstance(stream, Dot) else stream.operands


def stream_item_bytes(task: TaskDef, stream: Stream) -> int:
    """Bytes of an element of a stream, the widest of its operands."""
    return max(ITEM_BYTES[task.params[i].dtype] for i in stream_operands(stream))


def kind_streams(kind: Kind) -> tuple[Stream, ...]:
    """The streams of a task that this kind of it reads: a combine reads none, it has
    the operand of a stream only for its extents."""
    if kind.mode == "combine":
        return ()
    has = set(kind.operands)
    return tuple(s for s in kind.task.streams if has.issuperset(stream_operands(s)))


def stream_page(kind: Kind, stream: Stream, page_bytes: int) -> tuple[int, int]:
    """(rows, features) of one page of each operand of a stream, as this kind reads it:
    a partial kind has a part of the depth."""
    shapes = [
        kind.ins[kind.operands.index(operand)].shape
        for operand in stream_operands(stream)
    ]
    if isinstance(stream, Dot):
        item = stream_item_bytes(kind.task, stream)
        return dot_page(stream.rows, shapes[0][-1], page_bytes, item)
    return stream.block, round_up(max(shape[-1] for shape in shapes), 64)


def stacked_dots(kind: Kind, page_bytes: int) -> int:
    """How many streams of a kind have stacked pages."""
    dots = [s for s in kind_streams(kind) if isinstance(s, Dot)]
    return sum(stacks(stream_page(kind, s, page_bytes)[0]) > 1 for s in dots)
