"""Every exercise is refused with words that teach; every answer is proved and right."""

import re
from pathlib import Path

import pytest

from examples.exercises import ring_by_hand, run
from mkdsl.lower.pipeline import run_passes

pytestmark = pytest.mark.slow

NUMBERS = sorted(run.EXERCISES)
# What the verifier says, what it says to do, and what happens without it.
WORDS = {
    1: (
        r"race: task t2 'z' .* reads y\[.*, of which task t0 'y'",
        r"let t2 'wait e0>=2 resident'",
        r"race: task 'z' .* reads y",
    ),
    2: (
        r"deadlock: a circle of 2 waits",
        r"put into each queue what others wait for before what waits",
        r"deadlock: 6 roles wait",
    ),
    3: (
        r"waits for 1 of 2 signals: any of them may come first",
        r"let t2 wait for e0>=2, or give the tasks that it needs an event",
        r"race: task 'z' .* reads y",
    ),
    4: (
        r"the loader of its stream operands does not wait for that task",
        r"let t2 'wait e0>=1 stream': .* nor a wait of the other loader",
        r"weight loader of SM 1, reads v",
    ),
    5: (
        r"one more would be written over a page that is in use",
        r"loads in flight need a slot each",
        r"ring_by_hand.py",
    ),
    6: (
        r"race: task t1 's2' .* writes s\[.*, of which task t0 'y'",
        r"let t1 'wait e0>=1 resident'",
        r"race: task 's2' .*, writes s",
    ),
}


def text(number: int, answer: bool = False) -> str:
    return run.path(number, answer).read_text()


def body(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_error_teaches(number: int) -> None:
    said, remedy, happened = WORDS[number]
    wrong = run.wrong(number, text(number))
    assert re.search(said, wrong), wrong
    assert re.search(remedy, wrong), wrong
    assert re.search(happened, run.happens(number, text(number)))


@pytest.mark.parametrize("number", NUMBERS)
def test_the_answer_is_proved_and_right(number: int) -> None:
    assert run.wrong(number, text(number, answer=True)) == ""
    assert len(set(body(text(number))) ^ set(body(text(number, True)))) <= 2


@pytest.mark.parametrize("number", NUMBERS)
def test_the_texts_are_those_of_the_programs_of_today(number: int) -> None:
    program = run.program(run.EXERCISES[number][1])
    stages = {s.name: s.as_text() for s in run_passes(program, run.MACHINE)}
    lines = body(text(number, answer=True))
    stage = {"schedule": "elided", "plan": "pages"}[lines[0]]
    # Who runs which task may be arranged by hand.
    assert sorted(lines) == sorted(stages[stage].splitlines())


def test_every_text_belongs_to_an_exercise() -> None:
    texts = {run.path(n, a) for n in NUMBERS for a in (False, True)}
    assert texts == set(run.FOLDER.glob("*.txt"))


def test_results_that_are_wrong_are_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run.mk, "replay", lambda *_, **__: [0])
    assert "the results are wrong in order 0" in run.wrong(1, text(1))


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(NUMBERS)


def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run.main(["3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Exercise 3: z does wait for e0.")
    assert "The verifier says:" in shown
    assert "If it ran all the same:" in shown
    assert run.main(["3", "--answer"]) == 0
    assert "The fixed text: proved, right in 6 orders" in capsys.readouterr().out
    mine = tmp_path / "mine.txt"
    mine.write_text(text(3))
    assert run.main(["3", str(mine)]) == 1
    assert "any of them may come first" in capsys.readouterr().out
    mine.write_text(text(3).replace("e0>=1", "e0>=2"))
    assert run.main(["3", str(mine)]) == 0
    assert capsys.readouterr().out.startswith("right: proved")


def test_the_ring_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    ring_by_hand.main([])
    assert "is filled again before it was freed" in capsys.readouterr().out
    ring_by_hand.main(["--answer"])
    assert capsys.readouterr().out.count("right") == 6
