"""Plans as pictures: the queues of all SMs, the ring of pages, and the kernel.

A colour is a call, the same in every picture of a plan. Needs matplotlib
(`pip install mkdsl[pictures]`).
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdsl.lower.fold import short_name
from mkdsl.lower.ir import KernelPlan, Schedule, TaskGraph
from mkdsl.lower.pages import kind_streams, stream_operands
from mkdsl.lower.schedule import streamed_bytes
from mkdsl.runtime.gantt import MOST_VECTORS, WIDTH, figure_module, save

# Pages of one SM that a picture of the ring shows.
MOST_PAGES = 96
# A queue of more tasks than this is shown up to there.
MOST_TASKS = 80
# SMs that have the names of calls in their boxes.
MOST_NAMED = 12


def call_colours(graph: TaskGraph) -> dict[str, Any]:
    """A colour of each call, in program order."""
    plt = figure_module()
    calls = list(dict.fromkeys(kind.call for kind in graph.kinds))
    wheel = [*plt.get_cmap("tab20").colors, *plt.get_cmap("tab20b").colors]
    return {call: wheel[i % len(wheel)] for i, call in enumerate(calls)}


def draw_queues(schedule: Schedule, path: Path, title: str) -> None:
    """Draw the tasks of every SM in the order in which it runs them."""
    plt = figure_module()
    graph = schedule.events.graph
    colours = call_colours(graph)
    queues = schedule.queues
    longest = min(MOST_TASKS, max(map(len, queues), default=1))
    named = len(queues) <= MOST_NAMED and longest <= 16
    height = min(8.0, max(1.6, (0.34 if named else 0.16) * len(queues))) + 1.5
    figure, ax = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    by_call: dict[str, list[tuple[int, int]]] = {}
    for sm, queue in enumerate(queues):
        for i, task in enumerate(queue[:longest]):
            call = graph.kinds[graph.tasks[task].kind].call
            by_call.setdefault(call, []).append((sm, i))
            if named:
                text = f"{call}\n{list(graph.tasks[task].pid)}"
                ax.text(i + 0.5, sm, text, fontsize=6.5, ha="center", va="center")
    count = sum(map(len, by_call.values()))
    for call, places in by_call.items():
        _cells(ax, places, colours[call], count > MOST_VECTORS)
    ax.set_xlim(0, longest)
    ax.set_ylim(len(queues) - 0.4, -0.6)
    ax.set_ylabel("SM")
    rest = max(map(len, queues), default=0) - longest
    more = f", and up to {rest} more" if rest > 0 else ""
    ax.set_xlabel(f"position in the queue{more}")
    ax.set_title(
        f"{title}: {len(graph.tasks):,} tasks on {len(queues)} SMs; bytes of an SM "
        f"{_balance(schedule)}",
        loc="left",
        fontsize=10,
    )
    _legend(figure, {c: colours[c] for c in colours if c in by_call})
    save(plt, figure, path)


def _cells(ax: Any, places: list[tuple[int, int]], colour: Any, many: bool) -> None:
    """A box for each task of a call, joined where they follow each other."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for sm, i in places:
        rows.setdefault(sm, []).append((i, 1.0))
    for sm, bars in rows.items():
        ax.broken_barh(
            bars,
            (sm - 0.45, 0.9),
            facecolors=[colour],
            edgecolor="white",
            linewidth=0.2 if many else 0.8,
            rasterized=many,
        )


def _balance(schedule: Schedule) -> str:
    """The least and the most bytes that an SM streams."""
    graph = schedule.events.graph
    each = [streamed_bytes(kind, schedule.events) for kind in graph.kinds]
    totals = [sum(each[graph.tasks[t].kind] for t in q) for q in schedule.queues]
    return f"{min(totals) / 1e6:.1f} to {max(totals) / 1e6:.1f} MB"


def _legend(figure: Any, colours: dict[str, Any]) -> None:
    plt = figure_module()
    patches = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colours.values()]
    figure.legend(
        patches,
        list(colours),
        loc="outside lower center",
        ncols=min(len(colours), 10),
        frameon=False,
    )


# ------------------------------------------------------------------------ page ring


def draw_pages(plan: KernelPlan, path: Path, title: str, sm: int = 0) -> None:
    """Draw shared memory, and which page is in which slot of the ring of an SM."""
    plt = figure_module()
    colours = call_colours(plan.schedule.events.graph)
    pages = list(pages_of(plan, sm))
    shown = pages[:MOST_PAGES]
    height = 0.3 * plan.ring + 3.4
    figure, (top, ax) = plt.subplots(
        2,
        figsize=(WIDTH, height),
        layout="constrained",
        height_ratios=(1.0, 0.3 * plan.ring + 0.6),
    )
    _memory(top, plan, title)
    named = len(shown) <= 4 * plan.ring
    for g, (call, name) in enumerate(shown):
        slot, turn = g % plan.ring, g // plan.ring
        # A page stays until the one that takes its slot.
        ax.broken_barh(
            [(g, float(plan.ring))],
            (slot - 0.42, 0.84),
            facecolors=[colours[call]],
            edgecolor="white",
            linewidth=0.8,
        )
        text = name if named else str(turn * plan.ring + slot)
        ax.text(g + plan.ring / 2, slot, text, fontsize=6.5, ha="center", va="center")
    ax.set_xlim(0, max(1, len(shown)) + plan.ring)
    ax.set_ylim(plan.ring - 0.4, -0.6)
    ax.set_yticks(range(plan.ring))
    ax.set_ylabel("slot")
    ax.set_xlabel("pages that the loader has issued")
    ax.set_title(
        f"the ring of SM {sm}: its first {len(shown)} of {len(pages)} pages; "
        f"at most {plan.in_flight} are in flight",
        loc="left",
        fontsize=10,
    )
    _legend(figure, {c: colours[c] for c in dict.fromkeys(c for c, _ in shown)})
    save(plt, figure, path)


def pages_of(plan: KernelPlan, sm: int) -> Iterator[tuple[str, str]]:
    """(call, array) of each page of an SM in the order of its loader, at the largest
    run-time extents."""
    graph = plan.schedule.events.graph
    for task in plan.schedule.queues[sm]:
        number = graph.tasks[task].kind
        kind = graph.kinds[number]
        for stream, page in zip(
            kind_streams(kind), plan.kinds[number].pages, strict=True
        ):
            operands = [kind.operands.index(i) for i in stream_operands(stream)]
            names = [short_name(kind.ins[n].buffer) for n in operands]
            shape = kind.ins[operands[0]].shape
            long, step = (shape[0], page[0]) if len(names) > 1 else (shape[1], page[1])
            for _ in range(math.ceil(long / step)):
                yield from ((kind.call, name) for name in names)


def _memory(ax: Any, plan: KernelPlan, title: str) -> None:
    """Shared memory as one bar."""
    plt = figure_module()
    parts = memory_parts(plan)
    at = 0.0
    for i, (name, size) in enumerate(parts):
        colour = plt.get_cmap("Pastel1").colors[i]
        ax.barh(0, size, left=at, color=colour, edgecolor="white", height=0.9)
        if size > 0.035 * plan.smem_bytes:
            label = f"{name}\n{size / 1024:.1f} KiB"
            ax.text(at + size / 2, 0, label, fontsize=7, ha="center", va="center")
        at += size
    small = [f"{n} {s}" for n, s in parts if 0 < s <= 0.035 * plan.smem_bytes]
    ax.set_xlim(0, plan.smem_bytes)
    ax.axis("off")
    rest = f"; too small for a name: {', '.join(small)} bytes" if small else ""
    ax.set_title(
        f"{title}: {plan.smem_bytes:,} bytes of shared memory{rest}",
        loc="left",
        fontsize=10,
    )


def memory_parts(plan: KernelPlan) -> Sequence[tuple[str, int]]:
    """(what, bytes) of shared memory."""
    return (
        (f"ring of {plan.ring} pages", plan.ring * plan.page_bytes),
        ("arena", plan.arena_slots * plan.arena_bytes),
        ("scratch", plan.scratch_bytes),
        ("staging", plan.staging_slots * plan.staging_bytes),
        ("instructions", plan.instruction_bytes),
        ("reserved", plan.reserved_bytes),
    )
