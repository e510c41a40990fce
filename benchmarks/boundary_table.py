"""What boundaries between kernels cost: the tables of docs/boundaries.md.

    python -m benchmarks.boundary_table              print them
    python -m benchmarks.boundary_table --write      put them into docs/boundaries.md

Nothing is run. Measured values are read from benchmarks/results/.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plan_table import Case, filled, row_of
from benchmarks.results import PLAIN_PREFIX, RESULTS
from benchmarks.shapes import BF16_BYTES
from mkdsl.lower.boundaries import economics, potential_gain
from mkdsl.lower.machine import H200, RTX_4090, Machine
from models.llama import LlamaConfig
from models.registry import SHAPES

PAGE = Path(__file__).parents[1] / "docs" / "boundaries.md"
# Norm and q, k, v; RoPE and cache; attention; o; norm and gate, up; SiLU; down.
KERNELS_PER_LAYER = 7
BOUNDARY_US = (1, 2, 4)
CASES = (
    Case("llama-3.2-1b", 1),
    Case("llama-3.2-1b", 8),
    Case("llama-3.2-3b", 1),
    Case("llama-3.1-8b", 1),
    Case("llama-3.1-8b", 8),
    Case("qwen3-0.6b", 1),
    Case("qwen3-8b", 1),
    Case("qwen3-8b", 8),
    Case("gemma-3-270m", 1),
    Case("llama-3.2-1b", 1, RTX_4090),
)

_8B = SHAPES["llama-3.1-8b"]
_1B = SHAPES["llama-3.2-1b"]
assert isinstance(_8B, LlamaConfig)
assert isinstance(_1B, LlamaConfig)
# From the published config.json of Llama 3.1 70B.
_70B = replace(
    _8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A step of a dense transformer on one card.

    Attributes:
        rows: sequences.
        new: tokens of each that the step computes.
        cached: positions of each that it reads.
        passes: forward passes that its operations amount to (training: 3).
        order: of the share that boundaries take, as it is often given.
    """

    name: str
    config: Any
    rows: int
    new: int
    cached: int
    order: str
    passes: int = 1

    @property
    def boundaries(self) -> int:
        """Kernels of all layers."""
        return self.passes * KERNELS_PER_LAYER * self.config.num_layers

    def read_bytes(self) -> int:
        """Weights of the layers and the head once for each pass, and the cache."""
        c = self.config
        cache = 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.cached * self.rows
        return BF16_BYTES * (self.passes * _weights(c) + cache)

    def operations(self) -> int:
        """Of weights, and of attention where each token sees those before it."""
        c, tokens = self.config, self.rows * self.new
        seen = self.cached + self.new / 2
        attention = 4 * c.num_layers * c.num_heads * c.head_dim * seen
        return int(self.passes * tokens * (2 * _weights(c) + attention))

    def work_ns(self, machine: Machine) -> float:
        """The roofline of the step."""
        return max(
            self.read_bytes() * 1e9 / machine.read_bytes_per_s,
            self.operations() * 1e9 / machine.flops_per_s,
        )


def _weights(c: Any) -> int:
    """Parameters that every token uses: the layers and the head, without norms."""
    heads = c.num_heads + 2 * c.num_kv_heads
    attention = c.hidden_size * c.head_dim * (heads + c.num_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size
    return c.num_layers * layer + c.vocab_size * c.hidden_size


SCENARIOS = (
    Scenario("training, 8B, 4 x 8192 tokens", _8B, 4, 8192, 0, "0.06%", 3),
    Scenario("prefill, 8B, 8192 tokens", _8B, 1, 8192, 0, "0.6%"),
    Scenario("decode, 70B, batch 64", _70B, 64, 1, 1024, "1.6%"),
    Scenario("decode, 8B, batch 8", _8B, 8, 1, 1024, "5%"),
    Scenario("decode, 1B, batch 1", _1B, 1, 1, 1024, "40%"),
)


# -------------------------------------------------------------------------- tables


def scenario_line(s: Scenario) -> str:
    """Work, boundaries, and their share at several costs of one."""
    work = s.work_ns(H200)
    memory = s.read_bytes() * 1e9 / H200.read_bytes_per_s
    gains = (
        f"{potential_gain(1e3 * us * s.boundaries, work):.2%}" for us in BOUNDARY_US
    )
    bound = "bytes" if memory >= work else "operations"
    cells = (s.name, s.boundaries, f"{work / 1e3:,.0f}", bound, *gains, s.order)
    return f"| {' | '.join(map(str, cells))} |"


def step_line(case: Case, measured: dict[tuple[str, int], dict[str, Any]]) -> str:
    """The boundaries of a planned step, and what was measured of it."""
    row = row_of(case)
    found = economics(row.plan, case.machine)
    parts = [
        sum(getattr(b, name) for b in found.boundaries) / 1e3
        for name in ("launch_ns", "tail_ns", "bubble_ns", "trip_ns")
    ]
    known = measured.get((case.model, case.batch), {})
    if case.machine != H200:
        known = {}
    cells = (
        case,
        len(found.boundaries),
        f"{found.work_ns / 1e3:.0f}",
        *(f"{us:.0f}" for us in parts),
        f"{found.gain:.0%}",
        _lost(known, "xla"),
        f"{1 - found.work_ns / row.cost.step_ns:.0%}",
        _lost(known, "mosaic_gpu"),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _lost(rows: dict[str, Any], implementation: str) -> str:
    """Share of a measured step beyond the bytes at the measured ceiling."""
    row = rows.get(implementation)
    if row is None:
        return ""
    floor_us = row["bytes"] / row["ceiling_tb_per_s"] / 1e6
    return f"{1 - floor_us / row['us_per_token']['median']:.0%}"


def measured_rows() -> dict[tuple[str, int], dict[str, Any]]:
    """(model, batch) -> the best plain XLA as "xla", and "mosaic_gpu", of the newest
    file that has them."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("decode-*.json")):
        fresh: dict[tuple[str, int], dict[str, Any]] = {}
        for row in json.loads(path.read_text())["rows"]:
            case = fresh.setdefault((row["model"], row["batch"]), {})
            name = row["implementation"]
            name = "xla" if name.startswith(PLAIN_PREFIX) else name
            if name not in case or _median(row) < _median(case[name]):
                case[name] = row
        for case, rows in fresh.items():
            found[case] = found.get(case, {}) | rows
    return found


def _median(row: dict[str, Any]) -> float:
    return row["us_per_token"]["median"]


HEADS = {
    "scenarios": (
        "step",
        "boundaries",
        "work, us",
        "bound by",
        *(f"at {us} us" for us in BOUNDARY_US),
        "often said",
    ),
    "steps": (
        "model",
        "batch",
        "machine",
        "stages",
        "work, us",
        "launch",
        "waves",
        "bubble",
        "round trips",
        "share",
        "XLA, measured",
        "one kernel, estimated",
        "one kernel, measured",
    ),
}


def tables_of(cases: Sequence[Case] = CASES) -> dict[str, str]:
    """The text of every table."""
    measured = measured_rows()
    rows = {
        "scenarios": [scenario_line(s) for s in SCENARIOS],
        "steps": [step_line(case, measured) for case in cases],
    }
    return {
        name: "\n".join(
            [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows[name]]
        )
        for name, head in HEADS.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.boundary_table")
    parser.add_argument("--write", action="store_true", help=f"renew {PAGE.name}")
    args = parser.parse_args(argv)
    tables = tables_of()
    if args.write:
        PAGE.write_text(filled(PAGE.read_text(), tables))
    else:
        print("\n\n".join(f"{name}\n{text}" for name, text in tables.items()))


if __name__ == "__main__":
    main()
