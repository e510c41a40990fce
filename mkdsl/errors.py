"""The errors of mkdsl: what was wrong, what was expected, the user's line, what to do.

MkdslError
  TraceError     the user's program or task is not legal mkdsl
  PlanError      the program is legal but does not fit the machine
  VerifyError    a stage of the compiler failed its check
  ParseError     a text is not that of a stage of the compiler
  LaunchError    the compiled program cannot run here or with these arguments
    HangError    a debug build gave up a wait; `stuck` says who waits for what
  InternalError  a fault of mkdsl itself
"""

import inspect
import linecache
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

OURS = str(Path(__file__).resolve().parent)


@dataclass(frozen=True, slots=True)
class SrcInfo:
    """A line of the user's source."""

    file: str = "<unknown>"
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def snippet(self) -> str:
        """The line itself with a caret under its first character, or nothing."""
        text = linecache.getline(self.file, self.line).rstrip()
        if not text:
            return f"  --> {self}"
        indent = len(text) - len(text.lstrip())
        number = str(self.line)
        pad = " " * len(number)
        return (
            f"  --> {self}\n {pad} |\n {number} | {text}\n {pad} | {' ' * indent}"
            + "^" * max(1, len(text) - indent)
        )


NO_SRC = SrcInfo()


def _is_user(file: str) -> bool:
    foreign = "/jax/" in file or "/jaxlib/" in file or file.startswith("<")
    return not file.startswith(OURS) and not foreign and "functools" not in file


def caller() -> SrcInfo:
    """The innermost frame outside mkdsl and JAX: the line that the user wrote."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_user(name):
            return SrcInfo(name, frame.f_lineno)
        frame = frame.f_back
    return NO_SRC


def defined_at(f: Any) -> SrcInfo:
    """The first line of a function, partial or callable object."""
    while hasattr(f, "func"):
        f = f.func
    code = getattr(inspect.unwrap(f), "__code__", None)
    return SrcInfo(code.co_filename, code.co_firstlineno) if code else NO_SRC


def raised_at(error: BaseException, otherwise: SrcInfo) -> SrcInfo:
    """The user's innermost line in the traceback of an error."""
    found = otherwise
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_user(frame.f_code.co_filename):
            found = SrcInfo(frame.f_code.co_filename, line)
    return found


class MkdslError(Exception):
    """Base of all errors of mkdsl.

    Args:
        what: what was wrong, with names and values.
        src: the user's line.
        hint: what to change.
    """

    def __init__(self, what: str, src: SrcInfo = NO_SRC, hint: str = "") -> None:
        parts = [what]
        if src != NO_SRC:
            parts.append(src.snippet())
        if hint:
            parts.append(f"  hint: {hint}")
        super().__init__("\n".join(parts))
        self.what, self.src, self.hint = what, src, hint


class TraceError(MkdslError):
    """The program or a task is not legal mkdsl."""


class PlanError(MkdslError):
    """The program does not fit the machine; the message has the byte budget."""


class VerifyError(MkdslError):
    """A stage failed its check: `stage` names it, the text names the node."""

    def __init__(
        self, stage: str, what: str, src: SrcInfo = NO_SRC, hint: str = ""
    ) -> None:
        super().__init__(f"{stage}: {what}", src, hint)
        self.stage = stage


class ParseError(MkdslError):
    """A text is not that of a stage; `line` counts from 1, `src` is its place."""

    def __init__(self, what: str, src: SrcInfo, line: str, at: int, hint: str) -> None:
        mark = f"\n    {line}\n    {' ' * at}^" if line else ""
        super().__init__(f"line {src.line}: {what}{mark}", hint=hint)
        self.src, self.line = src, src.line


class LaunchError(MkdslError):
    """The program cannot be launched here or with these arguments."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A wait of the kernel that was not met.

    Attributes:
        sm, role, position: who waits: a role of an SM, at an instruction of its queue.
        task: name of that instruction's task: call, layer, pid.
        event, expected, seen: the counter, the count awaited, the count found.
        waited_ns: how long; less than the limit where it stopped because others had.
        signallers: tasks of the plan that signal the event.
        to_come: those of them that are at or behind a wait that is not met either.
    """

    sm: int
    role: str
    position: int
    task: str
    event: int
    expected: int
    seen: int
    waited_ns: int
    signallers: int = 0
    to_come: int = 0

    @property
    def is_cause(self) -> bool:
        """True if the signals still to come would not be enough."""
        return self.seen + self.to_come < self.expected

    def __str__(self) -> str:
        return (
            f"SM {self.sm} {self.role}, instruction {self.position}, {self.task}: "
            f"event e{self.event} expected {self.expected}, seen {self.seen} after "
            f"{self.waited_ns / 1e6:.0f} ms; {self.signallers} tasks signal it, "
            f"{self.to_come} of them are held up"
        )


class HangError(LaunchError):
    """The kernel of a debug build waited for counts that were not reached."""

    def __init__(
        self, what: str, src: SrcInfo, hint: str, stuck: tuple[Stuck, ...]
    ) -> None:
        super().__init__(what, src, hint)
        self.stuck = stuck


class InternalError(MkdslError):
    """A fault of mkdsl: please report it with the text of the message."""
