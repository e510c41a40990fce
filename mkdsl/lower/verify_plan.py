"""Check shared memory and instruction words of a KernelPlan.

verify_plan recomputes what must fit from the tasks themselves, without padding:
a plan may reserve more than that, never less. verify_encoded reads the words back and
compares them with the plan; the rest of the proof is in verify.py.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest
from typing import NoReturn

from mkdsl.errors import VerifyError
from mkdsl.lang.program import ITEM_BYTES, Dot, Fold, Param
from mkdsl.lower.encode import BLOCK_WORDS, INT32_MAX, Encoded, Instruction, decode
from mkdsl.lower.ir import FETCH_GATES, EventGraph, KernelPlan, Kind, KindPlan
from mkdsl.lower.machine import Machine
from mkdsl.lower.verify import INTERNAL, fail


def verify_plan(plan: KernelPlan, machine: Machine) -> None:
    """Check that every kind fits in its slots and all slots in the machine.

    Raises:
        VerifyError: something does not fit.
    """
    total = (
        plan.reserved_bytes
        + plan.instruction_bytes
        + plan.arena_slots * plan.arena_bytes
        + plan.scratch_bytes
        + plan.staging_slots * plan.staging_bytes
        + plan.ring * plan.page_bytes
    )
    checks = (
        (total <= plan.smem_bytes, f"the parts have {total} bytes"),
        (plan.smem_bytes <= machine.smem_bytes, f"{machine.smem_bytes=}"),
        (plan.ring >= 2, "the ring needs 2 pages to overlap loads with work"),
        (
            1 <= plan.in_flight <= plan.ring,
            "loads in flight need a slot each: one more would be written over a page "
            "that is in use",
        ),
        (plan.arena_slots >= 1, "no slot for resident operands"),
        (plan.staging_slots >= 1, "no slot for results"),
        (plan.columns % 8 == 0, "columns are padded to multiples of 8"),
    )
    for holds, why in checks:
        if not holds:
            raise VerifyError("pages", f"{_sizes(plan)}: {why}", hint=INTERNAL)
    graph = plan.schedule.events.graph
    if len(plan.kinds) != len(graph.kinds):
        sizes = f"{len(plan.kinds)} sizes for {len(graph.kinds)} kinds"
        raise VerifyError("pages", sizes, hint=INTERNAL)
    for kind, sizes in zip(graph.kinds, plan.kinds, strict=True):
        _check_kind(plan, kind, sizes)


def _sizes(plan: KernelPlan) -> str:
    return (
        f"{plan.smem_bytes=}, {plan.ring=}, {plan.in_flight=}, {plan.arena_slots=}, "
        f"{plan.staging_slots=}, {plan.columns=}"
    )


def _check_kind(plan: KernelPlan, kind: Kind, sizes: KindPlan) -> None:
    task = kind.task
    crossing = [
        columns * features * ITEM_BYTES[dtype]
        for columns, features, dtype in _crossing(kind)
    ]
    operands = [
        _raw_bytes(replace(task.params[i], shape=access.shape))
        for i, access in zip(kind.operands, kind.ins, strict=False)
    ]
    results = [_raw_bytes(result) for result in task.results]
    if kind.mode == "combine":
        operands += [kind.parts * size for size in crossing]
    if kind.mode == "partial":
        results = crossing
    scratch = [
        s.features * task.columns * (2 if s.use == "operand" else 8)
        for s in task.scratch
        if kind.mode == "full" or s.after_cut == (kind.mode == "combine")
    ]
    parts = (
        ("arena", operands, sizes.arena_bytes, plan.arena_bytes),
        ("scratch", scratch, sizes.scratch_bytes, plan.scratch_bytes),
        ("staging", results, sizes.staging_bytes, plan.staging_bytes),
    )
    for name, needed, own, slot in parts:
        if not sum(needed) <= own <= slot:
            _kind_error(
                kind, f"{name} of {slot} bytes, {own} for it, needs {sum(needed)}"
            )
    if task.columns > plan.columns:
        _kind_error(kind, f"{task.columns} columns, the plan has {plan.columns}")
    _check_pages(plan, kind, sizes)


def _check_pages(plan: KernelPlan, kind: Kind, sizes: KindPlan) -> None:
    has = set(kind.operands)
    at_once = 1
    streams = [
        (s, (s.rhs,) if isinstance(s, Dot) else s.operands) for s in kind.task.streams
    ]
    mine = [(s, operands) for s, operands in streams if has.issuperset(operands)]
    if len(mine) != len(sizes.pages):
        _kind_error(kind, f"{len(mine)} streams, pages for {len(sizes.pages)}")
    for (stream, operands), (rows, features) in zip(mine, sizes.pages, strict=True):
        at_once = max(at_once, len(operands))
        least = stream.rows if isinstance(stream, Dot) else stream.block
        item = max(ITEM_BYTES[kind.task.params[i].dtype] for i in operands)
        bytes_of_page = item * rows * features
        if rows < least or features < 64 or features % 64:
            _kind_error(kind, f"pages of {rows} x {features} for {least} rows")
        if bytes_of_page > plan.page_bytes:
            _kind_error(
                kind, f"pages of {bytes_of_page} bytes, slots of {plan.page_bytes}"
            )
        if kind.blocks > 1 and isinstance(stream, Dot):
            if stream.depth % (kind.blocks * features):
                _kind_error(
                    kind,
                    f"{kind.blocks} blocks of a depth of {stream.depth} are not "
                    f"whole pages of {features}",
                )
        for operand in operands if isinstance(stream, Fold) else ():
            width = kind.ins[kind.operands.index(operand)].shape[-1]
            if width > features:
                _kind_error(kind, f"{width} features in pages of {features}")
    if at_once > plan.ring:
        _kind_error(
            kind,
            f"{at_once} pages at once in a ring of {plan.ring}: deadlock, the loader "
            "waits for a slot that the body frees when it has all pages",
        )


def _crossing(kind: Kind) -> Iterable[tuple[int, int, str]]:
    """(columns, features, dtype) of the values between partial and combine."""
    for stream in kind.task.streams:
        if isinstance(stream, Dot) and kind.task.cut == "dot":
            yield kind.task.columns, stream.rows, "float32"
        if isinstance(stream, Fold) and kind.task.cut == "fold":
            for shape, dtype in stream.carries:
                yield math.prod(shape), 1, dtype


def _raw_bytes(param: Param) -> int:
    if param.use in ("stream", "scalar"):
        return 0
    return math.prod(param.shape) * ITEM_BYTES[param.dtype]


def _kind_error(kind: Kind, what: str) -> NoReturn:
    raise VerifyError(
        "pages", f"call '{kind.call}' ({kind.mode}): {what}", kind.src, INTERNAL
    )


def verify_encoded(plan: KernelPlan, encoded: Encoded) -> None:
    """Check that the words of every SM say what the plan says.

    Raises:
        VerifyError: an array has another shape or reads back differently.
    """
    lengths = {len(words) for words in encoded.words}
    queues = plan.schedule.queues
    if len(encoded.words) != len(queues) or len(lengths) != 1:
        _word_error(f"{len(encoded.words)} arrays of {lengths} words")
    length = lengths.pop()
    if length % BLOCK_WORDS or 4 * length > plan.instruction_bytes:
        _word_error(f"{length} words, {plan.instruction_bytes=}")
    longest = max(map(len, queues))
    if encoded.waits_at < (longest + 1) * encoded.stride:
        _word_error(f"waits at {encoded.waits_at} lie on {longest} instructions")
    for words in encoded.words:
        if not all(-INT32_MAX - 1 <= word <= INT32_MAX for word in words):
            _word_error("a word needs more than 32 bits")
    events = plan.schedule.events
    if encoded.events != len(events.events):
        _word_error(f"{encoded.events} counters for {len(events.events)} events")
    for sm, (queue, found) in enumerate(zip(queues, decode(encoded), strict=True)):
        for position, (task, one) in enumerate(zip_longest(queue, found)):
            if task is None or one is None:
                _word_error(f"SM {sm}: {len(found)} instructions, {len(queue)} tasks")
            _check_instruction(events, sm, position, task, one)


def _check_instruction(
    events: EventGraph, sm: int, position: int, task: int, one: Instruction
) -> None:
    t = events.graph.tasks[task]
    fetched = zip(FETCH_GATES, (one.resident, *one.blocks), strict=False)
    said = {"stream": one.stream, **dict(fetched)}
    meant: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(said, ())
    for wait in events.waits[task]:
        meant.setdefault(wait.gate, ())
        meant[wait.gate] += ((wait.event, wait.threshold),)
    pairs = (
        ("kind", one.kind, t.kind),
        ("layer", one.layer, t.layer),
        ("part", one.part, t.part),
        ("signal", one.signal, events.signals[task]),
        ("waits", said, meant),
        ("grid", one.grid, t.pid),
    )
    for name, found, expected in pairs:
        if found != expected:
            fail(
                events,
                task,
                f"SM {sm}, instruction {position}: {name} {found}, not {expected}",
                "encoded",
            )


def _word_error(what: str) -> NoReturn:
    raise VerifyError("encoded", what, hint=INTERNAL)
