"""The table of README.md in this folder names tests that exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("README.md")
NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """The cells of every row: number, fault, tests, tests on a card."""
    lines = [x for x in TABLE.read_text().splitlines() if re.match(r"\| \d", x)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@functools.cache
def cases_of(file: str) -> dict[str, bool]:
    """The tests of a file, and whether each of them may run on a card."""
    tree = ast.parse((TESTS / file).read_text())
    # Decorators that a file gives a name: `everywhere = pytest.mark.parametrize(..)`.
    named = {
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if "mark.gpu" in ast.unparse(node.value)
    }
    marked = {
        node.name: any(
            "mark.gpu" in (text := ast.unparse(d)) or text in named
            for d in node.decorator_list
        )
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    return {name: gpu for name, gpu in marked.items() if name.startswith("test_")}


def test_kinds_are_numbered() -> None:
    assert [cells[0] for cells in rows()] == [str(i) for i in range(1, 23)]


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0])
def test_every_test_exists(cells: list[str]) -> None:
    number, _, here, on_a_card = cells
    for column, needs_card in ((here, False), (on_a_card, True)):
        names = NAME.findall(column)
        assert names, f"kind {number} has no test"
        for file, name in names:
            assert name in cases_of(file), f"kind {number}: {file} has no {name}"
            if needs_card:
                assert cases_of(file)[name], f"kind {number}: {name} is not marked gpu"


def test_marks_of_tests_are_read_right() -> None:
    found = cases_of("gpu/test_models_gpu.py")
    assert found["test_unused_slots_may_hold_nan"]
    assert not found["test_the_loop_lowers_for_cuda"]
