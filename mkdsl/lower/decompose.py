"""Program -> TaskGraph: calls become tasks, and some of them become parts.

What it does: turns each call into one `full` Kind, or into a `partial` and a `combine`
Kind where splitting the depth of its dots or the blocks of its fold makes its stage
faster; then lists the tasks of every kind at every layer.
Needs: a verified Program; a Machine.
Guarantees: task ids are in program order, the tasks of one kind and layer are
contiguous, all partial tasks of a call come before its combines; calls of different
variants of a scan that are equal share their kinds; every page fits a slot of the ring.
Why it is correct: a task is split only where its front end put a cut: before anything
that is not linear in the accumulators, or at a fold whose carries merge. The parts
cover the depth, or the blocks of every run-time extent, once (parts.py), so one plan
serves every length and all parts work at every length.
How: calls that do not read each other's results form a stage. A stage is tried at every
limit on the time of one task; each call takes the fewest parts within the limit; the
time is that of the tasks on all SMs plus, if anything is split, one more dependent
stage of combines. The tasks of a partial kind are ordered part by part: part p of all
tiles needs the same piece of its resident operand, so consumers of one event have
contiguous ids, and those of the first piece come first. Neighbouring SMs then read
neighbouring rows; all parts of a row are read in the same wave in any order.
Cost: linear in the tasks.
Source: stream-K (Osama et al., 2023) with the parts chosen at compile time; equal bytes
per SM and stage were worth 712 -> 652 us (gpu_facts.md, H200, 2026-11-29).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mkdsl.errors import PlanError
from mkdsl.lang.program import Buffer, Call, Program, Scan
from mkdsl.lower.blocked import blocked_operand, legal_blocks
from mkdsl.lower.check_pages import check_pages
from mkdsl.lower.cost import kind_cost, stage_ns
from mkdsl.lower.ir import MOST_BLOCKS, Kind, Task, TaskGraph
from mkdsl.lower.machine import Machine
from mkdsl.lower.pages import PIECES, columns_features, tile_bytes
from mkdsl.lower.parts import Site, legal_parts, site_of
from mkdsl.lower.pieces import calls_in_pieces, long_operands
from mkdsl.lower.plan_pages import RESERVED_BYTES, kind_plan

# The model is about a tenth below what was measured (a step of 571 pages of 940 ns per
# SM took 593 us; gpu_facts.md), so it cannot tell plans apart that are this close.
LEAST_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class DecomposeOptions:
    """How to split.

    Attributes:
        split: False keeps every call whole unless `splits` names it.
        splits: (call name, parts) that are not left to the cost model.
        least_blocks: blocks that each part of a fold has at the largest extent: a step
            of Llama-3.2-1B took 1063, 1008, 986 us with 16, 8, 4 parts of 32 blocks
            (H200, 2026-11-29), since each part is loaded again by the combine.
        most_parts: parts of a call that would fit with so few; None for any number.
        most_tasks: tasks of one program; lowering and the instructions grow with it.
            Calls get fewer parts where it would be exceeded.
        most_blocks: into how many blocks the left side of a dot may come, so that the
            dot starts before all of it is there; 1 for whole operands alone.
    """

    split: bool = True
    splits: tuple[tuple[str, int], ...] = ()
    least_blocks: int = 8
    most_parts: int | None = None
    most_tasks: int = 1 << 17
    most_blocks: int = MOST_BLOCKS


def decompose(
    program: Program, machine: Machine, options: DecomposeOptions | None = None
) -> TaskGraph:
    """The tasks of a program, without dependences.

    Raises:
        PlanError: too many tasks, a page that fits no slot, or a split that the task
            does not allow.
    """
    options = options or DecomposeOptions()
    known = {b.name: b for b in program.buffers}
    for call in program.calls():
        check_pages(call, known, machine)
    _check_names(program, options)
    kinds, temps, ids = _kinds(program, machine, options, known)
    most = max((k.parts for k in kinds), default=1)
    while most > 1 and _too_many(program, kinds, ids, options):
        most = most // 2
        fewer = replace(options, most_parts=most)
        kinds, temps, ids = _kinds(program, machine, fewer, known)
    _check_number(program, kinds, ids, options)
    kinds = _in_blocks(kinds, machine, options.most_blocks)
    tasks = [
        task
        for call, layer in program.instances()
        for kind in ids[call.name]
        for task in _tasks(kind, kinds[kind], layer)
    ]
    return TaskGraph(program, (*program.buffers, *temps), tuple(kinds), tuple(tasks))


def _kinds(
    program: Program,
    machine: Machine,
    options: DecomposeOptions,
    known: Mapping[str, Buffer],
) -> tuple[list[Kind], list[Buffer], dict[str, tuple[int, ...]]]:
    """All kinds, the buffers between them, and the kinds of each call by number."""
    forced = [name for name, _ in options.splits]
    pieces = calls_in_pieces(program, machine.page_bytes, without=forced)
    alone = frozenset(
        name
        for name in pieces
        if pieces - {name}
        == calls_in_pieces(program, machine.page_bytes, without=[*forced, name])
    )
    kinds: list[Kind] = []
    temps: list[Buffer] = []
    ids: dict[str, tuple[int, ...]] = {}
    for calls, layers in _sequences(program):
        # Variants of one scan never run at one layer, so they may share kinds.
        shared: dict[tuple[object, ...], tuple[int, ...]] = {}
        for variant in calls:
            mine: list[tuple[object, ...]] = []
            for call, site in _sites(
                variant, layers, known, machine, options, pieces, alone
            ):
                parts = site.kinds[0].parts
                key = (call.task, call.grid, call.ins, call.outs, parts)
                if key not in shared or key in mine:
                    first = len(kinds)
                    kinds += site.kinds
                    temps += site.temps
                    shared[key] = tuple(range(first, len(kinds)))
                mine.append(key)
                ids[call.name] = shared[key]
    return kinds, temps, ids


def _in_blocks(kinds: list[Kind], machine: Machine, most: int) -> list[Kind]:
    """The kinds, with operands in blocks where their producers run in several waves."""
    waves: dict[str, int] = {}
    for kind in kinds:
        tasks = math.prod(kind.grid) * (kind.parts if kind.mode == "partial" else 1)
        for access in kind.outs:
            count = -(-tasks // machine.sms)
            waves[access.buffer] = max(waves.get(access.buffer, 0), count)
    made: list[Kind] = []
    for kind in kinds:
        n = blocked_operand(kind)
        legal = legal_blocks(kind, machine.page_bytes)
        if n < 0 or waves.get(kind.ins[n].buffer, 1) == 1:
            legal = (1,)
        made.append(replace(kind, blocks=next(b for b in legal if b <= most)))
    return made


def _sequences(
    program: Program,
) -> Iterator[tuple[tuple[tuple[Call, ...], ...], int | None]]:
    """Runs of calls outside scans, and scans with their number of layers."""
    for scanned, steps in itertools.groupby(
        program.steps, key=lambda s: isinstance(s, Scan)
    ):
        if not scanned:
            yield (tuple(s for s in steps if isinstance(s, Call)),), None
            continue
        for scan in steps:
            if isinstance(scan, Scan):
                yield scan.variants, scan.length


def _tasks(index: int, kind: Kind, layer: int) -> Iterator[Task]:
    pids = list(itertools.product(*map(range, kind.grid)))
    parts = kind.parts if kind.mode == "partial" else 1
    for part in range(parts):
        for pid in pids:
            yield Task(index, layer, pid, part)


# ------------------------------------------------------------------ choosing parts


def _sites(
    calls: Sequence[Call],
    layers: int | None,
    known: Mapping[str, Buffer],
    machine: Machine,
    options: DecomposeOptions,
    pieces: frozenset[str],
    alone: frozenset[str],
) -> Iterator[tuple[Call, Site]]:
    """Each call with its kinds.

    Args:
        pieces: calls whose long operands are in pieces if they are whole.
        alone: those of them that may be split without a change of other calls.
    """
    for stage in _stages(calls):
        ways = [
            [
                site_of(call, parts, layers, pieces=call.name in pieces)
                for parts in _parts_to_try(call, machine, options)
                if parts == 1 or call.name in alone or call.name not in pieces
            ]
            for call in stage
        ]
        ways = [_fitting(sites, known, machine) for sites in ways]
        ways = [_fewest(sites, options.most_parts) for sites in ways]
        yield from zip(stage, _choose(ways, known, machine), strict=True)


def _stages(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Runs of calls of which none reads or writes what another one writes."""
    stage: list[Call] = []
    written: set[str] = set()
    for call in calls:
        touched = {a.buffer for a in (*call.ins, *call.outs)}
        if stage and touched & written:
            yield stage
            stage, written = [], set()
        stage.append(call)
        written |= {a.buffer for a in call.outs}
    if stage:
        yield stage


def _parts_to_try(
    call: Call, machine: Machine, options: DecomposeOptions
) -> tuple[int, ...]:
    legal = legal_parts(call, machine)
    forced = dict(options.splits).get(call.name)
    if forced is not None:
        if forced not in legal:
            raise PlanError(
                f"call {call.name}: cannot split task {call.task.name} into {forced} "
                f"parts (cut: {call.task.cut})",
                call.src,
                f"use one of {', '.join(map(str, legal))}",
            )
        return (forced,)
    if not options.split:
        return (1,)
    if call.task.cut != "dot":
        # Parts beyond one task per SM would only add carries to merge.
        blocks = len(legal) // options.least_blocks
        most = min(machine.sms // math.prod(call.grid), blocks)
        legal = legal[: max(1, most)]
    return legal


def _fitting(
    sites: list[Site], known: Mapping[str, Buffer], machine: Machine
) -> list[Site]:
    """Those that leave room for a ring, or the one that needs the least room."""
    room = machine.smem_bytes - 2 * machine.in_flight * machine.page_bytes
    sizes = [
        max(_resident_bytes(kind, known, machine) for kind in site.kinds)
        for site in sites
    ]
    fitting = [s for s, size in zip(sites, sizes, strict=True) if size <= room]
    return fitting or [sites[sizes.index(min(sizes))]]


def _fewest(sites: list[Site], most_parts: int | None) -> list[Site]:
    """Those of at most so many parts, or the one that has the fewest."""
    if most_parts is None:
        return sites
    fewer = [s for s in sites if s.kinds[0].parts <= most_parts]
    return fewer or [min(sites, key=lambda s: s.kinds[0].parts)]


def _resident_bytes(kind: Kind, known: Mapping[str, Buffer], machine: Machine) -> int:
    """Bytes of the operands of a kind; of a combine all that it has besides pages."""
    if kind.mode == "combine":
        plan = kind_plan(kind, machine)
        kept = plan.arena_bytes + plan.scratch_bytes + plan.staging_bytes
        return kept + RESERVED_BYTES
    return sum(
        tile_bytes(*columns_features(access.shape), known[access.buffer].dtype)
        // (PIECES if kind.pieces and n in long_operands(kind) else 1)
        for n, (access, i) in enumerate(zip(kind.ins, kind.operands, strict=True))
        if kind.task.params[i].use == "tile"
    )


def _choose(
    ways: Sequence[Sequence[Site]], known: Mapping[str, Buffer], machine: Machine
) -> list[Site]:
    """One site of each call: the fewest parts that make the stage about fastest."""
    timed = [[(site, _times(site, known, machine)) for site in way] for way in ways]
    limits = sorted({t[0][1] for way in timed for _, t in way}, reverse=True)
    best: list[Site] = []
    best_ns = math.inf
    for limit in limits:
        picked = [
            next((w for w in way if w[1][0][1] <= limit), min(way, key=_task_time))
            for way in timed
        ]
        ns = stage_ns([t[0] for _, t in picked], machine)
        combines = [t[1] for _, t in picked if len(t) > 1]
        if combines:
            ns += machine.stage_ns + stage_ns(combines, machine)
        if ns < best_ns * (1 - LEAST_GAIN):
            best, best_ns = [site for site, _ in picked], ns
    return best


_Times = list[tuple[int, float]]


def _times(site: Site, known: Mapping[str, Buffer], machine: Machine) -> _Times:
    """(tasks, ns of each) of every kind of a site."""
    buffers = {**known, **{b.name: b for b in site.temps}}
    return [
        (
            math.prod(k.grid) * (k.parts if k.mode == "partial" else 1),
            kind_cost(k, buffers, machine).ns,
        )
        for k in site.kinds
    ]


def _task_time(way: tuple[Site, _Times]) -> float:
    return way[1][0][1]


# -------------------------------------------------------------------------- checks


def _check_names(program: Program, options: DecomposeOptions) -> None:
    calls = [call.name for call in program.calls()]
    for name, _ in options.splits:
        if name not in calls:
            raise PlanError(
                f"splits name the call {name!r}, which {program.name} does not have",
                hint=f"its calls are {', '.join(calls)}",
            )


def _numbers(
    program: Program, kinds: Sequence[Kind], ids: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Tasks of each call, at all layers."""
    by_call: dict[str, int] = {}
    for call, _ in program.instances():
        for k in ids[call.name]:
            parts = kinds[k].parts if kinds[k].mode == "partial" else 1
            tasks = math.prod(kinds[k].grid) * parts
            by_call[call.name] = by_call.get(call.name, 0) + tasks
    return by_call


def _too_many(
    program: Program,
    kinds: Sequence[Kind],
    ids: Mapping[str, tuple[int, ...]],
    options: DecomposeOptions,
) -> bool:
    return sum(_numbers(program, kinds, ids).values()) > options.most_tasks


def _check_number(
    program: Program,
    kinds: Sequence[Kind],
    ids: Mapping[str, tuple[int, ...]],
    options: DecomposeOptions,
) -> None:
    by_call = _numbers(program, kinds, ids)
    total = sum(by_call.values())
    if total <= options.most_tasks:
        return
    name, tasks = max(by_call.items(), key=lambda item: item[1])
    call = next(c for c in program.calls() if c.name == name)
    raise PlanError(
        f"{program.name} has {total} tasks, more than {options.most_tasks}; call "
        f"{name} over grid {call.grid} has {tasks} of them",
        call.src,
        "use larger blocks, so that the grid is smaller",
    )
