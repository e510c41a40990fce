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
from mkdsl.lower.ir import Gate, KernelPlan, Schedule, Wait
from mkdsl.lower.pages import round_up

HEADER = 8
WAIT_WORDS = 2
BLOCK_WORDS = 256
END = -1
INT32_MAX = 2**31 - 1
KIND, LAYER, PART, SIGNAL = range(4)
STREAM_WAITS, RESIDENT_WAITS = 4, 6
FIRST_WORD: dict[Gate, int] = {"stream": STREAM_WAITS, "resident": RESIDENT_WAITS}


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


@dataclass(frozen=True, slots=True)
class Encoded:
    """The words of every SM.

    Attributes:
        words: words[sm], all of one length.
        stride: words of one instruction.
        waits_at: where the lists of waits start.
        events: number of counters that the kernel needs.
        ranks: grid axes of each kind.
    """

    words: tuple[tuple[int, ...], ...]
    stride: int
    waits_at: int
    events: int
    ranks: tuple[int, ...]


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
    length = instruction_bytes(schedule) // 4
    words = tuple(
        tuple(_queue_words(queue, stride, waits_at, length))
        for queue in instructions(plan)
    )
    largest = max((max(array, key=abs) for array in words), key=abs, default=0)
    if abs(largest) > INT32_MAX:
        raise PlanError(
            f"a word of the instructions is {largest}, which needs more than 32 bits",
            hint="counters, layers, grid axes and offsets must be below 2**31",
        )
    ranks = tuple(len(kind.grid) for kind in schedule.events.graph.kinds)
    return Encoded(words, stride, waits_at, len(schedule.events.events), ranks)


def decode(encoded: Encoded) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions that the words of every SM stand for."""
    return tuple(tuple(_decode_queue(words, encoded)) for words in encoded.words)


def _shape(schedule: Schedule) -> tuple[int, int]:
    """(stride, waits_at); one instruction more than the longest queue, its end."""
    kinds = schedule.events.graph.kinds
    stride = HEADER + max((len(kind.grid) for kind in kinds), default=0)
    return stride, stride * (1 + max(map(len, schedule.queues), default=0))


def _pairs(waits: tuple[Wait, ...], gate: Gate) -> tuple[tuple[int, int], ...]:
    return tuple((w.event, w.threshold) for w in waits if w.gate == gate)


def _lists(
    schedule: Schedule, queue: tuple[int, ...]
) -> set[tuple[tuple[int, int], ...]]:
    waits = {schedule.events.waits[t] for t in queue}
    return {_pairs(w, gate) for w in waits for gate in FIRST_WORD}


def _queue_words(
    queue: tuple[Instruction, ...], stride: int, waits_at: int, length: int
) -> Iterator[int]:
    tail: list[int] = []
    # No waits need no words: their offset is the start of the lists.
    offsets: dict[tuple[tuple[int, int], ...], int] = {(): waits_at}
    head: list[int] = []
    for one in queue:
        head += (one.kind, one.layer, one.part, one.signal)
        for waits in (one.stream, one.resident):
            if waits not in offsets:
                offsets[waits] = waits_at + len(tail)
                tail += (word for pair in waits for word in pair)
            head += (offsets[waits], len(waits))
        head += one.grid + (0,) * (stride - HEADER - len(one.grid))
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
        )
        at += encoded.stride


def _decode_waits(
    words: tuple[int, ...], offset: int, count: int
) -> tuple[tuple[int, int], ...]:
    flat = words[offset : offset + WAIT_WORDS * count]
    return tuple(zip(flat[::2], flat[1::2], strict=True))
