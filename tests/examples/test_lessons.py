"""Every lesson runs, checks its own result, and prints what the tutorial shows."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mkdsl as mk
from examples import lesson_05_first_quarter as first_quarter
from examples import lesson_06_page_pipeline as page_pipeline
from examples import lesson_10_read_a_timeline as read_a_timeline
from mkdsl.lower.machine import H200
from tests.lower.emit.lowered import kernels

FOLDER = Path(__file__).resolve().parents[2] / "examples"
LESSONS = sorted(p.stem for p in FOLDER.glob("lesson_*.py"))
# What each prints: (pattern, how often). Errors are held by `largest`.
SHOWS: dict[str, list[tuple[str, int]]] = {
    "01": [(r"jitted one: \[0 2 4 6\]", 1), (r"gives the same: True", 1)],
    "02": [(r"right: True", 1), (r"wait e0>=1 resident", 2), (r"  sm 1\n +t1", 1)],
    "03": [(r"w\[64\*g0 :\+ 64, 0 :\+ 1024\]", 1), (r"t3 project .*pid \(3\)", 1)],
    "04": [(r"needs d0 resident RAW\n", 2), (r"wait e0>=4 resident", 1)],
    "05": [(r"wait e\d>=4 ", 4), (r"wait e0>=16 ", 1), (r"us, before the", 1)],
    "06": [(r"^   [2346] .* us$", 4), (r"SM 0 weight loader", 2)],
    "07": [(r"orders of the roles: 1$", 1)],
    "08": [(r"attend partial", 4), (r"attend combine", 2), (r"traced 1 time", 1)],
    "09": [(r"plain JAX: True", 1), (r"traced 1 time", 1), (r"it wrote: 2", 1)],
    "10": [(r"critical path: 7 tasks, 3 hand-offs", 1), (r"SM 3 waited longest", 1)],
}
LARGEST = 0.02


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Lesson: (its program, arguments).
PROGRAMS: dict[str, tuple[str, list[Any]]] = {
    "01_one_task": ("program", [bf16(1, 128)]),
    "02_two_tasks_and_an_event": ("program", [bf16(1, 128)]),
    "03_tiled_matvec": ("matvec", [bf16(1, 1024), bf16(200, 1024)]),
    "04_every_stage": ("mlp", [bf16(4, 256), bf16(256, 256), bf16(256, 256)]),
    "05_first_quarter": ("mlp", [bf16(1, 256), bf16(1024, 256), bf16(256, 1024)]),
    "06_page_pipeline": ("mlp", [bf16(1, 256), bf16(1024, 256), bf16(256, 1024)]),
    "07_mlp_block": (
        "block",
        [
            bf16(2, 256),
            {n: bf16(704, 256) for n in ("gate", "up")}
            | {"gain": bf16(256), "down": bf16(256, 704)},
        ],
    ),
    "08_attention": (
        "program",
        [bf16(2, 4, 64), bf16(2, 2048, 64), bf16(2, 2048, 64), int32(1)],
    ),
    "09_decode_in_jit": (
        "step",
        [
            {n: bf16(192, 64) for n in ("embed", "head", "qkv")},
            {n: bf16(2, 128, 64) for n in "kv"} | {"lengths": int32(2)},
            int32(2),
        ],
    ),
    "10_read_a_timeline": (
        "program",
        [bf16(1, 256), {"up": bf16(2, 320, 256), "down": bf16(2, 256, 320)}],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_and_shows_what_it_is_about(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module(f"examples.{name}").main()
    printed = capsys.readouterr().out
    for pattern, count in SHOWS[name.split("_")[1]]:
        found = len(re.findall(pattern, printed, re.M))
        assert found == count, f"{pattern!r}: {found} times in\n{printed}"
    errors = re.findall(r"largest error.*?(\d\.\d+)", printed)
    assert all(float(e) < LARGEST for e in errors), errors


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_of_a_lesson_lowers_to_one_kernel(name: str) -> None:
    function, arguments = PROGRAMS[name]
    program = getattr(importlib.import_module(f"examples.lesson_{name}"), function)
    step = mk.megakernel(program, implementation="mosaic_gpu", machine=H200)
    lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert len(list(kernels(lowered))) == 1


def test_lessons_are_numbered_without_a_gap() -> None:
    assert [n.split("_")[1] for n in LESSONS] == sorted(SHOWS)
    assert [n.removeprefix("lesson_") for n in LESSONS] == sorted(PROGRAMS)


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_says_how_to_run_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert text.startswith(f'"""Lesson {int(name.split("_")[1])}: ')
    assert f"python examples/{name}.py" in text


def test_the_first_quarter_is_read_before_the_last_is_written() -> None:
    ends: list[int] = []
    for coarse in (False, True):
        _, timeline, _ = first_quarter.timed(first_quarter.plan_options(2, coarse))
        produced = max(r.signalled_ns for r in timeline.runs if r.call == "hidden")
        landed = [r.landed_ns for r in timeline.runs if r.call == "down"]
        assert len(landed) == 4
        assert all((at < produced) != coarse for at in landed)
        ends.append(timeline.end_ns)
    # The pages of three quarters are used, and so freed, while SMs would wait.
    assert ends[0] < 0.85 * ends[1]


def test_the_loader_runs_ahead_of_the_wait_and_a_larger_ring_hides_it() -> None:
    timelines = {ring: page_pipeline.timed(ring)[1] for ring in (2, 4)}
    for timeline in timelines.values():
        for run in timeline.runs:
            if run.call == "down":
                asked = [
                    s.start_ns
                    for s in timeline.spans
                    if (s.role, s.task) == ("weight loader", run.task)
                ]
                assert min(asked) < run.waited_ns - 5000
    assert timelines[4].end_ns < 0.85 * timelines[2].end_ns


@pytest.mark.slow
def test_the_timeline_is_written_as_a_trace(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.json"
    read_a_timeline.main(str(path))
    assert f"wrote {path}" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(5))
