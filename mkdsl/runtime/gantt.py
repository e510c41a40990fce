"""Timelines as a picture: a row per SM, bars by cause, the critical path as a line.

Several timelines stand below each other on one axis of time, so that two runs compare
at a glance. Few SMs have a row for each role; many have one for their consumer alone.
Needs matplotlib (`pip install mkdsl[pictures]`).
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkdsl.errors import LaunchError
from mkdsl.runtime.agents import ROLES, Role
from mkdsl.runtime.timeline import CAUSES, CONSUMER, Cause, Span, Timeline

# Okabe and Ito's colours, which most people can tell apart.
COLOURS: dict[Cause, str] = {
    "wait": "#e8c39a",
    "load": "#56b4e9",
    "compute": "#009e73",
    "store": "#cc79a7",
}
MEANING: dict[Cause, str] = {
    "wait": "wait for an event",
    "load": "load operands, pages",
    "compute": "compute",
    "store": "store and signal",
}
# More SMs than this have one row each.
MOST_WITH_ROLES = 6
# More bars than this are drawn as pixels in a vector file.
MOST_VECTORS = 4000
WIDTH, DPI = 12.8, 100
Window = tuple[float, float]


def figure_module() -> Any:
    """matplotlib's pyplot without a display.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise LaunchError(
            "pictures need matplotlib", hint="pip install 'mkdsl[pictures]'"
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    # The same picture has the same bytes, whenever it is made.
    plt.rcParams["svg.hashsalt"] = "mkdsl"
    plt.rcParams["font.size"] = 9
    return plt


def save(plt: Any, figure: Any, path: Path) -> None:
    """Write a figure; its kind is that of the name."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=DPI, metadata=metadata)
    plt.close(figure)


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    path: Path,
    window_us: Window | None = None,
) -> None:
    """Draw timelines below each other.

    Args:
        timelines: (title, timeline).
        path: to write, .svg or .png.
        window_us: the part of the step to show; all of it if None.

    Raises:
        LaunchError: matplotlib is not installed.
    """
    plt = figure_module()
    end = max(t.end_ns for _, t in timelines) / 1e3
    left, right = window_us or (0.0, end)
    rows = [_rows(t) for _, t in timelines]
    heights = [min(7.0, max(1.2, 0.17 * len(r))) for r in rows]
    figure, axes = plt.subplots(
        len(timelines),
        figsize=(WIDTH, sum(heights) + 0.75 * len(rows) + 0.35),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for ax, (title, timeline), row in zip(axes[:, 0], timelines, rows, strict=True):
        _draw(ax, title, timeline, row, left * 1e3, right * 1e3)
        ax.set_xlim(left, right)
    axes[-1, 0].set_xlabel("us since the first task began")
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[c]) for c in CAUSES]
    line = plt.Line2D([0], [0], color="black", linewidth=1)
    figure.legend(
        [*patches, line],
        [*(MEANING[c] for c in CAUSES), "critical path"],
        loc="outside lower center",
        ncols=len(CAUSES) + 1,
        frameon=False,
    )
    save(plt, figure, path)


Rows = dict[tuple[int, Role], int]


def _rows(timeline: Timeline) -> Rows:
    """The row of a role of an SM, from the top."""
    roles = ROLES if timeline.sms <= MOST_WITH_ROLES else (CONSUMER,)
    pairs = itertools.product(range(timeline.sms), roles)
    return {pair: row for row, pair in enumerate(pairs)}


def _draw(
    ax: Any, title: str, timeline: Timeline, rows: Rows, left: float, right: float
) -> None:
    seen = [
        s
        for s in timeline.spans
        if (s.sm, s.role) in rows and s.end_ns > left and s.start_ns < right
    ]
    many = len(seen) > MOST_VECTORS
    for cause in CAUSES:
        _bars(ax, [s for s in seen if s.cause == cause], rows, cause, many)
    _path(ax, timeline, rows)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_title(f"{title}: {timeline.end_ns / 1e3:.1f} us", loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    if len(rows) > timeline.sms:
        ax.set_yticks(list(rows.values()), [f"{r}, SM {sm}" for sm, r in rows])
        for row in range(len(ROLES), len(rows), len(ROLES)):
            ax.axhline(row - 0.5, color="0.8", linewidth=0.6)
    else:
        ax.set_ylabel("SM (its consumer)")


def _bars(ax: Any, spans: list[Span], rows: Rows, cause: Cause, many: bool) -> None:
    by_row: dict[int, list[tuple[float, float]]] = {}
    for s in spans:
        bar = s.start_ns / 1e3, s.ns / 1e3
        by_row.setdefault(rows[s.sm, s.role], []).append(bar)
    for row, bars in by_row.items():
        ax.broken_barh(
            bars,
            (row - 0.42, 0.84),
            facecolors=COLOURS[cause],
            edgecolor="none" if many else "white",
            linewidth=0.3,
            rasterized=many,
        )


def _path(ax: Any, timeline: Timeline, rows: Rows) -> None:
    """Where the critical path is: along the consumer of each of its tasks."""
    xs: list[float] = []
    ys: list[int] = []
    begin = 0
    for run in timeline.critical_path():
        row = rows[run.sm, CONSUMER]
        xs += [begin / 1e3, run.signalled_ns / 1e3]
        ys += [row, row]
        begin = run.signalled_ns
    ax.plot(xs, ys, color="black", linewidth=1.0, solid_joinstyle="round")
