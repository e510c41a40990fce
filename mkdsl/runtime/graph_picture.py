"""Task graphs as pictures: a box per kind, arrows for dependences or through events.

A graph is folded by call and layer first (lower/fold.py), so that a model of any size
has as many boxes as it has calls. Arrows go down; what goes to the next layer is a line
in the box. Needs matplotlib and networkx (`pip install mkdsl[pictures]`).
"""

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdsl.lower.fold import (
    Edge,
    EventGroup,
    Folded,
    FoldedEvents,
    FoldedTask,
    short_name,
)
from mkdsl.runtime.gantt import WIDTH, figure_module, save
from mkdsl.runtime.layered import Layout, layered

STREAMS, RESIDENT, EVENT = "#cfe8f7", "#eeeeee", "#fde3c3"
INK = "#333333"
WHYS = {"RAW": INK, "WAR": "#d55e00", "WAW": "#cc79a7"}
# Inches of a character of 7 points, and of a line.
CHARACTER, LINE = 0.055, 0.125
# Inches between ranks, with room for the text of an arrow or without.
GAP, SMALL_GAP = 0.42, 0.27
# Where on the last stretch of an arrow its text is, for the arrows into one box.
LABELS = (0.62, 0.4, 0.78)
Place = tuple[float, float]


def draw_tasks(folded: Folded, path: Path, title: str, unit: str = "tasks") -> None:
    """Draw kinds with their regions, and the dependences between them.

    Args:
        unit: what the pairs of an edge are pairs of.
    """
    texts = [list(_full_text(folded, i)) for i in range(len(folded.tasks))]
    forward = [e for e in folded.edges if not e.loops]
    links = {(e.source, e.target): e for e in forward}
    page = _Page(range(len(texts)), links, WIDTH)
    page.boxes(texts, [_colour(t) for t in folded.tasks])
    figure, ax = page.figure()
    page.draw(ax)
    for (a, b), edge in links.items():
        page.arrow(ax, a, b, _edge_text(edge), WHYS.get(edge.why[:3], INK))
    ax.text(0.1, 0.12, title, fontsize=10, va="top", weight="bold")
    ax.text(0.1, 0.34, f"{_LEGEND}{unit}", fontsize=7.5, va="top", color=INK)
    save(figure_module(), figure, path)


_LEGEND = (
    "blue: streams weights or a cache (~) through pages; grey: resident operands only; "
    "an arrow has the array between two boxes, and how many pairs of "
)


def draw_fusion(before: Folded, after: FoldedEvents, path: Path, title: str) -> None:
    """Draw dependences as they are found, and the events that are left of them."""
    plt = figure_module()
    left = _pairs_page(before)
    right = _events_page(after)
    height = max(left.height, right.height)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, height))
    figure.subplots_adjust(0, 0, 1, 1, 0, 0)
    for ax, page in zip(axes, (left, right), strict=True):
        page.prepare(ax, height)
        page.draw(ax)
    for edge in (e for e in before.edges if not e.loops):
        left.arrow(axes[0], edge.source, edge.target, f"{edge.pairs:,}", INK)
    for n, group in enumerate(after.groups):
        for a in group.sources:
            right.arrow(axes[1], a, ("event", n), "", INK)
        for b in _forward(group):
            right.arrow(axes[1], ("event", n), b, "", INK)
    pairs = sum(e.pairs for e in before.edges)
    events = sum(g.events for g in after.groups)
    waits = sum(g.waits for g in after.groups)
    heads = (
        f"{title}: {pairs:,} pairs of tasks that depend",
        f"after fusion: {events:,} events, {waits:,} waits",
    )
    for ax, head in zip(axes, heads, strict=True):
        ax.text(0.1, 0.12, head, fontsize=10, va="top", weight="bold")
    save(plt, figure, path)


def _pairs_page(before: Folded) -> "_Page":
    links = {(e.source, e.target): e for e in before.edges if not e.loops}
    page = _Page(range(len(before.tasks)), links, WIDTH / 2)
    texts = [
        [*_name_lines(t), *_next_layer(before.tasks, _loop_targets(before, i))]
        for i, t in enumerate(before.tasks)
    ]
    page.boxes(texts, [_colour(t) for t in before.tasks])
    return page


def _events_page(after: FoldedEvents) -> "_Page":
    nodes: list[Any] = list(range(len(after.tasks)))
    links: dict[tuple[Any, Any], Any] = {}
    texts: list[list[str]] = [list(_name_lines(t)) for t in after.tasks]
    for n, group in enumerate(after.groups):
        nodes.append(("event", n))
        texts.append([*_event_lines(group), *_next_layer(after.tasks, _back(group))])
        links |= {(a, ("event", n)): group for a in group.sources}
        links |= {(("event", n), b): group for b in _forward(group)}
    colours = [_colour(t) for t in after.tasks] + [EVENT] * len(after.groups)
    page = _Page(nodes, links, WIDTH / 2, SMALL_GAP)
    page.boxes(texts, colours)
    return page


# ----------------------------------------------------------------------------- text


def _name_lines(task: FoldedTask) -> Iterator[str]:
    yield task.name
    layers = f" in {task.layers} layers" if task.layers > 1 else ""
    yield f"{task.tasks:,} task{'s' * (task.tasks > 1)}{layers}"


def _full_text(folded: Folded, i: int) -> Iterator[str]:
    task = folded.tasks[i]
    yield from _name_lines(task)
    if task.reads:
        yield f"reads {', '.join(task.reads)}"
    if task.streams:
        yield f"~ {', '.join(task.streams)}"
    yield f"writes {', '.join(task.writes)}"
    yield from _next_layer(folded.tasks, _loop_targets(folded, i))


def _next_layer(tasks: Sequence[FoldedTask], targets: Sequence[int]) -> Iterator[str]:
    if targets:
        yield f"next layer: {', '.join(tasks[t].name for t in targets)}"


def _loop_targets(folded: Folded, i: int) -> list[int]:
    return [e.target for e in folded.edges if e.loops and e.source == i]


def _forward(group: EventGroup) -> list[int]:
    return [t for t in group.targets if t > max(group.sources)]


def _back(group: EventGroup) -> list[int]:
    return [t for t in group.targets if t <= max(group.sources)]


def _event_lines(group: EventGroup) -> Iterator[str]:
    least, most = group.thresholds
    size = f"{least}" if least == most else f"{least} to {most}"
    yield f"{group.events:,} event{'s' * (group.events > 1)}"
    yield f"of {size} signals, {group.waits:,} waits"


def _edge_text(edge: Edge) -> str:
    why = "" if edge.why == "RAW" else f" {edge.why}"
    names = [short_name(b) for b in edge.buffers]
    more = f", +{len(names) - 1}" if len(names) > 1 else ""
    return f"{edge.pairs:,}{why} {names[0] if names else ''}{more}"


def _colour(task: FoldedTask) -> str:
    return STREAMS if task.streams else RESIDENT


# ---------------------------------------------------------------------------- boxes


class _Page:
    """Boxes in ranks on a page of a width in inches; y grows downwards."""

    def __init__(self, nodes: Any, links: Any, width: float, gap: float = GAP) -> None:
        figure_module()
        import networkx as nx

        graph: Any = nx.DiGraph()
        graph.add_nodes_from(nodes)
        graph.add_edges_from(links)
        self.nodes, self.width, self.gap = list(graph.nodes), width, gap
        self.layout: Layout = layered(graph)
        self.unit = min(3.4, (width - 0.2) / max(1, self.layout.width))
        self.box = self.unit - 0.14
        self.lines: dict[Any, list[str]] = {}
        self.colours: dict[Any, str] = {}
        self.labels: dict[Any, int] = {}
        self.tops: list[float] = []
        self.height = 0.0

    def boxes(self, texts: Sequence[list[str]], colours: Sequence[str]) -> None:
        """Say what is in the boxes, and find how high each rank is."""
        columns = int((self.box - 0.1) / CHARACTER)
        for node, lines, colour in zip(self.nodes, texts, colours, strict=True):
            wrapped = [w for line in lines for w in textwrap.wrap(line, columns)]
            self.lines[node], self.colours[node] = wrapped, colour
        heights = [0.0] * self.layout.ranks
        for node in self.nodes:
            rank = self.layout.at[node][1]
            heights[rank] = max(heights[rank], self._size(node))
        top = 0.75
        for height in heights:
            self.tops.append(top)
            top += height + self.gap
        self.heights = heights
        self.height = top - self.gap + 0.2

    def _size(self, node: Any) -> float:
        return len(self.lines[node]) * LINE + 0.12

    def figure(self) -> tuple[Any, Any]:
        """A figure of the page alone."""
        plt = figure_module()
        figure = plt.figure(figsize=(self.width, self.height))
        ax = figure.add_axes((0, 0, 1, 1))
        self.prepare(ax, self.height)
        return figure, ax

    def prepare(self, ax: Any, height: float) -> None:
        """Inches as coordinates."""
        ax.set_xlim(0, self.width)
        ax.set_ylim(height, 0)
        ax.axis("off")

    def draw(self, ax: Any) -> None:
        """All boxes."""
        from matplotlib.patches import FancyBboxPatch

        for node in self.nodes:
            x, y = self._middle(self.layout.at[node])
            size = self._size(node)
            ax.add_patch(
                FancyBboxPatch(
                    (x - self.box / 2, y - size / 2),
                    self.box,
                    size,
                    boxstyle="round,pad=0,rounding_size=0.06",
                    facecolor=self.colours[node],
                    edgecolor=INK,
                    linewidth=0.6,
                    zorder=3,
                )
            )
            for i, line in enumerate(self.lines[node]):
                ax.text(
                    x,
                    y - size / 2 + 0.06 + (i + 0.5) * LINE,
                    line,
                    fontsize=7,
                    ha="center",
                    va="center",
                    weight="bold" if i == 0 else "normal",
                    zorder=4,
                )

    def _middle(self, at: tuple[float, int]) -> Place:
        x, rank = at
        return self.width / 2 + x * self.unit, self.tops[rank] + self.heights[rank] / 2

    def arrow(self, ax: Any, a: Any, b: Any, text: str, colour: str) -> None:
        """A curve from the bottom of a box to the top of another."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path as Curve

        points = self._points(a, b)
        verts: list[Place] = [points[0]]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            middle = (y0 + y1) / 2
            verts += [(x0, middle), (x1, middle), (x1, y1)]
        codes = [Curve.MOVETO, *[Curve.CURVE4] * (len(verts) - 1)]
        ax.add_patch(
            FancyArrowPatch(
                path=Curve(verts, codes),
                arrowstyle="-|>",
                mutation_scale=7,
                linewidth=0.8,
                color=colour,
                zorder=2,
            )
        )
        if text:
            self._label(ax, b, points[-2], points[-1], text, colour)

    def _label(
        self, ax: Any, b: Any, start: Place, end: Place, text: str, colour: str
    ) -> None:
        """Text on the last stretch of an arrow, each into a box at another height."""
        turn = self.labels.get(b, 0)
        self.labels[b] = turn + 1
        t = LABELS[turn % len(LABELS)]
        # On the curve of `arrow`, whose ends are vertical.
        along = 3 * t**2 - 2 * t**3
        down = t**3 + 1.5 * t * (1 - t)
        ax.text(
            start[0] + along * (end[0] - start[0]),
            start[1] + down * (end[1] - start[1]),
            text,
            fontsize=6,
            ha="center",
            va="center",
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            zorder=2.5,
        )

    def _points(self, a: Any, b: Any) -> list[Place]:
        """From a to b around the boxes between."""
        (ax, ay), (bx, by) = (self._middle(self.layout.at[n]) for n in (a, b))
        points = [(ax, ay + self._size(a) / 2)]
        for x, rank in self.layout.bends[a, b]:
            at, _ = self._middle((x, rank))
            points += [
                (at, self.tops[rank]),
                (at, self.tops[rank] + self.heights[rank]),
            ]
        return [*points, (bx, by - self._size(b) / 2)]
