"""The report of the GPU suite: a short table, and JSON beside the benchmark results.

Written where MKDSL_GPU_REPORT names a folder, as `make gpu-check` does. A test adds
what it measured with the fixture `record_property`.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results

FOLDER = os.environ.get("MKDSL_GPU_REPORT")
COMMIT = os.environ.get("MKDSL_COMMIT")


@dataclasses.dataclass(frozen=True)
class Checked:
    """One test: what it is, how it ended, how long it took, what it measured."""

    test: str
    outcome: str
    seconds: float
    measured: dict[str, Any]


class Report:
    """Collects the tests of a session."""

    def __init__(self) -> None:
        self.rows: list[Checked] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ended = report.when == "call" or report.outcome != "passed"
        if ended and report.when != "teardown":
            name = report.nodeid.split("/")[-1]
            measured = dict(report.user_properties)
            seconds = round(report.duration, 2)
            self.rows.append(Checked(name, report.outcome, seconds, measured))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.table():
            terminalreporter.write_line(line)
        if FOLDER:
            head = results.collect_head((), {}, "see the tests", COMMIT)
            head = dataclasses.replace(head, command="make gpu-check")
            path = results.write("gpu-check", head, self.rows, folder=Path(FOLDER))
            terminalreporter.write_line(f"written to {path}")

    def table(self) -> Iterator[str]:
        """A line for each test."""
        width = max((len(row.test) for row in self.rows), default=0)
        for row in self.rows:
            found = ", ".join(f"{k} {v}" for k, v in row.measured.items())
            yield f"{row.test:<{width}}  {row.outcome:7} {row.seconds:6.1f} s  {found}"


def pytest_configure(config: pytest.Config) -> None:
    # Of several processes (pytest-xdist) the one that collects from the others writes.
    if FOLDER and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(), "gpu-report")
