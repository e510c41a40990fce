"""Instruction words: the only file that knows their layout.

What it does: turns every queue into one array of int32 words, and back.
Needs: a verified KernelPlan.
Guarantees: decode(encode(plan)) is instructions(plan); all arrays have one length, a
multiple of 256 words; every value fits in an int32.
Layout of the array of one SM, offsets in words from its start:

    0         instruction 0     kind, layer, part, signal,
    stride    instruction 1     stream waits: offset, count,
    ..                          resident waits: offset, count,
              kind = -1         g0, g1, .. (padded with 0)
                                if a kind has blocks, their waits: offset, count, ..
    waits_at  (event, threshold), (event, threshold), ..

A kind of -1 ends the queue; signal is an event or -1. Offsets point to the first word
of a list of `count` pairs. Tasks of one SM with the same waits share the list.
Why it is correct: tested by round trip; verify_encoded decodes and compares.
Cost: linear in tasks and waits.
Source: fixed-size instructions as in Hazy Research's megakernels; 256 words because one
asynchronous copy takes at most 256 elements along a dimension, and its bytes must
divide by a warpgroup (gpu_facts.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mkdsl.errors import PlanError
from mkdsl.lower.ir import FETCH_GATES, GATES, Gate, KernelPlan, Schedule, Wait
from mkdsl.lower.pages import round_up

HEADER = 8
WAIT_WORDS = 2
BLOCK_WORDS = 256
END = -1
INT32_MAX = 2**31 - 1
KIND, LAYER, PART, SIGNAL = range(4)
STREAM_WAITS, RESIDENT_WAITS = 4, 6


@dataclass(frozen=True, slots=True)
class Instruction:
    """One task as the kernel sees it; waits are (event, threshold)."""

    kind: int
    layer: int
    part: int
    signal: int
    stream: tuple[tuple[int, int], ...]
    resident: tuple[tuple[int, int], ...]
    grid: tuple[int, ...]
    blocks: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """The words of every SM.

    Attributes:
        words: words[sm], all of one length.
        stride: words of one instruction.
        waits_at: where the lists of waits start.
        events: number of counters that the kernel needs.
        ranks: grid axes of each kind.
        blocks_at: first word, in an instruction, of the waits of blocks.
        blocks: of each kind, those that have waits of their own.
    """

    words: tuple[tuple[int, ...], ...]
    stride: int
    waits_at: int
    events: int
    ranks: tuple[int, ...]
    blocks_at: int
    blocks: tuple[int, ...]


def instruction_bytes(schedule: Schedule) -> int:
    """Bytes of the array of one SM."""
    stride, waits_at = _shape(schedule)
    lists = (sum(map(len, _lists(schedule, q))) for q in schedule.queues)
    words = waits_at + WAIT_WORDS * max(lists, default=0)
    return 4 * round_up(max(words, stride), BLOCK_WORDS)


def instructions(plan: KernelPlan) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of every SM, before they become words."""
    graph = plan.schedule.events
    return tuple(
        tuple(
            Instruction(
                (task := graph.graph.tasks[t]).kind,
                task.layer,
                task.part,
                graph.signals[t],
                _pairs(graph.waits[t], "stream"),
                _pairs(graph.waits[t], "resident"),
                task.pid,
                tuple(
                    _pairs(graph.waits[t], gate)
                    for gate in FETCH_GATES[1 : graph.graph.kinds[task.kind].blocks]
                ),
            )
            for t in queue
        )
        for queue in plan.schedule.queues
    )


def encode(plan: KernelPlan) -> Encoded:
    """The words of a plan.

    Raises:
        PlanError: a number does not fit in an int32.
    """
    schedule = plan.schedule
    stride, waits_at = _shape(schedule)
    blocks_at = blocks_word(schedule)
    length = instruction_bytes(schedule) // 4
    words = tuple(
        tuple(_queue_words(queue, stride, blocks_at, waits_at, length))
        for queue in instructions(plan)
    )
    largest = max((max(array, key=abs) for array in words), key=abs, default=0)
    if abs(largest) > INT32_MAX:
        raise PlanError(
            f"a word of the instructions is {largest}, which needs more than 32 bits",
            hint="counters, layers, grid axes and offsets must be below 2**31",
        )
    kinds = schedule.events.graph.kinds
    return Encoded(
        words,
        stride,
        waits_at,
        len(schedule.events.events),
        tuple(len(kind.grid) for kind in kinds),
        blocks_at,
        tuple(kind.blocks - 1 for kind in kinds),
    )


def decode(encoded: Encoded) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions that the words of every SM stand for."""
    return tuple(tuple(_decode_queue(words, encoded)) for words in encoded.words)


def _shape(schedule: Schedule) -> tuple[int, int]:
    """(stride, waits_at); one instruction more than the longest queue, its end."""
    kinds = schedule.events.graph.kinds
    blocks = max((kind.blocks for kind in kinds), default=1) - 1
    stride = blocks_word(schedule) + 2 * blocks
    return stride, stride * (1 + max(map(len, schedule.queues), default=0))


def blocks_word(schedule: Schedule) -> int:
    """First word of an instruction after the grid."""
    kinds = schedule.events.graph.kinds
    return HEADER + max((len(kind.grid) for kind in kinds), default=0)


def _pairs(waits: tuple[Wait, ...], gate: Gate) -> tuple[tuple[int, int], ...]:
    return tuple((w.event, w.threshold) for w in waits if w.gate == gate)


def _lists(
    schedule: Schedule, queue: tuple[int, ...]
) -> set[tuple[tuple[int, int], ...]]:
    waits = {schedule.events.waits[t] for t in queue}
    return {_pairs(w, gate) for w in waits for gate in GATES}


def _queue_words(
    queue: tuple[Instruction, ...],
    stride: int,
    blocks_at: int,
    waits_at: int,
    length: int,
) -> Iterator[int]:
    tail: list[int] = []
    # No waits need no words: their offset is the start of the lists.
    offsets: dict[tuple[tuple[int, int], ...], int] = {(): waits_at}
    head: list[int] = []

    def listed(waits: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        if waits not in offsets:
            offsets[waits] = waits_at + len(tail)
            tail.extend(word for pair in waits for word in pair)
        return offsets[waits], len(waits)

    for one in queue:
        first = len(head)
        head += (one.kind, one.layer, one.part, one.signal)
        head += (*listed(one.stream), *listed(one.resident), *one.grid)
        head += (0,) * (first + blocks_at - len(head))
        head += (word for waits in one.blocks for word in listed(waits))
        head += (0,) * (first + stride - len(head))
    # Everything after the last instruction reads as the end of the queue.
    head += [END] * (waits_at - len(head))
    words = head + tail
    yield from words + [END] * (length - len(words))


def _decode_queue(words: tuple[int, ...], encoded: Encoded) -> Iterator[Instruction]:
    at = 0
    while words[at + KIND] != END:
        one = words[at : at + encoded.stride]
        yield Instruction(
            one[KIND],
            one[LAYER],
            one[PART],
            one[SIGNAL],
            _decode_waits(words, *one[STREAM_WAITS : STREAM_WAITS + 2]),
            _decode_waits(words, *one[RESIDENT_WAITS : RESIDENT_WAITS + 2]),
            one[HEADER : HEADER + encoded.ranks[one[KIND]]],
            tuple(
                _decode_waits(words, *one[at : at + 2])
                for at in range(
                    encoded.blocks_at,
                    encoded.blocks_at + 2 * encoded.blocks[one[KIND]],
                    2,
                )
            ),
        )
        at += encoded.stride


def _decode_waits(
    words: tuple[int, ...], offset: int, count: int
) -> tuple[tuple[int, int], ...]:
    flat = words[offset : offset + WAIT_WORDS * count]
    return tuple(zip(flat[::2], flat[1::2], strict=True))
