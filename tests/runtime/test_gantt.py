"""Pictures of timelines are written, legible by their text, and the same each time."""

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from mkdsl.errors import LaunchError
from mkdsl.lower.machine import simulated
from mkdsl.runtime.gantt import MEANING, MOST_WITH_ROLES, draw_timelines
from mkdsl.runtime.timeline import Timeline, from_stamps
from mkdsl.runtime.virtual_time import simulate_stamps
from tests.runtime.small_programs import decode, plan_of

PNG = b"\x89PNG\r\n\x1a\n"


def timeline_of(sms: int) -> Timeline:
    plan = plan_of(decode(), sms=sms)
    stamps = simulate_stamps(plan, simulated(sms), {"lengths": 100})
    return from_stamps(plan, stamps, "simulator")


def texts(svg: Path) -> list[str]:
    """What matplotlib wrote beside the outlines of its letters."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


@pytest.mark.slow
def test_two_runs_below_each_other(tmp_path: Path) -> None:
    path = tmp_path / "two.svg"
    one = timeline_of(2)
    draw_timelines([("coarse", one), ("fine", one)], path)
    found = texts(path)
    for title in ("coarse", "fine"):
        assert f"{title}: {one.end_ns / 1e3:.1f} us" in found
    assert found.count("activation loader, SM 1") == 2
    assert {*MEANING.values(), "critical path"} <= set(found)
    again = tmp_path / "again.svg"
    draw_timelines([("coarse", one), ("fine", one)], again)
    assert again.read_bytes() == path.read_bytes()


def test_many_sms_have_a_row_each_and_a_window_cuts(tmp_path: Path) -> None:
    path = tmp_path / "many.svg"
    draw_timelines([("many", timeline_of(MOST_WITH_ROLES + 1))], path, (1.0, 2.0))
    found = texts(path)
    assert "SM (its consumer)" in found
    assert "activation loader, SM 1" not in found
    numbers = {float(t) for t in found if re.fullmatch(r"\d\.\d", t)}
    assert min(numbers) == 1.0
    assert max(numbers) == 2.0


def test_a_png(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    draw_timelines([("one", timeline_of(1))], path)
    assert path.read_bytes().startswith(PNG)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LaunchError, match="pictures need matplotlib") as error:
        draw_timelines([("one", timeline_of(1))], tmp_path / "one.png")
    assert "mkdsl[pictures]" in error.value.hint
