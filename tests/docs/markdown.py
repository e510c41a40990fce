"""Code blocks of Markdown files, and how they are run.

    ```python    run in order, all blocks of a file in one namespace
    ```output    what the python block right before it prints
    ```console   `$ python ..` is run in the root; what follows is what it prints
    ```text      shown, not run: an excerpt, a picture

`...` in an output stands for anything. A block whose first line is `# examples/x.py` is
an excerpt of that file. `<!-- not run: reason -->` right before a block says that it is
not run, and why.
"""

import contextlib
import doctest
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("python", "output", "console", "text")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->\n$")
EXCERPT = re.compile(r"# (examples/\S+\.py)\n")
LIMIT_S = 300


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of code, from 1.
        reason: why it is not run, or "".
    """

    language: str
    code: str
    line: int
    reason: str = ""


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a file in order."""
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        reason = NOT_RUN.search(before)
        line = before.count("\n") + 2
        yield Block(found[1], found[2], line, reason[1] if reason else "")


def run_blocks(path: Path) -> None:
    """Run the blocks of a file.

    Raises:
        AssertionError: an output is another than the file says.
    """
    names: dict[str, Any] = {"__name__": "__docs__"}
    printed = ""
    for block in blocks_of(path.read_text()):
        where = f"{path.relative_to(ROOT)}:{block.line}"
        if block.reason:
            continue
        if block.language == "python":
            printed = _python(block, names, path)
        elif block.language == "output":
            _compare(block.code, printed, where)
        elif block.language == "console":
            _console(block, where)


def _python(block: Block, names: dict[str, Any], path: Path) -> str:
    excerpt = EXCERPT.match(block.code)
    if excerpt:
        body = block.code[excerpt.end() :].strip()
        source = (ROOT / excerpt[1]).read_text()
        assert body in source, f"{path}:{block.line} is not in {excerpt[1]}:\n{body}"
    # Lines are those of the file, for tracebacks.
    code = "\n" * (block.line - 1) + block.code
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        exec(compile(code, str(path), "exec"), names)
    return stream.getvalue()


def _console(block: Block, where: str) -> None:
    """Each command of a block, and what it prints."""
    for part in re.split(r"^\$ ", block.code, flags=re.M)[1:]:
        command, _, wanted = part.partition("\n")
        words = command.split(" #")[0].split()
        assert words[0] == "python", f"{where}: {command!r} cannot be run here"
        found = _script(words[1:]) if words[1].endswith(".py") else _command(words[1:])
        if wanted.strip():
            _compare(wanted, found, where)


def _script(words: list[str]) -> str:
    """What a script of this repository prints, run here: imports are there already."""
    stream, path, argv = io.StringIO(), sys.path[:], sys.argv
    sys.argv, sys.path[0:0] = words, [str((ROOT / words[0]).parent)]
    try:
        with contextlib.redirect_stdout(stream):
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{words} ends with {end.code}") from end
    finally:
        sys.argv, sys.path[:] = argv, path
    return stream.getvalue()


def _command(words: list[str]) -> str:
    """What `python ..` prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stderr}"
    return done.stdout


def _compare(wanted: str, found: str, where: str) -> None:
    wanted, found = (
        "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
        for text in (wanted, found)
    )
    same = doctest.OutputChecker().check_output(wanted, found, doctest.ELLIPSIS)
    assert same, f"{where} shows\n{wanted}\nbut this is printed:\n{found}"
