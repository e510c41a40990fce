"""Every bad text is refused, and breaks if it runs all the same; its good twin runs.

A text starts with comments: what is wrong, then for a bad one

    # machine: what happens on the machine
    # verifier: part of the message of the verifier
    # simulator: part of the message when it runs without a proof, or `passes` for what
      the simulator does not have (README.md)
    # values: wrong, if results differ where races are not looked for
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mkdsl.errors import VerifyError
from mkdsl.lang.program import Program
from mkdsl.lower.ir import KernelPlan, Schedule
from mkdsl.lower.machine import simulated
from mkdsl.lower.parse import Parsed, parse
from mkdsl.lower.pipeline import finish
from mkdsl.lower.verify_stage import verify_stage
from mkdsl.runtime.interpret_program import run_program
from mkdsl.runtime.interpret_schedule import simulate
from tests.hazards import programs

FOLDER = Path(__file__).parent
NAMES = sorted(p.name.removesuffix(".bad.txt") for p in FOLDER.glob("*.bad.txt"))
MACHINE = simulated(2)
# Interleavings. A bad text breaks in one of MANY; a good one must run clean in a FEW.
MANY, FEW = range(40), range(6)
PASSES = "passes"
FIELD = re.compile(r"# (\w+): (.*)")


@dataclass(frozen=True)
class Case:
    """A text of this folder."""

    name: str
    fields: dict[str, str]
    stage: Parsed
    program: Program

    @property
    def inputs(self) -> list[np.ndarray]:
        return programs.inputs(self.program)


@functools.cache
def case(name: str, twin: str) -> Case:
    path = FOLDER / f"{name}.{twin}.txt"
    text = path.read_text()
    fields = dict(m.groups() for m in map(FIELD.fullmatch, text.splitlines()) if m)
    stage = parse(text, programs.tasks(), file=path.name)
    program = stage
    if isinstance(program, KernelPlan):
        program = program.schedule
    if isinstance(program, Schedule):
        program = program.events.graph.program
    assert isinstance(program, Program)
    return Case(name, fields, stage, programs.PROGRAMS[program.name])


def run(text: Case, seed: int, *, check_races: bool) -> list[np.ndarray]:
    """What the simulator makes of a text, proved or not."""
    plan = finish(text.stage, MACHINE)
    return simulate(plan, text.inputs, seed=seed, check_races=check_races)


def expected(text: Case) -> list[np.ndarray]:
    """The results of the program itself."""
    return [np.asarray(x) for x in run_program(text.program, text.inputs)]


def differ(found: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    """Whether some result differs: all are small sums, exact but for their rounding."""
    pairs = zip(found, wanted, strict=True)
    return not all(
        np.allclose(a.astype(np.float32), b.astype(np.float32), rtol=0.02, atol=0.05)
        for a, b in pairs
    )


def reports(text: Case, seeds: range) -> Iterator[str]:
    """What the simulator reports at each seed; "" where nothing is wrong."""
    wanted = expected(text)
    for seed in seeds:
        try:
            results = run(text, seed, check_races=True)
        except VerifyError as error:
            yield str(error)
        else:
            assert not differ(results, wanted)
            yield ""


@pytest.mark.parametrize("name", NAMES)
def test_the_bad_text_is_refused(name):
    bad = case(name, "bad")
    assert set(bad.fields) <= {"machine", "verifier", "simulator", "values"}
    with pytest.raises(VerifyError) as error:
        verify_stage(bad.stage, MACHINE)
    assert bad.fields["verifier"] in str(error.value), str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_the_bad_text_breaks_in_the_simulator(name):
    bad = case(name, "bad")
    wanted = bad.fields["simulator"]
    if wanted == PASSES:
        assert not any(reports(bad, FEW))
    else:
        assert any(wanted in report for report in reports(bad, MANY))


@pytest.mark.parametrize(
    "name", [n for n in NAMES if case(n, "bad").fields.get("values")]
)
def test_the_bad_text_gives_wrong_values(name):
    bad = case(name, "bad")
    assert bad.fields["values"] == "wrong"
    wanted = expected(bad)
    assert any(differ(run(bad, seed, check_races=False), wanted) for seed in MANY)


@pytest.mark.parametrize("name", NAMES)
def test_the_good_twin_is_proved_and_runs_clean(name):
    good = case(name, "good")
    verify_stage(good.stage, MACHINE)
    assert not any(reports(good, FEW))


@pytest.mark.parametrize("name", NAMES)
def test_the_twins_differ_in_few_lines(name):
    """What is wrong can be seen in a diff of the two texts."""
    texts = [(FOLDER / f"{name}.{twin}.txt").read_text() for twin in ("bad", "good")]
    bad, good = ([s for s in t.splitlines() if s[0] != "#"] for t in texts)
    changed = set(bad) ^ set(good)
    assert len(changed) <= 12, changed


def row(name: str) -> str:
    """What README.md says of a hazard: what its text says."""
    bad = case(name, "bad")
    what = (FOLDER / f"{name}.bad.txt").read_text().splitlines()[0].removeprefix("# ")
    seen = bad.fields["simulator"]
    shown = "deadlock" if "waits for" in seen else "race"
    shown = {PASSES: "does not show it"}.get(seen, shown)
    if isinstance(bad.stage, Program):
        shown = "no plan"
    fields = bad.fields
    return (
        f"| `{name}` | {what} {fields['machine']} | {fields['verifier']} | {shown} |\n"
    )


def test_the_table_says_what_the_texts_say():
    found = re.findall(r"^\| `.*\n", (FOLDER / "README.md").read_text(), re.M)
    wanted = [row(name) for name in NAMES]
    assert found == wanted, "the table of README.md should be\n" + "".join(wanted)
