"""Timelines as text."""

import pytest

from mkdsl.runtime.timeline import Span, TaskRun, Timeline
from mkdsl.runtime.timeline_text import chart

RUN = TaskRun(0, "t", "t", 0, 0, 0, 0, 0, 0, 10_000, None, None, None)


def timeline(*spans: Span) -> Timeline:
    """One SM, 10 us."""
    return Timeline("p", "by hand", 1, (RUN,), spans)


def row(text: str) -> str:
    return text.splitlines()[0].removeprefix("SM 0 consumer  ")


def test_a_cell_has_the_letter_of_what_took_most_of_it() -> None:
    made = timeline(
        Span(0, "consumer", 0, "wait", 0, 3_000, 7),
        Span(0, "consumer", 0, "load", 3_000, 5_600),
        Span(0, "consumer", 0, "compute", 5_600, 7_000),
        Span(0, "storer", 0, "store", 0, 10_000),
    )
    text = chart(made, width=20, roles=("consumer",))
    # Of the cell from 5.5 to 6 us, most is compute.
    assert row(text) == "wwwwwwlllllccc......"
    axis, meaning = text.splitlines()[1:]
    assert axis.split() == ["0", "us", "10.0", "us"]
    assert axis.endswith("10.0 us")
    assert len(axis) == len(text.splitlines()[0])
    for cause in ("wait", "load", "compute", "store"):
        assert f"{cause[0]} {cause}" in meaning


def test_all_roles_by_default_and_a_common_end() -> None:
    text = chart(timeline(Span(0, "consumer", 0, "load", 0, 10_000)), end_ns=20_000)
    names = [line.split("  ")[0] for line in text.splitlines()[:4]]
    assert names == [f"SM 0 {r} loader" for r in ("weight", "activation")] + [
        "SM 0 consumer",
        "SM 0 storer",
    ]
    assert "l" * 32 + "." * 32 in text
    assert "20.0 us" in text


@pytest.mark.parametrize("width", [1, 5])
def test_shorter_spans_than_a_cell_are_summed(width: int) -> None:
    spans = [
        Span(0, "consumer", 0, "compute", at, at + 800) for at in range(0, 10_000, 1000)
    ]
    assert row(chart(timeline(*spans), width=width, roles=("consumer",))) == "c" * width
