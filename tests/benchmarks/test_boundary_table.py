"""The page on boundaries says what the estimate says."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import boundary_table as table
from benchmarks.plan_table import Case, rows_in
from mkdsl.lower.machine import H200
from models.registry import SHAPES

SMALL = Case("llama-3.2-1b", 1)


def percent(text: str) -> float:
    return float(text.strip().rstrip("%"))


def test_the_page_has_every_scenario() -> None:
    rows = list(rows_in(table.PAGE.read_text(), "scenarios"))
    assert rows == [table.scenario_line(s) for s in table.SCENARIOS], (
        "run `python -m benchmarks.boundary_table --write` and look at the prose again"
    )


@pytest.mark.parametrize("scenario", table.SCENARIOS, ids=lambda s: s.name)
def test_what_is_often_said_is_of_the_order(scenario: table.Scenario) -> None:
    """A column is within a third of it."""
    *_, one, two, four, said, _ = table.scenario_line(scenario).split("|")
    ratios = [percent(x) / percent(said) for x in (one, two, four)]
    assert any(2 / 3 < r < 4 / 3 for r in ratios), ratios


def test_shares_rise_from_training_to_batch_1() -> None:
    shares = [s.boundaries / s.work_ns(H200) for s in table.SCENARIOS]
    assert shares == sorted(shares)
    assert shares[-1] / shares[0] > 300


def test_bytes_and_operations_of_a_dense_step() -> None:
    last = table.SCENARIOS[-1]
    # 1.236e9 parameters but norms; 1024 positions of 8 heads of 64 in 16 layers.
    assert last.config is SHAPES["llama-3.2-1b"]
    cache = 2 * 16 * 8 * 64 * 1024 * 2
    assert last.read_bytes() == pytest.approx(2 * 1.2358e9 + cache, rel=1e-3)
    assert last.operations() == pytest.approx(2 * 1.2358e9 + 1.34e8, rel=1e-2)


@pytest.mark.slow
def test_the_page_is_true() -> None:
    (old,) = (
        r
        for r in rows_in(table.PAGE.read_text(), "steps")
        if r.startswith(f"| {SMALL} |")
    )
    assert old == table.step_line(SMALL, table.measured_rows())


def test_measured_shares_are_those_of_the_files() -> None:
    rows = table.measured_rows()["llama-3.2-1b", 1]
    assert rows["xla"]["implementation"].startswith("xla")
    kernel = rows["mosaic_gpu"]
    floor = kernel["bytes"] / kernel["ceiling_tb_per_s"] / 1e6
    share = 1 - floor / kernel["us_per_token"]["median"]
    (row,) = (
        r
        for r in rows_in(table.PAGE.read_text(), "steps")
        if r.startswith(f"| {SMALL} |")
    )
    cells = [c.strip() for c in row.split("|")[1:-1]]
    assert cells[-1] == f"{share:.0%}"
    assert cells[2] == "h200"


def test_every_case_has_a_row() -> None:
    rows = list(rows_in(table.PAGE.read_text(), "steps"))
    cases = [" | ".join(r.split(" | ")[:3]) for r in rows]
    assert cases == [f"| {case}" for case in table.CASES]


def test_the_newest_file_counts_for_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(name: str, **us: float) -> None:
        rows = [
            {
                "model": "m",
                "batch": 1,
                "implementation": i,
                "us_per_token": {"median": u},
            }
            for i, u in us.items()
        ]
        (tmp_path / f"decode-{name}.json").write_text(json.dumps({"rows": rows}))

    write("1", xla_a=9, xla_b=8, mosaic_gpu=7)
    write("2", mosaic_gpu=6)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    (rows,) = table.measured_rows().values()
    assert {i: r["us_per_token"]["median"] for i, r in rows.items()} == {
        "xla": 8,
        "mosaic_gpu": 6,
    }


def test_the_hand_off_is_that_of_the_machine() -> None:
    (said,) = re.findall(
        r"hand-off in the cost model\*\* \| \*\*([\d.]+)\*\*", (table.PAGE.read_text())
    )
    assert float(said) == H200.hand_off_ns / 1e3
