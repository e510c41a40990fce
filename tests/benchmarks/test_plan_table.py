"""The page on plans says what the planner does today."""

import re

import pytest

from benchmarks import plan_table
from benchmarks.plan_table import CASES, PAGE, Case, filled, row_of, rows_in, tables_of
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import compile_program
from tests.lower.programs import mlp

SMALL = [case for case in CASES if case.model in ("gemma-3-270m", "llama-3.2-1b")]
UNTIMED = [name for name in plan_table.TABLES if name != "times"]


def test_the_page_has_a_row_of_every_case_in_every_table() -> None:
    text = PAGE.read_text()
    for name in plan_table.TABLES:
        cases = [" | ".join(r.split(" | ")[:3]) for r in rows_in(text, name)]
        assert cases == [f"| {case}" for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_page_is_true(case: Case) -> None:
    text = PAGE.read_text()
    made = tables_of([row_of(case)])
    for name in UNTIMED:
        *_, new = made[name].splitlines()
        (old,) = (r for r in rows_in(text, name) if r.startswith(f"| {case} |"))
        assert old == new, (
            f"docs/plans.md, {name}: run `python -m benchmarks.plan_table --write` and "
            "look at its prose again"
        )


def seconds(model: str) -> list[float]:
    rows = rows_in(PAGE.read_text(), "times")
    mine = [r for r in rows if r.startswith(f"| {model} |") and "| h200 |" in r]
    return [float(r.split("|")[-2]) for r in mine]


def test_planning_is_within_its_bars() -> None:
    assert max(seconds("llama-3.2-1b")) <= 3
    assert max(seconds("qwen3-8b")) <= 10


def test_what_the_page_says_of_balance_is_what_misses_the_bar() -> None:
    worst = {
        stage: max(
            float(x) for x in re.findall(rf"\b{re.escape(stage)} ([\d.]+)", text)
        )
        for text in ["\n".join(rows_in(PAGE.read_text(), "balance"))]
        for stage in ("q+k+v", "attend", "o", "gate_up", "down", "best")
    }
    misses = {s for s, most in worst.items() if most > plan_table.MOST_BALANCE}
    assert misses == {"q+k+v", "attend", "gate_up", "best"}


def test_waits_on_the_own_sm_are_counted() -> None:
    alone, two = (compile_program(mlp(), simulated(sms)) for sms in (1, 2))
    waits = sum(map(len, alone.schedule.events.waits))
    assert plan_table.local_waits(alone) == waits > 0
    # Every task of down waits for the tiles of both SMs.
    assert plan_table.local_waits(two) == 0


PLACES = "a\n<!-- counts -->\nold\n<!-- end -->\nb\n<!-- costs -->\n<!-- end -->\n"


def test_tables_go_to_their_places() -> None:
    text = filled(PLACES, {"counts": "1\n2", "costs": "3"})
    assert text == (
        "a\n<!-- counts -->\n1\n2\n<!-- end -->\nb\n<!-- costs -->\n3\n<!-- end -->\n"
    )
    assert filled(text, {"costs": "3"}) == text
    with pytest.raises(ValueError, match="0 places for table 'times'"):
        filled(text, {"times": ""})
