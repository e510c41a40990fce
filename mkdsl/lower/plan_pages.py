"""Shared memory: fixed-size pages in a ring, and room for one or two tasks around it.

What it does: sizes every part of the shared memory of an SM.
Needs: a Schedule of kinds whose pages fit a slot (check_pages).
Guarantees: every kind fits in every part; the sum is at most machine.smem_bytes; the
ring has at least as many pages as one step of a body holds at once, and 2.
Why it is correct: parts are disjoint, each as large as the largest kind needs; loads,
bodies and stores of a task use its own slot of each part, in queue order.
How: one task at a time has its resident operands and its results in shared memory; what
    is left is pages, at most max_ring. A second slot would have to be disjoint from the
    first for every pair of kinds, and costs pages: loads of the next task then wait for
    the body, results for the store before them, neither of which bounds the kernel.
Cost: linear in kinds.
Source: gpu_facts.md, "What made a persistent kernel fast": ring depths 4 to 6 made no
difference; two page loads in flight gave 600 to 610 us per step, one 674, three 628,
four 636, the whole ring 624 or more (H200).
"""

import math
from dataclasses import dataclass, replace

from mkdsl.errors import PlanError
from mkdsl.lang.program import ITEM_BYTES, Param, TaskDef
from mkdsl.lower.encode import instruction_bytes
from mkdsl.lower.ir import KernelPlan, Kind, KindPlan, Schedule
from mkdsl.lower.machine import Machine
from mkdsl.lower.pages import (
    STACK_ROWS,
    accumulators,
    aligned,
    columns_features,
    kind_streams,
    parts_bytes,
    round_up,
    stacked_dots,
    stream_operands,
    stream_page,
    tile_bytes,
    vector_bytes,
)
from mkdsl.lower.pieces import long_operands

# Mosaic allows at most 32 barriers in one group (gpu_facts.md, pitfalls).
MAX_BARRIERS = 32
# Barriers: full and empty of ring, arena and staging, 8 bytes each, 6 * 32 at most, and
# the alignment of what follows. Scalars: the integers of index expressions. Reductions:
# CompilerParams.reduction_scratch_bytes of JAX 0.11.2 is 2048.
BARRIER_BYTES, SCALAR_BYTES, REDUCTION_BYTES = 2048, 1024, 2048
RESERVED_BYTES = BARRIER_BYTES + SCALAR_BYTES + REDUCTION_BYTES


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Limits of the plan.

    Attributes:
        max_ring: most pages; more than 6 were never measured to help.
    """

    max_ring: int = 8

    def __post_init__(self) -> None:
        if not 2 <= self.max_ring <= MAX_BARRIERS:
            raise ValueError(f"{self.max_ring=} is not in 2..{MAX_BARRIERS}")


def plan_pages(
    schedule: Schedule, machine: Machine, options: PageOptions | None = None
) -> KernelPlan:
    """The schedule with its shared memory.

    Raises:
        PlanError: it does not fit; the text has the byte budget.
    """
    options = options or PageOptions()
    graph = schedule.events.graph
    kinds = tuple(kind_plan(kind, machine) for kind in graph.kinds)
    arena = max((k.arena_bytes for k in kinds), default=0)
    scratch = max((k.scratch_bytes for k in kinds), default=0)
    staging = max((k.staging_bytes for k in kinds), default=0)
    words = aligned(instruction_bytes(schedule))
    fixed = RESERVED_BYTES + words + scratch

    fixed += arena + staging
    ring = min((machine.smem_bytes - fixed) // machine.page_bytes, options.max_ring)
    columns = max((kind.task.columns for kind in graph.kinds), default=1)
    plan = KernelPlan(
        schedule,
        kinds,
        columns=round_up(columns, 8),
        page_bytes=machine.page_bytes,
        ring=ring,
        in_flight=min(machine.in_flight, max(ring, 1)),
        arena_bytes=arena,
        arena_slots=1,
        scratch_bytes=scratch,
        staging_bytes=staging,
        staging_slots=1,
        smem_bytes=fixed + ring * machine.page_bytes,
        instruction_bytes=words,
        reserved_bytes=RESERVED_BYTES,
    )
    needed = max([2, *(pages_at_once(kind) for kind in graph.kinds)])
    if ring < needed:
        raise _does_not_fit(plan, machine, needed)
    return plan


def pages_at_once(kind: Kind) -> int:
    """Pages that one step of a kind's body holds: one per operand of its stream."""
    streams = kind_streams(kind)
    return max((len(stream_operands(stream)) for stream in streams), default=0)


def kind_plan(kind: Kind, machine: Machine) -> KindPlan:
    params = kind.task.params
    crossing = sum(tile_bytes(*size, dtype) for size, dtype in accumulators(kind.task))
    # A partial kind has a part of an operand: the shape is that of its access.
    long = long_operands(kind) if kind.pieces else ()
    arena = sum(
        long_bytes(kind.task)
        if n in long
        else param_bytes(replace(params[operand], shape=access.shape))
        for n, (operand, access) in enumerate(
            zip(kind.operands, kind.ins, strict=False)
        )
    )
    if kind.mode == "combine":
        arena += sum(
            parts_bytes(kind.parts, *size, dtype)
            for size, dtype in accumulators(kind.task)
        )
    results = sum(result_bytes(r, kind.task.columns) for r in kind.task.results)
    pages = (stream_page(kind, s, machine.page_bytes) for s in kind_streams(kind))
    return KindPlan(
        tuple(pages),
        arena_bytes=arena,
        scratch_bytes=_scratch_bytes(kind, machine.page_bytes),
        staging_bytes=crossing if kind.mode == "partial" else results,
    )


def param_bytes(param: Param) -> int:
    """Bytes that an operand or result takes outside the pages."""
    if param.use == "tile":
        return tile_bytes(*columns_features(param.shape), param.dtype)
    if param.use == "vector":
        return vector_bytes(math.prod(param.shape), param.dtype)
    return 0


def result_bytes(param: Param, columns: int) -> int:
    """Bytes of a result on its way out: a 16-bit vector goes as a tile."""
    if param.use == "vector" and ITEM_BYTES[param.dtype] == 2:
        return tile_bytes(columns, math.prod(param.shape), param.dtype)
    return param_bytes(param)


def long_bytes(task: TaskDef) -> int:
    """Bytes of a row of one column in pieces."""
    return aligned(task.long * ITEM_BYTES["bfloat16"])


def _scratch_bytes(kind: Kind, page_bytes: int) -> int:
    columns, total = kind.task.columns, 0
    for scratch in kind.task.scratch:
        if kind.mode != "full" and scratch.after_cut != (kind.mode == "combine"):
            continue
        if scratch.use == "roll":
            total += tile_bytes(columns, 2 * round_up(scratch.features, 64), "float32")
        elif kind.pieces and scratch.features == kind.task.long:
            total += long_bytes(kind.task)
        else:
            total += tile_bytes(columns, scratch.features, "bfloat16")
    return total + tile_bytes(columns, STACK_ROWS, "float32") * stacked_dots(
        kind, page_bytes
    )


def _does_not_fit(plan: KernelPlan, machine: Machine, needed: int) -> PlanError:
    graph = plan.schedule.events.graph

    def most(part: str) -> str:
        sizes = [(getattr(k, part), -i) for i, k in enumerate(plan.kinds)]
        ranked = [(s, graph.kinds[-i]) for s, i in sorted(sizes, reverse=True) if s]
        names = (f"{kind.call} ({kind.mode}) {size}" for size, kind in ranked[:3])
        return ", ".join(names)

    rest = machine.smem_bytes - plan.smem_bytes + plan.ring * plan.page_bytes
    table = (
        ("shared memory of one SM", machine.smem_bytes, machine.name),
        ("barriers, scalars, reductions", plan.reserved_bytes, ""),
        ("instructions", plan.instruction_bytes, f"{len(graph.tasks)} tasks in all"),
        (
            f"resident operands, {plan.arena_slots} x",
            plan.arena_slots * plan.arena_bytes,
            most("arena_bytes"),
        ),
        ("computed operands", plan.scratch_bytes, most("scratch_bytes")),
        (
            f"results, {plan.staging_slots} x",
            plan.staging_slots * plan.staging_bytes,
            most("staging_bytes"),
        ),
        ("left for pages", rest, f"{needed} x {plan.page_bytes} needed"),
    )
    lines = (f"  {name:<30} {size:>8}  {note}".rstrip() for name, size, note in table)
    largest = max(
        range(len(plan.kinds)),
        key=lambda i: plan.kinds[i].arena_bytes + plan.kinds[i].scratch_bytes,
    )
    budget = "\n".join(lines)
    return PlanError(
        f"program '{graph.program.name}' does not fit: {max(plan.ring, 0)} pages of "
        f"shared memory are left, at least {needed} are needed\n{budget}",
        graph.kinds[largest].src,
        "smaller tiles for the calls named above: split a wide operand that is read "
        "whole over more tasks or stages, stream it, run a smaller batch, or plan "
        "for a machine with smaller pages: "
        f"replace(machine, page_bytes={machine.page_bytes // 2})",
    )
