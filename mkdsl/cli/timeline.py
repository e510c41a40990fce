"""`python -m mkdsl timeline`: where the time of a step goes, and who waits for whom."""

import argparse
from pathlib import Path
from typing import Any

from mkdsl.cli.common import (
    Commands,
    UsageError,
    add_context,
    add_step_arguments,
    check_context,
    lowered_step,
)
from mkdsl.runtime.gantt import Window, draw_timelines
from mkdsl.runtime.pictures import check_suffix
from mkdsl.runtime.timeline import Timeline, from_stamps
from mkdsl.runtime.timeline_report import report
from mkdsl.runtime.trace_json import write_trace

ABOUT = """\
Run the schedule of a decode step on the clock of the simulator, whose times are those
of the machine's cost model, or read stamps that a kernel wrote; then say which SM
waited longest, for which event, and why. docs/see_it.md shows how to read the pictures.
"""
# The input of a decode step that says how many positions are cached.
LENGTHS = "cache.lengths"


def add_timeline(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "timeline", help="where the time of a decode step goes", description=ABOUT
    )
    parser.set_defaults(run=run)
    add_step_arguments(parser)
    add_context(parser)
    parser.add_argument(
        "--coarse", action="store_true", help="also with one event for each call"
    )
    parser.add_argument(
        "--stamps", type=Path, help="of a kernel, .npy, instead of the simulator's"
    )
    parser.add_argument(
        "--trace", type=Path, help="Chrome trace to write, for Perfetto"
    )
    parser.add_argument("--picture", type=Path, help=".svg or .png to write")
    parser.add_argument(
        "--window", type=_window, help="part of the step that is drawn, us, e.g. 0:50"
    )


def _window(text: str) -> Window:
    try:
        left, right = map(float, text.split(":"))
    except ValueError:
        left, right = 1.0, 0.0
    if not 0 <= left < right:
        raise argparse.ArgumentTypeError(f"{text} is no window; expected e.g. 0:50")
    return left, right


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_context(args)
    if args.picture is not None:
        check_suffix(args.picture)
    stamps = None if args.stamps is None else _stamps(args.stamps)
    lowered = lowered_step(args)
    scalars = {LENGTHS: args.context}
    if stamps is None:
        shown = [("fine events", lowered.timeline(scalars))]
    else:
        shown = [("device", from_stamps(lowered.plan, stamps))]
    if args.coarse:
        shown.insert(0, ("coarse events", lowered.timeline(scalars, coarse=True)))
    for title, timeline in shown:
        print(f"{title}\n{report(timeline)}")
    try:
        _write(args, shown)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error}") from None


def _stamps(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--stamps: {path} cannot be read: {error}") from None


def _write(args: argparse.Namespace, shown: list[tuple[str, Timeline]]) -> None:
    """The files that were asked for."""
    if args.trace is not None:
        write_trace(shown[-1][1], args.trace)
        print(f"{args.trace}: open it in Perfetto or chrome://tracing")
    if args.picture is not None:
        draw_timelines(shown, args.picture, args.window)
        print(args.picture)
