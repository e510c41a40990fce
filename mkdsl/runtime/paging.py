"""Pages of streamed operands in the simulator, and their places in the operands."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkdsl.lower.ir import MOST_BLOCKS, Kind
from mkdsl.runtime.memory import Array, Block


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a streamed operand, and its place in the operand."""

    operand: int
    block: Block
    place: tuple[slice, ...]


def key_of(operand: int, block: int) -> int:
    """The key of a block of an operand in a slot, which no operand has."""
    return -(operand * MOST_BLOCKS + block)


def begins_block(step: Sequence[Page], start: int) -> bool:
    """True if the page of a step reaches into the block that begins there."""
    (page,) = step
    return page.place[1].stop > start


def make_page(operand: int, block: Block, axis: int, first: int, step: int) -> Page:
    """Elements [first, first + step) of an axis of a block, where it has so many."""
    size = min(step, block.shape[axis] - first)
    place = (slice(None),) * axis + (slice(first, first + size),)
    return Page(operand, block.narrow(axis, first, size), place)


def put_page(
    loaded: dict[int, Array], blocks: Sequence[Block], page: Page, value: Array
) -> None:
    """Put a page into its operand, which is all zeros before its first page."""
    if page.operand not in loaded:
        loaded[page.operand] = np.zeros(blocks[page.operand].shape, value.dtype)
    loaded[page.operand][page.place] = value


def streamed_operands(kind: Kind) -> set[int]:
    """Positions among `ins` of streams, which a combine has only for their extents."""
    params = kind.task.params
    return {n for n, i in enumerate(kind.operands) if params[i].use == "stream"}
