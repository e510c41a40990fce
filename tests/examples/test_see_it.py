"""The pictures of the documents: one command makes them, and they stay small."""

import re
from pathlib import Path

import pytest

from examples import see_it

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 200_000
PNG = b"\x89PNG\r\n\x1a\n"
LINK = re.compile(r"!\[[^]]+\]\(([^)]+)\)")


def linked() -> set[Path]:
    """The pictures that documents show."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {
        (page.parent / name).resolve()
        for page in pages
        for name in LINK.findall(page.read_text())
    }


def test_pictures_are_there_and_small_and_shown() -> None:
    there = set(see_it.FOLDER.iterdir())
    assert linked() == there
    for path in there:
        content = path.read_bytes()
        assert content.startswith(PNG)
        assert len(content) <= MOST_BYTES, f"{path.name} is larger than {MOST_BYTES}"


def test_the_times_of_the_page_are_those_of_the_small_program() -> None:
    (_, coarse), (_, fine) = see_it.small_timelines()
    times = [f"{t.end_ns / 1e3:.1f}" for t in (coarse, fine)]
    page = " ".join((ROOT / "docs" / "see_it.md").read_text().split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{times[1]} us instead of {times[0]}" in page
    assert f"slowest ({times[0]} us)" in readme
    assert f"itself alone ({times[1]} us)" in readme


@pytest.mark.slow
def test_one_command_makes_them(tmp_path: Path) -> None:
    see_it.main(tmp_path)
    made = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(made) == {p.name for p in see_it.FOLDER.iterdir()}
    for content in made.values():
        assert content.startswith(PNG)
        assert len(content) <= MOST_BYTES
