"""docs/api.md: the public names and what their docstrings say.

    python -m docs.api            print the page
    python -m docs.api --write    put it into docs/api.md

The page is what `mkdsl.__all__` has, in groups, with the signatures and docstrings of
the code: to change it, change those.
"""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mkdsl as mk
from mkdsl.runtime import stages
from mkdsl.runtime.launch import Megakernel

PAGE = Path(__file__).parent / "api.md"
ROOT = PAGE.parents[1]

# Every name of mkdsl.__all__ is in one group.
GROUPS = {
    "Writing tasks": ("task", "dot", "fold", "roll", "valid", "program_id"),
    "Writing programs": (
        *("call", "scan", "Spec", "whole", "Shape", "Into"),
        *("Squeezed", "Element", "BoundedSlice", "ds"),
        *("cdiv", "minimum", "maximum", "Array", "projection_rows"),
    ),
    "Running programs": ("megakernel", "Options", "simulated"),
    "Looking into plans": ("parse", "replay"),
    "Errors": (
        *("MkdslError", "TraceError", "PlanError", "VerifyError"),
        *("ParseError", "LaunchError", "HangError", "InternalError"),
    ),
}
# What megakernel returns, and the stages of it; methods are part of the page.
RESULTS = (Megakernel, stages.Traced, stages.Lowered, stages.Compiled)
HEAD = """# API

Made from the docstrings by `python -m docs.api --write`; do not edit.
`mk` is `mkdsl`. How to use it:
[tutorial](tutorial.md), [writing a task](writing_a_task.md).
"""


def page() -> str:
    """The text of docs/api.md."""
    return "\n".join([HEAD, *_lines()]).rstrip() + "\n"


def _lines() -> Iterator[str]:
    for title, names in GROUPS.items():
        yield f"## {title}\n"
        for name in names:
            yield from _entry(f"mk.{name}", getattr(mk, name))
    yield "## What mk.megakernel returns\n"
    for kind in RESULTS:
        yield from _entry(kind.__name__, kind, signature=False)
        for name, value in vars(kind).items():
            if not name.startswith("_") and inspect.getdoc(value):
                yield from _entry(f"{kind.__name__}.{name}", value)


def _entry(name: str, value: Any, signature: bool = True) -> Iterator[str]:
    yield f"### {name}\n"
    shown = _signature(name, value) if signature else ""
    # Not every value has a docstring of its own: mk.whole is an instance.
    text = inspect.getdoc(value if callable(value) else type(value)) or ""
    if isinstance(value, property):
        text = inspect.getdoc(value) or ""
    yield "```text"
    if shown:
        yield f"{shown}\n"
    yield text
    yield "```\n"


def _signature(name: str, value: Any) -> str:
    """How it is called, one parameter a line where one line is too long."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
        return ""
    found = inspect.signature(value)
    kept = [p for n, p in found.parameters.items() if n != "self"]
    plain = found.replace(
        parameters=[p.replace(annotation=p.empty) for p in kept],
        return_annotation=found.empty,
    )
    line = f"{name}{plain}"
    return line if len(line) <= 88 else f"{name}{_broken(str(plain))}"


def _broken(text: str) -> str:
    inner = text[1:-1].split(", ")
    return "(\n" + "".join(f"    {part},\n" for part in inner) + ")"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description="docs/api.md from the docstrings.")
    parser.add_argument("--write", action="store_true", help="into docs/api.md")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
