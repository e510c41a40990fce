"""docs/api.md is what the docstrings say today, and has every public name."""

import mkdsl as mk
from docs import api


def test_the_page_is_current() -> None:
    said = "docs/api.md is old: run `python -m docs.api --write`"
    assert api.PAGE.read_text() == api.page(), said


def test_every_public_name_is_in_one_group() -> None:
    names = [name for group in api.GROUPS.values() for name in group]
    assert sorted(names) == sorted(mk.__all__)


def test_an_entry_has_signature_and_docstring() -> None:
    page = api.page()
    assert "### mk.dot\n\n```text\nmk.dot(x, w)\n\nx @ w.T with float32" in page
    assert "### Lowered.as_text\n" in page
    assert "### mk.whole\n\n```text\nThe spec of an operand that every" in page
    # A page is the same wherever it is made.
    assert str(api.ROOT) not in page
    assert " at 0x" not in page
