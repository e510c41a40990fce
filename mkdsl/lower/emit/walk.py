"""What the four roles of an SM share: memory, barriers, instructions.

An SM runs four roles, one warpgroup each, over one queue of instructions:

    loader      streams pages into the ring, ahead of everything but `stream` waits
    fetcher     makes the `resident` waits and brings resident operands to the arena
    consumer    runs task bodies and puts results into staging
    storer      copies results to device memory and signals

Hand-offs are mbarriers: full/empty per ring slot, landed/free for the resident operands
of a task, ready/drained for its results. Every role walks the same instructions, so
counts of pages and tasks agree by construction.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lang.expr import Expr, Ops
from mkdsl.lower import encode
from mkdsl.lower.emit import timestamps as ts
from mkdsl.lower.emit.bounded import Place
from mkdsl.lower.emit.code import Code, Stream
from mkdsl.lower.emit.sync import Counters

Ref = Any
Value = Any
KERNEL_OPS = Ops(lax.div, lax.rem, lax.min, lax.max)


class Memory(NamedTuple):
    """References of one SM, by what they hold; lists have one entry per kind.

    Memory in other forms: `raw_` as copies see it, `_pieces` as stacked products do.
    """

    arrays: dict[str, Ref]
    words: Ref
    scalars: Ref
    pages: dict[tuple[int, bool], Ref]
    raw_pages: dict[int, Ref]
    arena: Sequence[Sequence[Ref]]
    raw_arena: Sequence[Sequence[Ref]]
    arena_pieces: Sequence[Sequence[Ref]]
    scratch: Sequence[Sequence[Ref]]
    scratch_pieces: Sequence[Sequence[Ref]]
    staging: Sequence[Sequence[Ref]]
    raw_staging: Sequence[Sequence[Ref]]
    full: Ref
    empty: Ref
    landed: dict[int, Ref]
    free: Ref
    ready: Ref
    drained: Ref
    done: Ref
    blocks: dict[int, Ref]


class Kernel(NamedTuple):
    """What the roles share: code of the kinds, sizes, memory, counters.

    A barrier counts a fixed number of arrivals, and an arrival by hand costs 128
    operations on one address, so there is one `landed` barrier per number of copies.

    counters is None on one SM without device counters (interpret mode): every task
    then waits until the one before it has been stored.
    """

    codes: Sequence[Code]
    stride: int
    offsets: dict[str, tuple[int, tuple[int, ...]]]
    ring: int
    in_flight: int
    page_arrivals: int
    blocks_at: int
    memory: Memory
    counters: Counters | None
    stamps: Ref | None = None

    def stamp(self, i: Value, what: int) -> None:
        """Note the time of a step of instruction i, if anyone wants to know."""
        if self.stamps is not None:
            ts.stamp(self.stamps.at[i, what])


class Instruction:
    """The instruction at position i, and the value of its index expressions."""

    def __init__(self, kernel: Kernel, i: Value) -> None:
        self.kernel, self.base = kernel, i * kernel.stride
        self.i = i

    def word(self, k: int) -> Value:
        """Word k of the instruction."""
        return self.kernel.memory.words[self.base + k]

    def grid(self, rank: int) -> list[Value]:
        """Grid indices."""
        return [self.word(encode.HEADER + a) for a in range(rank)]

    def __call__(self, value: Expr) -> Value:
        """The value of an index expression."""
        if value.is_constant:
            return int(value)
        env = {"layer": encode.LAYER, "part": encode.PART}
        words = {
            name: self.word(env[name] if name in env else encode.HEADER + int(name[1:]))
            for name in sorted(value.variables)
        }
        return value.evaluate(words, self.scalar, KERNEL_OPS)

    def scalar(self, buffer: str, index: tuple[Value, ...]) -> Value:
        """An element of an integer input."""
        offset, shape = self.kernel.offsets[buffer]
        flat: Value = 0
        for i, n in zip(index, shape, strict=True):
            flat = flat * n + i
        return self.kernel.memory.scalars[offset + flat]


def walk(kernel: Kernel, branches: Sequence[Callable[..., Value]]) -> tuple[Any, Any]:
    """Run the branch of every instruction: state = branch(i, state).

    Returns:
        The number of instructions and the last state.
    """
    words = kernel.memory.words

    def more(c: tuple[Value, Value]) -> Value:
        return words[c[0] * kernel.stride] >= 0

    def one(c: tuple[Value, Value]) -> tuple[Value, Value]:
        i, state = c
        return i + 1, lax.switch(words[i * kernel.stride], branches, i, state)

    zero = jnp.int32(0)
    return lax.while_loop(more, one, (zero, zero))


def drain(barrier: Ref, slots: int, total: Value, unseen: int) -> None:
    """Observe the last `unseen` of `total` phases: no barrier is left half-watched."""

    def one(i: Value, carry: Value) -> Value:
        plgpu.barrier_wait(barrier.at[lax.rem(i, slots)])
        return carry

    lax.fori_loop(lax.max(total - unseen, 0), total, one, 0)


def observe_last(barrier: Ref, count: Value) -> None:
    """The same for a single barrier that was waited for from the second time on."""

    @pl.when(count > 0)
    def _() -> None:
        plgpu.barrier_wait(barrier)


def part_of(ref: Ref, index: tuple[Any, ...]) -> Ref:
    return ref.at[index] if index else ref


def wait_for(kernel: Kernel, at: Instruction, first: int) -> None:
    """The waits of one gate of an instruction.

    Args:
        first: word of their offset and number.
    """
    if kernel.counters is None:
        return
    offset, count = at.word(first), at.word(first + 1)
    words, counters = kernel.memory.words, kernel.counters
    where = Place(int(first != encode.STREAM_WAITS), at.i)

    def one(k: Value, carry: Value) -> Value:
        pair = offset + encode.WAIT_WORDS * k
        counters.wait(words[pair], words[pair + 1], where)
        return carry

    lax.fori_loop(0, count, one, 0)


def after_previous(kernel: Kernel, i: Value) -> None:
    if kernel.counters is None:

        @pl.when(i > 0)
        def _() -> None:
            plgpu.barrier_wait(kernel.memory.done)


def observe_previous(kernel: Kernel, count: Value) -> None:
    if kernel.counters is None:
        observe_last(kernel.memory.done, count)


def slot_rows(rows: int) -> int:
    """Rows of the view of the ring that pages of `rows` rows use."""
    return 64 if rows <= 64 else 128 if rows <= 128 else 256


def fold_blocks(s: Stream, at: Instruction) -> Value:
    """Number of blocks that a fold has to walk."""
    count = at(s.count)
    return (
        lax.div(count + s.page[0] - 1, s.page[0])
        if not isinstance(count, int)
        else (-(-count // s.page[0]))
    )
