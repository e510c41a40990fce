"""No committed text names a package registry's host or a path of one machine.

A host in a file breaks for everyone behind a mirror, which package clients know how to
reach by themselves; an absolute path of a work place means nothing elsewhere.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Written so that this file does not hold what it looks for.
HOST = re.compile(
    r"\b(?:pypi|registry\.npmjs|registry\.yarnpkg|crates|rubygems)[.](?:org|com|io)\b"
    r"|\b(?:files[.])?pythonhosted[.]org\b"
    r"|\b(?:deb|security|ftp)[.]debian[.]org\b"
    r"|\barchive[.]ubuntu[.]com\b"
    r"|\bproxy[.]golang[.]org\b"
    r"|\bconda[.]anaconda[.]org\b",
    re.IGNORECASE,
)
WORK_PATH = re.compile(r"(?<![\w.~}/-])/(?:work|farm|root|tmp/w)/")
RULES = (
    (HOST, "names the host of a package registry: name the package alone"),
    (WORK_PATH, "names a path of one machine: use one relative to the repository"),
)


def tracked_files() -> list[Path]:
    """Files that are committed or could be: what git neither ignores nor lacks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: what is committed is not known")
    return [
        path for name in listed.stdout.split("\0") if (path := ROOT / name).is_file()
    ]


def faults_in(text: str) -> Iterator[tuple[int, str]]:
    """(line, fault) of each offence."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, fault in RULES:
            if found := pattern.search(line):
                yield number, f"{found.group()!r} {fault}"


def read_text(path: Path) -> str:
    """The text of a file, or nothing where it is binary."""
    content = path.read_bytes()
    return "" if b"\0" in content[:8192] else content.decode(errors="replace")


def test_no_registry_host_and_no_path_of_one_machine():
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in tracked_files()
        for line, fault in faults_in(read_text(path))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    [
        "pip install -i https://py" + "pi.org/simple x",
        "https://files.python" + "hosted.org/packages/x.whl",
        "resolved https://registry.npm" + "js.org/x",
        "see /wo" + "rk/shared/notes.md",
        '"file": "/ro' + 'ot/x.py"',
    ],
)
def test_offence_is_found(text):
    assert [line for line, _ in faults_in("first\n" + text)] == [2]


@pytest.mark.parametrize(
    "text",
    [
        "pip install x",
        "docs/work/notes.md",
        "the work/rest balance",
        "/tmp/x",
        "crates",
    ],
)
def test_harmless_text_passes(text):
    assert not list(faults_in(text))
