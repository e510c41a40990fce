"""A file of the package or of the models stays small enough to be read in one go."""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400


def over_budget(files: Iterable[tuple[str, int]]) -> list[str]:
    """One line for each (name, lines) over the budget."""
    return [
        f"{name} has {lines} lines, {lines - MAX_LINES} over the budget of {MAX_LINES}"
        for name, lines in files
        if lines > MAX_LINES
    ]


def lines_of(*folders: str) -> Iterable[tuple[str, int]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), len(path.read_text().splitlines())


def test_every_file_is_within_its_budget():
    faults = over_budget(lines_of("mkdsl", "models"))
    assert not faults, (
        "\n".join(faults)
        + "\nDoes the file hold more than one idea? Move one to a file of its own. If"
        " one idea needs the room, write a page in docs/decisions/ and raise the budget"
        " in this test in the same commit."
    )


def test_a_file_of_the_budget_passes_and_one_line_more_does_not():
    assert over_budget([("a.py", MAX_LINES)]) == []
    (fault,) = over_budget([("a.py", MAX_LINES), ("b.py", MAX_LINES + 1)])
    assert fault.startswith("b.py has 401 lines, 1 over")
