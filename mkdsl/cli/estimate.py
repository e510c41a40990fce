"""`python -m mkdsl estimate`: what boundaries between kernels would cost a step."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mkdsl.cli.common import (
    Commands,
    add_context,
    add_step_arguments,
    check_context,
    lowered_step,
    machine_named,
)
from mkdsl.lower.boundaries import (
    LAUNCH_NS,
    Boundary,
    Economics,
    TaskBound,
    economics,
)
from mkdsl.lower.estimate import Estimate, estimate

ABOUT = """\
Take the stages of a decode step as kernels, one launched after the other, and say what
the boundaries between them cost: launch, partial last waves, memory bubbles, round
trips of activations; and of every kind of task whether bytes, operations or latency
bound it. docs/boundaries.md explains the parts, with measured values beside estimates.
"""


def add_estimate(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "estimate",
        help="what boundaries between kernels cost a decode step",
        description=ABOUT,
    )
    parser.set_defaults(run=run)
    add_step_arguments(parser)
    add_context(parser)
    parser.add_argument(
        "--launch-us",
        type=_not_negative,
        default=LAUNCH_NS / 1e3,
        help=f"gap between two kernels, assumed ({LAUNCH_NS / 1e3:g})",
    )
    parser.add_argument("--json", action="store_true", help="all numbers as JSON")


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return value


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_context(args)
    machine = machine_named(args.machine)
    plan = lowered_step(args).plan
    share = args.context / args.max_length
    found = economics(plan, machine, share, 1e3 * args.launch_us)
    whole = estimate(plan, machine, share)
    if args.json:
        print(json.dumps(as_data(found, whole), indent=1))
        return
    print(
        f"{args.model}, batch {args.batch}, context {args.context}, {machine.name} "
        f"({machine.sms} SMs, {machine.read_bytes_per_s / 1e12:.2f} TB/s, "
        f"{machine.flops_per_s / 1e12:.0f} TFLOP/s)\n"
    )
    print("\n".join(report_lines(found, whole)))


def as_data(found: Economics, whole: Estimate) -> dict[str, Any]:
    """All numbers, for JSON; times in ns."""
    return asdict(found) | {
        "boundary_ns": found.boundary_ns,
        "gain": found.gain,
        "boundaries": [asdict(b) | {"total_ns": b.total_ns} for b in found.boundaries],
        "tasks": [
            asdict(t)
            | {
                "roofline_ns": t.roofline_ns,
                "operations_per_byte": t.intensity,
                "bound": t.bound,
            }
            for t in found.tasks
        ],
        "one_kernel_ns": whole.step_ns,
    }


def report_lines(found: Economics, whole: Estimate) -> Iterator[str]:
    """The tables that the command prints."""
    yield "Boundaries of its stages as kernels, us of one; equal ones once:"
    yield from _boundary_lines(found.boundaries)
    yield ""
    yield "Tasks, while all SMs run, us of one:"
    yield from _table(
        ("task", "tasks", "KiB", "op/byte", "memory", "compute", "latency", "bound by"),
        [_task_row(t) for t in found.tasks],
    )
    yield ""
    work, boundary = found.work_ns / 1e3, found.boundary_ns / 1e3
    yield (
        f"as {len(found.boundaries)} kernels: work {work:.0f} us "
        f"({found.read_bytes / 1e9:.2f} GB, {found.operations / 1e9:.1f} GFLOP), "
        f"boundaries {boundary:.0f} us"
    )
    yield (
        f"potential gain: {boundary:.0f} / ({work:.0f} + {boundary:.0f}) = "
        f"{found.gain:.1%}"
    )
    yield f"as one kernel: {whole.step_ns / 1e3:.0f} us, estimated"


def _boundary_lines(boundaries: Sequence[Boundary]) -> Iterator[str]:
    counts: dict[tuple[Any, ...], tuple[Boundary, int]] = {}
    for b in boundaries:
        key = (b.calls, b.blocks, b.total_ns)
        first, count = counts.get(key, (b, 0))
        counts[key] = first, count + 1
    head = (
        "stage",
        "times",
        "blocks",
        "last wave",
        "launch",
        "waves",
        "bubble",
        "trips",
        "sum",
    )
    yield from _table(head, [_boundary_row(b, n) for b, n in counts.values()])


def _boundary_row(b: Boundary, count: int) -> tuple[str, ...]:
    parts = (b.launch_ns, b.tail_ns, b.bubble_ns, b.trip_ns, b.total_ns)
    last = f"{b.waves.last}, {b.waves.idle} idle" if b.waves.last else "full"
    return (
        "+".join(b.calls),
        str(count),
        str(b.blocks),
        last,
        *(f"{ns / 1e3:.2f}" for ns in parts),
    )


def _task_row(t: TaskBound) -> tuple[str, ...]:
    mode = "" if t.mode == "full" else f", {t.mode}"
    times = (t.memory_ns, t.compute_ns, t.latency_ns)
    return (
        t.call + mode,
        str(t.tasks),
        f"{t.read_bytes / 1024:.0f}",
        f"{t.intensity:.0f}",
        *(f"{ns / 1e3:.2f}" for ns in times),
        t.bound,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width, the first on the left and the others on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join(cells)
