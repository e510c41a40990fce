"""The words that a kernel gets are read back and compared before it is built."""

from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lower import proof
from mkdsl.lower.emit import kernel
from mkdsl.lower.encode import SIGNAL, encode
from tests.runtime.small_programs import bump, plan_of


def test_words_that_do_not_say_what_the_plan_says_are_not_launched(monkeypatch):
    plan = plan_of(bump(256), 1)
    good = encode(plan)
    assert kernel.Launcher(plan).encoded == good
    (words,) = good.words
    bad = (*words[:SIGNAL], words[SIGNAL] + 1, *words[SIGNAL + 1 :])
    monkeypatch.setattr(proof, "encode", lambda plan: replace(good, words=(bad,)))
    with pytest.raises(VerifyError, match="SM 0, instruction 0: signal"):
        kernel.Launcher(plan)
