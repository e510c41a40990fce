"""The text of every stage: golden for one program, and what the grammar promises."""

from dataclasses import replace

import pytest

from mkdsl.errors import SrcInfo
from mkdsl.lang.expr import read, var
from mkdsl.lang.program import Access, Axis
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import STAGES, Options, run_passes
from mkdsl.lower.text import access_text, print_program
from mkdsl.lower.text_schedule import ranges_text
from tests.lower import programs

SMALL = programs.mlp(b=4, d=256, i=128)


def stage_text(name: str) -> str:
    options = Options(DecomposeOptions(splits=(("down", 1), ("gate_up", 1))))
    stages = run_passes(SMALL, simulated(2), options)
    return next(s.as_text() for s in stages if s.name == name)


@pytest.mark.parametrize("stage", STAGES)
def test_mlp(stage, golden):
    golden(stage_text(stage))


def test_attention_program(golden):
    golden(print_program(programs.attention(window=256)))


def test_scan_program(golden):
    golden(print_program(programs.two_layers(length=4, variants=2)))


@pytest.mark.parametrize("stage", STAGES)
def test_text_is_deterministic(stage):
    assert stage_text(stage) == stage_text(stage)


def test_text_does_not_show_the_users_lines():
    moved = tuple(replace(b, src=SrcInfo("x.py", 1)) for b in SMALL.buffers)
    assert print_program(replace(SMALL, buffers=moved)) == print_program(SMALL)


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (Axis(var("g0"), 1, squeezed=True), "g0"),
        (Axis(var("g0") * 64, 64), "64*g0 :+ 64"),
        (Axis(var("g0"), 2, squeezed=True), "g0 :+ 2 dropped"),
        (Axis(0 * var("g0"), 64, extent=read("n", 0)), "0 :+ 64 upto n[0]"),
    ],
)
def test_axis(axis, text):
    assert access_text(Access("x", (99,), (axis,)), {"x": (99,)}) == f"x[{text}]"


def test_a_view_is_shown():
    axes = (Axis(var("g0"), 1, squeezed=True), Axis(0 * var("g0"), 4))
    text = access_text(Access("x", (2, 4), axes), {"x": (8,)})
    assert text == "x as [2, 4][g0, 0 :+ 4]"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ((), ""),
        ((3,), "t3"),
        ((1, 2), "t1..t2"),
        ((0, 1, 2, 5, 7, 8), "t0..t2, t5, t7..t8"),
    ],
)
def test_ranges(ids, text):
    assert ranges_text(ids) == text
