"""Code blocks of the documents run and print what they show; links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import LANGUAGES, ROOT, blocks_of, run_blocks

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
FILES = sorted(FILES)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
# A line of code that is indented and not fenced, after an empty line and outside lists.
INDENTED = re.compile(r"(?<=\n\n)(?: {4}|\t)\S.*")
files = pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)


@pytest.mark.slow
@files
def test_blocks_run_and_print_what_is_shown(path: Path) -> None:
    run_blocks(path)


@files
def test_blocks_have_a_known_language(path: Path) -> None:
    text = path.read_text()
    for block in blocks_of(text):
        assert block.language in LANGUAGES, f"line {block.line}: {block.language!r}"
    fences = re.findall(r"^ *```", text, re.M)
    assert len(fences) == 2 * len(list(blocks_of(text))), "a fence is not closed"


@files
def test_code_is_fenced(path: Path) -> None:
    """An indented block is not run, and so it may be wrong."""
    found = INDENTED.findall(
        re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    )
    assert not found, f"fence these, with a language of {LANGUAGES}: {found}"


@pytest.mark.parametrize(
    "path", sorted({*FILES, *ROOT.glob("docs/**/*.md")}), ids=lambda p: p.name
)
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        file = path.parent / target
        assert file.exists(), f"{path.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor[1:] in anchors(file), f"{path.name}: {target} has no {anchor}"


def anchors(path: Path) -> set[str]:
    """Names of the headings of a file, as links name them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


# The rules themselves.


def write(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.docs.markdown.ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("shown", ["5", "...", "a 5"])
def test_an_output_is_compared(page: Path, shown: str) -> None:
    blocks = ("python", "x = 2"), ("python", "print(x + 3)"), ("output", shown)
    text = "".join(f"```{language}\n{code}\n```\n" for language, code in blocks)
    if shown == "a 5":
        with pytest.raises(AssertionError, match=r"page.md:8 shows\na 5"):
            run_blocks(write(page, text))
    else:
        run_blocks(write(page, text))


def test_a_block_that_fails_or_is_not_run(page: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_blocks(write(page, "```python\n1 / 0\n```\n"))
    run_blocks(write(page, "<!-- not run: it fails -->\n```python\n1 / 0\n```\n"))


def test_a_command_is_run(page: Path) -> None:
    run_blocks(write(page, "```console\n$ python -V\nPython 3...\n```\n"))
    with pytest.raises(AssertionError, match="shows"):
        run_blocks(write(page, "```console\n$ python -V\nPython 2\n```\n"))
    with pytest.raises(AssertionError, match="cannot be run here"):
        run_blocks(write(page, "```console\n$ make demo\n```\n"))


def test_a_script_is_run_with_its_arguments(page: Path) -> None:
    code = "import sys", "print(sys.argv[1])", "sys.exit(len(sys.argv) - 2)"
    (page / "x.py").write_text("\n".join(code))
    run_blocks(write(page, "```console\n$ python x.py one\none\n```\n"))
    with pytest.raises(AssertionError, match="ends with 1"):
        run_blocks(write(page, "```console\n$ python x.py one two\none\n```\n"))


def test_an_excerpt_is_that_of_its_file(page: Path) -> None:
    (page / "examples").mkdir()
    (page / "examples" / "x.py").write_text("y = 1\n")
    run_blocks(write(page, "```python\n# examples/x.py\ny = 1\n```\n"))
    with pytest.raises(AssertionError, match=r"is not in examples/x\.py"):
        run_blocks(write(page, "```python\n# examples/x.py\ny = 2\n```\n"))


@pytest.mark.parametrize("name", ["tutorial.md", "concepts.md"])
def test_words_in_italics_are_in_the_glossary(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "", text)
    used = {w.lower() for w in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", text)}
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    known = {w.lower() for w in re.findall(r"\*\*(.+?)\*\*", glossary)}
    known |= {f"{w}s" for w in known} | {"italics"}
    assert {" ".join(w.split()) for w in used} - known == set()
