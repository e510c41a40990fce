"""The kernel of a plan as a picture: four roles of an SM, and what is between them.

Needs matplotlib (`pip install mkdsl[pictures]`).
"""

import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.pages import kind_streams
from mkdsl.runtime.gantt import WIDTH, figure_module, save

ROLE, STORE, MEMORY = "#cfe8f7", "#fde3c3", "#eeeeee"
INK = "#333333"
Place = tuple[float, float]
# Middles of the boxes, in inches.
PLACES: dict[str, Place] = {
    "device": (6.4, 0.95),
    "weight loader": (2.2, 2.35),
    "ring": (2.2, 3.75),
    "activation loader": (6.4, 2.35),
    "arena": (6.4, 3.75),
    "consumer": (6.4, 5.15),
    "staging": (10.6, 3.75),
    "storer": (10.6, 2.35),
}
ARROWS: tuple[tuple[str, str, str], ...] = (
    ("device", "weight loader", "pages, ahead of all waits"),
    ("weight loader", "ring", ""),
    ("ring", "consumer", "full, then free"),
    ("device", "activation loader", "after its events"),
    ("activation loader", "arena", ""),
    ("arena", "consumer", "full, then free"),
    ("consumer", "staging", "full, then free"),
    ("staging", "storer", ""),
    ("storer", "device", "results, then the signal"),
)
BOX, HEIGHT = (3.3, 0.86), 6.6


def draw_kernel(plan: KernelPlan, path: Path, title: str) -> None:
    """Draw what every SM of the kernel is made of, with the numbers of a plan."""
    plt = figure_module()
    from matplotlib.patches import FancyBboxPatch

    figure = plt.figure(figsize=(WIDTH, HEIGHT))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, WIDTH)
    ax.set_ylim(HEIGHT, 0)
    ax.axis("off")
    ax.text(0.15, 0.12, title, fontsize=10, va="top", weight="bold")
    texts = kernel_texts(plan)
    for name, (x, y) in PLACES.items():
        head, *lines = texts[name]
        wide = 8.6 if name == "device" else BOX[0]
        ax.add_patch(
            FancyBboxPatch(
                (x - wide / 2, y - BOX[1] / 2),
                wide,
                BOX[1],
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=_colour(name),
                edgecolor=INK,
                linewidth=0.6,
                zorder=3,
            )
        )
        rows = [w for line in lines for w in textwrap.wrap(line, int(wide / 0.065))]
        ax.text(x, y - 0.28, head, weight="bold", fontsize=9, **_MIDDLE)
        ax.text(x, y + 0.12, "\n".join(rows[:3]), fontsize=7.5, **_MIDDLE)
    for a, b, text in ARROWS:
        _arrow(ax, a, b, text)
    kinds = ", ".join(texts["kinds"])
    switch = textwrap.fill(f"one switch over {kinds}", int(12.4 / 0.066))
    ax.text(0.15, 5.85, switch, fontsize=7.5, va="top", color=INK)
    save(plt, figure, path)


_MIDDLE: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}


def _colour(name: str) -> str:
    if name == "device":
        return MEMORY
    return STORE if name in ("ring", "arena", "staging") else ROLE


def kernel_texts(plan: KernelPlan) -> dict[str, list[str]]:
    """What is in each box: a head and lines; and the kinds of tasks as "kinds"."""
    graph = plan.schedule.events.graph
    events = plan.schedule.events.events
    waits = [w for its in plan.schedule.events.waits for w in its]
    gates = Counter("stream" if w.gate == "stream" else "resident" for w in waits)
    counts = Counter(t.kind for t in graph.tasks)
    streaming = sum(bool(kind_streams(k)) for k in graph.kinds)
    sms = len(plan.schedule.queues)
    modes = {"full": "", "partial": " (a part)", "combine": " (combine)"}
    return {
        "device": [
            "device memory",
            f"{len(graph.buffers)} arrays; {len(events):,} counters",
            f"shared by {sms} SMs, one persistent CTA each: {len(graph.tasks):,} tasks",
        ],
        "weight loader": [
            "weight loader",
            f"{streaming} of {len(graph.kinds)} kinds stream; at most {plan.in_flight} "
            "pages in flight",
            f"{gates['stream']:,} waits for events",
        ],
        "ring": [
            f"ring of {plan.ring} pages",
            f"{plan.page_bytes // 1024} KiB each",
        ],
        "activation loader": [
            "activation loader",
            f"{gates['resident']:,} waits for events, acquire",
        ],
        "arena": [
            f"arena, {plan.arena_slots} slot{'s' * (plan.arena_slots > 1)}",
            f"{plan.arena_bytes:,} bytes of resident operands",
        ],
        "consumer": [
            "consumer",
            "bodies on tensor cores, values in registers",
            f"scratch {plan.scratch_bytes:,} bytes",
        ],
        "staging": [
            f"staging, {plan.staging_slots} slot{'s' * (plan.staging_slots > 1)}",
            f"{plan.staging_bytes:,} bytes of results",
        ],
        "storer": [
            "storer",
            f"{sum(s >= 0 for s in plan.schedule.events.signals):,} signals, release",
        ],
        "kinds": [f"{len(graph.kinds)} kinds: " + _kind_list(graph, counts, modes)],
    }


def _kind_list(graph: Any, counts: Counter[int], modes: dict[str, str]) -> str:
    names = (
        f"{kind.call}{modes[kind.mode]} x {counts[i]:,}"
        for i, kind in enumerate(graph.kinds)
    )
    return ", ".join(names)


def _arrow(ax: Any, a: str, b: str, text: str) -> None:
    start, end = _ends(a, b)
    ax.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.9},
        zorder=2,
    )
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        ax.text(
            x,
            y,
            text,
            fontsize=7.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            **_MIDDLE,
        )


def _ends(a: str, b: str) -> tuple[Place, Place]:
    """From the side of a box to the side of another that faces it."""
    (ax, ay), (bx, by) = PLACES[a], PLACES[b]
    down = 1 if by > ay else -1
    if "device" in (a, b):
        # The bar of device memory is above all: straight up and down.
        x = ax if a != "device" else bx
        return (x, ay + down * BOX[1] / 2), (x, by - down * BOX[1] / 2)
    if b == "consumer" and ax != bx:
        return (ax, ay + BOX[1] / 2), (bx - BOX[0] / 2, by)
    if a == "consumer":
        return (ax + BOX[0] / 2, ay), (bx, by + BOX[1] / 2)
    return (ax, ay + down * BOX[1] / 2), (bx, by - down * BOX[1] / 2)
