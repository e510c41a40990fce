"""Every error that a user can cause has a line, a remedy, and a test of its words.

Read from the syntax tree of mkdsl/lang, where programs and tasks are refused.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER_ERRORS = {"TraceError", "PlanError"}
# Raising helpers: what they take in place of (what, src, hint).
REFUSE = "refuse"
# Shorter pieces of text are in every test by chance.
FEWEST_LETTERS = 9


def raises(path: Path) -> Iterator[tuple[int, ast.Call]]:
    """The calls of user errors in a file, and their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            if name in USER_ERRORS or name == REFUSE:
                yield node.lineno, node


def pieces(node: ast.expr) -> list[str]:
    """The constant text of a message, without its values."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    found = [p.value for p in parts if isinstance(p, ast.Constant)]
    return [str(p).strip() for p in found]


def arguments(node: ast.Call) -> set[str]:
    names = ("what", "src", "hint")[: len(node.args)]
    return {*names, *(k.arg for k in node.keywords if k.arg)}


def sources() -> list[Path]:
    return sorted((ROOT / "mkdsl" / "lang").glob("*.py"))


def words_of_tests() -> str:
    """All text in the tests of messages, without quotes and line breaks."""
    files = [*(ROOT / "tests" / "lang").glob("*.py")]
    files += [*(ROOT / "tests" / "runtime").glob("test_*.py")]
    literals = [
        str(node.value)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(literals).replace("\\", "")


def words_of(message: str) -> list[str]:
    """Runs of three words: a test of a message has one of them."""
    words = re.findall(r"[\w.'<>/-]+", message)
    return [" ".join(words[i : i + 3]) for i in range(len(words) - 2)] or [
        " ".join(words)
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.name)
def test_errors_have_a_line_and_a_remedy(path: Path) -> None:
    for line, node in raises(path):
        # `refuse(equation, why, hint)` knows the line.
        missing = {"what", "src", "hint"} - arguments(node)
        assert not missing, (
            f"{path.name}:{line}: an error without {', '.join(sorted(missing))}: say "
            "what was wrong, where the user wrote it, and what to change"
        )


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.name)
def test_errors_have_a_test_of_their_words(path: Path) -> None:
    tested = re.sub(r"[^\w.'<>/-]+", " ", words_of_tests())
    for line, node in raises(path):
        index = 1 if ast.unparse(node.func).endswith(REFUSE) else 0
        texts = [t for t in pieces(node.args[index]) if len(t) >= FEWEST_LETTERS]
        if not texts:
            continue
        runs = [run for text in texts for run in words_of(text)]
        assert any(run in tested for run in runs), (
            f"{path.name}:{line}: no test in tests/lang or tests/runtime matches "
            f"{max(texts, key=len)!r}: add a case to tests/lang/test_errors.py"
        )
