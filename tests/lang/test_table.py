"""docs/primitives.md is the published table, word for word."""

import re
from pathlib import Path

import pytest

from mkdsl.lang import table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "primitives.md"


def section(name: str) -> str:
    """The text between a marker and the next one."""
    found = re.search(
        rf"<!-- table: {name} -->(.*?)<!-- table:", DOCS.read_text(), re.S
    )
    assert found
    return found[1]


@pytest.mark.parametrize("name", ["elementwise", "renames", "reductions", "others"])
def test_primitives(name: str) -> None:
    listed = " ".join(section(name).split("**:")[1].split())
    assert listed == ", ".join(sorted(getattr(table, name.upper())))


def test_remedies() -> None:
    rows = [line.strip("| ").split(" | ") for line in section("remedies").split("\n")]
    listed = {row[0]: row[1] for row in rows[3:] if len(row) == 2}
    assert listed == table.REMEDY


def test_nothing_is_supported_and_not() -> None:
    # A transpose is supported of streams alone.
    assert table.PRIMITIVES & table.REMEDY.keys() == {"transpose"}
