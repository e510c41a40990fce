"""Results of a benchmark: one JSON file with a head and rows, and a short table.

The head says on what, with what and by which command the rows were measured, so that
a number in a text can always be traced to a file.
"""

import dataclasses
import importlib.metadata
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"
PLAIN_PREFIX = "xla"
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "numpy",
    "flax",
    "safetensors",
    "torch",
    "triton",
    "mkdsl",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the repeats, in the unit of the field that holds it."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation on one case.

    Attributes:
        model: name of a shape in shapes.py.
        dtype: of weights and activations.
        batch: rows that each step decodes.
        context: positions cached before the first step.
        implementation: name given to the benchmark; plain XLA starts with "xla".
        us_per_token: microseconds of one step, which gives a token to each row.
        bytes: that a step must read at least: weights once, cached keys and values.
        tb_per_s: bytes over the median.
        ceiling_tb_per_s: best read bandwidth measured on the same card.
        max_error: largest difference of a chosen logit from the f32 reference, over
            the steps whose inputs agree; None where the implementation gives none.
        max_gap: how far at most a chosen token's logit is below the largest one, in the
            f32 reference after the same tokens; 0 where that would choose the same.
        gap_recovered: see `gap_recovered`; filled in by `with_gaps`.
        agreeing_steps: steps before the first token that differs from the f32
            reference, least over the rows of the batch.
        repeatable: the first and last repeat gave the same tokens and scores, bitwise.
        max_length: positions that the cache has room for.
        steps: of one loop.
        repeats: loops timed.
        digest: of tokens and scores: rows with the same one have the same bits.
    """

    model: str
    dtype: str
    batch: int
    context: int
    implementation: str
    us_per_token: Spread
    bytes: int
    tb_per_s: float
    ceiling_tb_per_s: float
    max_error: float | None
    agreeing_steps: int
    repeatable: bool
    max_length: int
    steps: int
    repeats: int
    max_gap: float | None = None
    gap_recovered: float | None = None
    digest: str | None = None

    @property
    def case(self) -> tuple[str, str, int, int, int]:
        """What rows must share to be compared."""
        return (self.model, self.dtype, self.batch, self.context, self.max_length)


@dataclass(frozen=True, slots=True)
class Failure:
    """An implementation that could not be measured on a case, and why."""

    model: str
    batch: int
    context: int
    implementation: str
    error: str


@dataclass(frozen=True, slots=True)
class Head:
    """On what, with what and how the rows were measured."""

    card: str
    driver: str
    versions: Mapping[str, str]
    date: str
    commit: str
    command: str
    ceiling: Mapping[str, float]
    inputs: str


def gap_recovered(us: float, plain_us: float, floor_us: float) -> float | None:
    """Share of the gap between the best plain XLA and the byte floor that is closed.

    0 is as slow as the best plain XLA, 1 as fast as reading the bytes at the ceiling;
    below 0 is slower than plain XLA. None where plain XLA is at the floor already.

    >>> gap_recovered(us=700, plain_us=1000, floor_us=500)
    0.6
    """
    if plain_us <= floor_us:
        return None
    return (plain_us - us) / (plain_us - floor_us)


def with_gaps(rows: Iterable[Row]) -> list[Row]:
    """The rows with `gap_recovered`, each against the fastest plain XLA of its case."""
    rows = list(rows)
    plain: dict[tuple[str, str, int, int, int], float] = {}
    for row in rows:
        if row.implementation.startswith(PLAIN_PREFIX):
            us = row.us_per_token.median
            plain[row.case] = min(us, plain.get(row.case, us))

    def gap(row: Row) -> float | None:
        if row.case not in plain:
            return None
        floor_us = row.bytes / row.ceiling_tb_per_s / 1e6
        return gap_recovered(row.us_per_token.median, plain[row.case], floor_us)

    return [dataclasses.replace(row, gap_recovered=gap(row)) for row in rows]


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _card_and_driver() -> tuple[str, str]:
    if jax.default_backend() != "gpu":
        return (platform.processor() or platform.machine()) + " (CPU)", "none"
    name = jax.devices()[0].device_kind
    driver = _output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    return name, driver.splitlines()[0] if driver else "unknown"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    clean = _output("git", "status", "--porcelain", "--untracked-files=no") == ""
    return commit if clean else f"{commit} with uncommitted changes"


def _without_folder(arguments: Sequence[str]) -> list[str]:
    """The arguments but for --out FOLDER: where it was written says nothing."""
    kept = list(arguments)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return [a for a in kept if not a.startswith("--out=")]


def collect_head(
    arguments: Sequence[str],
    ceiling: Mapping[str, float],
    inputs: str,
    commit: str | None = None,
) -> Head:
    """The head of a run.

    Args:
        arguments: of the command line, without the program.
        ceiling: TB/s of every way of reading that was tried.
        inputs: what the weights and the cache hold, in words.
        commit: named by the caller where there is no git, as on a bare machine.
    """
    card, driver = _card_and_driver()
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name}" if module else "python"
    return Head(
        card=card,
        driver=driver,
        versions=_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit or _commit(),
        command=f"{program} {shlex.join(_without_folder(arguments))}".strip(),
        ceiling=dict(ceiling),
        inputs=inputs,
    )


def write(
    name: str,
    head: Head,
    rows: Sequence[Any],
    failures: Sequence[Failure] = (),
    folder: Path = RESULTS,
) -> Path:
    """Write `<name>-<card>-<date>.json` and return its path; rows are dataclasses.

    Writing again with the same head replaces the file: call it after every case.
    """
    card = re.sub(r"[^a-z0-9]+", "-", head.card.lower()).strip("-")
    date = re.sub(r"[^0-9T]", "", head.date.split("+")[0])
    path = folder / f"{name}-{card}-{date}.json"
    content = {
        "head": dataclasses.asdict(head),
        "rows": [dataclasses.asdict(row) for row in rows],
        "failures": [dataclasses.asdict(failure) for failure in failures],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path


def _cells(row: Row) -> dict[str, str]:
    us, gap, error = row.us_per_token, row.gap_recovered, row.max_error
    return {
        "model": row.model,
        "batch": str(row.batch),
        "context": str(row.context),
        "implementation": row.implementation,
        "us/token": f"{us.median:.1f}",
        "min": f"{us.min:.1f}",
        "max": f"{us.max:.1f}",
        "TB/s": f"{row.tb_per_s:.3f}",
        "of ceiling": f"{row.tb_per_s / row.ceiling_tb_per_s:.1%}",
        "gap closed": "-" if gap is None else f"{gap:.1%}",
        "max error": "-" if error is None else f"{error:.2e}",
        "max gap": "-" if row.max_gap is None else f"{row.max_gap:.2e}",
        "bits": row.digest or "-",
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one a line under a line of titles."""
    if not rows:
        return "no rows"
    cells = [_cells(row) for row in rows]
    lines = [list(cells[0]), *(list(line.values()) for line in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
