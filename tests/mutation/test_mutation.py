"""A few hundred mutants in every run; docs/mutation.md has some thousands."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from mkdsl.lower.ir import GATES
from mkdsl.runtime.interpret_program import run_program
from tests.mutation import __main__ as command
from tests.mutation.bases import PROGRAMS, base, bases, program_of
from tests.mutation.edits import Mutant
from tests.mutation.judge import breaks, judge, mutants, refusal
from tests.mutation.mutants import MUTATIONS, drop_wait

pytestmark = pytest.mark.slow


def test_no_mutant_that_is_accepted_can_be_broken():
    counts = judge(500, try_one_in=10)
    assert [line for c in counts.values() for line in c.false_accepts] == []
    # The test is worth something: both happen, and the simulator breaks what it can.
    assert sum(c.accepted for c in counts.values()) > 50
    assert all(c.rejected for c in counts.values())
    assert sum(c.broken for c in counts.values()) > 10


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_mutated_is_right_itself(name):
    one = base(name, 2, "elided")
    assert refusal(Mutant(one.plan), one.machine) == ""
    assert breaks(one.plan, one.inputs, one.expected, seeds=3) == ""
    for found, want in zip(
        one.expected, run_program(program_of(name), one.inputs), strict=True
    ):
        pair = (np.asarray(a).astype(np.float32) for a in (found, want))
        np.testing.assert_allclose(*pair, atol=0.03)


def test_bases_have_every_sort_of_wait():
    """Waits at both gates, between SMs and on one; two modes of kinds; an append."""
    every = list(bases())
    waits = [w for b in every for of in b.plan.schedule.events.waits for w in of]
    assert {w.gate for w in waits} == set(GATES)
    kinds = [k for b in every for k in b.plan.schedule.events.graph.kinds]
    assert {k.mode for k in kinds} == {"full", "partial", "combine"}
    assert {len(b.plan.schedule.queues) for b in every} == {1, 2, 3, 4, 5}
    whys = {
        n.why for b in every for ns in b.plan.schedule.events.graph.needs for n in ns
    }
    assert whys == {"RAW", "WAR", "WAW"}


def test_a_dropped_wait_is_refused_and_broken():
    one = base("layer", 2, "elided")
    mutant = drop_wait(one, Random(0))
    assert mutant is not None
    assert "race" in refusal(mutant, one.machine)
    assert "race" in breaks(mutant.plan, one.inputs, one.expected)


def test_other_values_and_errors_count_as_broken():
    one = base("bump", 2, "elided")
    other = (one.expected[0] + np.ones_like(one.expected[0]), *one.expected[1:])
    assert "output 0 has other values" in breaks(one.plan, one.inputs, other)
    broken = Mutant(replace(one.plan, kinds=()))
    assert "0 sizes for 2 kinds" in refusal(broken, one.machine)
    queues = (*one.plan.schedule.queues, (7,))
    lost = replace(one.plan, schedule=replace(one.plan.schedule, queues=queues))
    assert "seed 0: IndexError" in breaks(lost, one.inputs, None)


def test_mutants_are_the_same_every_time_and_of_every_kind():
    some = [(kind, m.plan) for kind, _, m in mutants(100)]
    assert some == [(kind, m.plan) for kind, _, m in mutants(100)]
    assert {kind for kind, _ in some} == set(MUTATIONS)


def test_the_command_writes_its_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mutation.md"
    argv = ["mutation", "--count", "16", "--try-one-in", "8", "--write", str(path)]
    monkeypatch.setattr("sys.argv", argv)
    assert command.main() == 0
    text = path.read_text()
    assert "16 mutants" in text
    assert "**0 false accepts**" in text
    assert "| drop wait | 1 |" in text
    assert "| **all** | 16 |" in text
    assert text in capsys.readouterr().out
