"""What plans cost: the tables of docs/plans.md.

    python -m benchmarks.plan_table                  print them
    python -m benchmarks.plan_table --write          put them into docs/plans.md

Nothing is run and no weights are made: programs are traced on shapes.
"""

import argparse
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mkdsl as mk
from mkdsl.lower.estimate import Estimate, estimate
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import H200, RTX_4090, Machine
from mkdsl.lower.pipeline import Stage, compile_program
from models.decode import argument_shapes
from models.registry import SHAPES, family_of

PAGE = Path(__file__).parents[1] / "docs" / "plans.md"
SLOTS = 2048
MOST_BALANCE = 1.08


@dataclass(frozen=True, slots=True)
class Case:
    """A step that is planned."""

    model: str
    batch: int
    machine: Machine = H200

    def __str__(self) -> str:
        return f"{self.model} | {self.batch} | {self.machine.name}"


NAMES = ("gemma-3-270m", "llama-3.2-1b", "llama-3.1-8b", "qwen3-8b")
CASES = (
    *(Case(name, batch) for name in NAMES for batch in (1, 8)),
    Case("llama-3.1-8b", 16, replace(H200, name="h200, 16 KiB", page_bytes=16_384)),
    *(Case("llama-3.2-1b", batch, RTX_4090) for batch in (1, 8)),
    Case("llama-3.1-8b", 1, RTX_4090),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of a planned step.

    Attributes:
        counts: of every stage.
        plan_s: trace and all passes with their checks, CPU time.
    """

    case: Case
    counts: dict[str, dict[str, int]]
    plan: KernelPlan
    cost: Estimate
    plan_s: float


def row_of(case: Case, repeats: int = 1) -> Row:
    """Plan a step, several times for a stable time; the shortest counts."""
    config = SHAPES[case.model]
    arguments = argument_shapes(config, case.batch, SLOTS)
    program = family_of(config).decode_program
    times: list[float] = []
    plan: KernelPlan | None = None
    traced: Any = None
    for _ in range(repeats):
        start = time.process_time()
        step = program(config, case.batch, SLOTS, machine=case.machine)
        traced = mk.megakernel(step, donate_argnums=1).trace(*arguments)
        plan = compile_program(traced.program, case.machine)
        times.append(time.process_time() - start)
    stages: list[Stage] = []
    compile_program(traced.program, case.machine, dump=stages.append)
    assert plan is not None
    return Row(
        case,
        {stage.name: stage.counts() for stage in stages},
        plan,
        estimate(plan, case.machine),
        min(times),
    )


# -------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Iterable[str]) -> str:
    """A table of Markdown; each row starts with its case."""
    head = ("model", "batch", "machine", *head)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *rows])


def line(row: Row, *cells: object) -> str:
    return f"| {row.case} | {' | '.join(map(str, cells))} |"


def counts_line(row: Row) -> str:
    """Sizes of the graph after each pass."""
    c = row.counts
    waits = c["elided"]["waits"]
    tasks = c["elided"]["tasks"]
    added = c["normalized"]["tasks"] - c["dependences"]["tasks"]
    return line(
        row,
        f"{tasks:,}",
        f"{c['dependences']['edges']:,}",
        f"{c['dependences']['needs']:,}",
        f"{c['events']['events']:,} / {c['events']['waits']:,}",
        f"{c['normalized']['events']:,} / {c['normalized']['waits']:,}",
        f"{waits:,}",
        f"{waits / tasks:.2f} / {c['elided']['most waits']}",
        local_waits(row.plan),
        f"{added / tasks:.0%}",
    )


def local_waits(plan: KernelPlan) -> int:
    """Waits for an event that only tasks of the waiting task's own SM signal."""
    events = plan.schedule.events
    sm_of = {t: sm for sm, queue in enumerate(plan.schedule.queues) for t in queue}
    sms = [{sm_of[m] for m in event.members} for event in events.events]
    return sum(
        sms[wait.event] == {sm_of[t]}
        for t, waits in enumerate(events.waits)
        for wait in waits
    )


def costs_line(row: Row) -> str:
    """Bytes, bounds and time."""
    plan, cost = row.plan, row.cost
    return line(
        row,
        f"{cost.read_bytes / 1e9:.2f}",
        f"{plan.ring} x {plan.page_bytes // 1024} KiB",
        f"{plan.smem_bytes:,}",
        f"{plan.instruction_bytes:,}",
        f"{cost.read_ns / 1e3:.0f}",
        f"{cost.critical_ns / 1e3:.0f}",
        f"{cost.lower_bound_ns / 1e3:.0f}",
        f"{cost.step_ns / 1e3:.0f}",
    )


def balance_line(row: Row) -> str:
    """Balance of every large stage that differs from the ones before it."""
    page = row.case.machine.page_bytes
    seen = {
        s.calls: f"{'+'.join(s.calls)} {s.balance:.2f}"
        for s in reversed(row.cost.stages)
        if s.total > page * row.case.machine.sms
    }
    worst = row.cost.worst_balance(page)
    within = worst is None or worst.balance <= MOST_BALANCE
    return line(row, ", ".join(reversed(seen.values())), "yes" if within else "no")


def times_line(row: Row) -> str:
    """How long planning took."""
    return line(row, f"{row.plan_s:.1f}")


TABLES = {
    "counts": (
        (
            "tasks",
            "edges",
            "needs",
            "events / waits",
            "normalized",
            "waits elided",
            "waits a task, mean / max",
            "on its own SM",
            "tasks added",
        ),
        counts_line,
    ),
    "costs": (
        (
            "GB",
            "ring",
            "shared memory",
            "instructions",
            "bytes, us",
            "critical path, us",
            "lower bound, us",
            "estimate, us",
        ),
        costs_line,
    ),
    "balance": (("most / mean bytes of an SM", "within 1.08"), balance_line),
    "times": (("planning, s",), times_line),
}


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    """The text of every table."""
    return {
        name: table(head, (make(row) for row in rows))
        for name, (head, make) in TABLES.items()
    }


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with its tables between `<!-- name -->` and `<!-- end -->` renewed."""
    for name, new in tables.items():
        pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, new=new: f"{m[1]}{new}\n{m[2]}", text)
        if count != 1:
            raise ValueError(f"the page has {count} places for table {name!r}")
    return text


def rows_in(text: str, name: str) -> Iterator[str]:
    """The rows of a table of a page."""
    block = text.split(f"<!-- {name} -->\n")[1].split("\n<!-- end -->")[0]
    yield from block.splitlines()[2:]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_table")
    parser.add_argument("--write", action="store_true", help=f"renew {PAGE.name}")
    parser.add_argument("--repeats", type=int, default=3, help="plans of a step (3)")
    args = parser.parse_args(argv)
    tables = tables_of([row_of(case, args.repeats) for case in CASES])
    if args.write:
        PAGE.write_text(filled(PAGE.read_text(), tables))
    else:
        print("\n\n".join(f"{name}\n{text}" for name, text in tables.items()))


if __name__ == "__main__":
    main()
