"""The results file and its table."""

import json

import pytest

from benchmarks import results
from benchmarks.results import Row, Spread


def make_row(implementation, us, **changes):
    fields = {
        "model": "m",
        "dtype": "bf16",
        "batch": 1,
        "context": 1024,
        "implementation": implementation,
        "us_per_token": Spread(us, us - 1.0, us + 2.0),
        "bytes": 2_000_000_000,
        "tb_per_s": 2e9 / us / 1e6,
        "ceiling_tb_per_s": 4.0,  # a floor of 500 us
        "max_error": 0.01,
        "max_gap": 0.005,
        "agreeing_steps": 64,
        "repeatable": True,
        "max_length": 2048,
        "steps": 64,
        "repeats": 20,
    }
    return Row(**(fields | changes))


def test_gap_is_taken_from_the_fastest_plain_xla_of_the_case():
    rows = [
        make_row("xla_a", 1000.0),
        make_row("xla_b", 900.0),
        make_row("mosaic_gpu", 600.0),
        make_row("mosaic_gpu", 600.0, batch=8),
    ]
    gaps = [row.gap_recovered for row in results.with_gaps(rows)]
    assert gaps[:3] == pytest.approx([-0.25, 0.0, 0.75])
    assert gaps[3] is None  # no plain XLA at this batch


def test_gap_of_a_plain_xla_at_the_floor_is_unknown():
    assert results.gap_recovered(us=400, plain_us=500, floor_us=500) is None


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0, 9.0]) == Spread(2.5, 1.0, 9.0)


def test_file_has_the_head_and_every_field(tmp_path):
    head = results.collect_head(
        ["--out", "somewhere", "--batches", "1"], {"jax_sum": 4.0}, "zeros", "abc"
    )
    rows = results.with_gaps([make_row("xla", 1000.0)])
    failure = results.Failure("m", 1, 1024, "broken", "ValueError: no")
    path = results.write("decode", head, rows, [failure], tmp_path)
    assert results.write("decode", head, rows, [failure], tmp_path) == path
    content = json.loads(path.read_text())
    assert (
        content["head"] | {"commit": "abc", "ceiling": {"jax_sum": 4.0}}
        == (content["head"])
    )
    required_head = {"card", "driver", "versions", "date", "commit", "command"}
    assert required_head <= content["head"].keys()
    assert "jax" in content["head"]["versions"]
    (row,) = content["rows"]
    required = {
        "model",
        "dtype",
        "batch",
        "context",
        "implementation",
        "us_per_token",
        "bytes",
        "tb_per_s",
        "ceiling_tb_per_s",
        "max_error",
        "max_gap",
        "gap_recovered",
    }
    assert required <= row.keys()
    assert row["us_per_token"] == {"median": 1000.0, "min": 999.0, "max": 1002.0}
    assert content["failures"][0]["error"] == "ValueError: no"


def test_a_number_that_is_not_finite_is_refused(tmp_path):
    head = results.collect_head([], {}, "zeros", "abc")
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.write("decode", head, [make_row("x", float("nan"))], folder=tmp_path)


def test_table_has_one_line_a_row():
    rows = results.with_gaps([make_row("xla", 1000.0), make_row("mosaic_gpu", 600.0)])
    lines = results.table([*rows, make_row("other", 1.0, max_gap=None)]).splitlines()
    assert len(lines) == 4
    assert "80.0%" in lines[2]
    assert lines[3].endswith("-")
