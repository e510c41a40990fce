"""Read the lines of a printed stage: what both parsers of stages are made of.

A text is lines; each starts with a keyword. Empty lines, lines that start with `#`, and
spaces where the grammars of text.py and text_schedule.py have none, mean nothing.
Every method reads what it is named after and steps over it, or raises a ParseError
that names the line and what was expected there.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from mkdsl.errors import ParseError, SrcInfo
from mkdsl.lang.expr import Expr
from mkdsl.lang.expr_text import ExprError, parse_at
from mkdsl.lower.text import PLAIN_NAME

_SPACES = re.compile(r"\s*")
_INT = re.compile(r"-?\d+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
GRAMMAR = (
    "the grammar is in the docstrings of mkdsl/lower/text.py and "
    "mkdsl/lower/text_schedule.py"
)


@functools.cache
def _pattern(literal: str) -> re.Pattern[str]:
    """A literal; words end where it ends, one space stands for any number."""
    text = r"\s+".join(map(re.escape, literal.split()))
    return re.compile(text + (r"(?!\w)" if literal[-1].isalnum() else ""))


class Line:
    """A line of a text and how far it has been read."""

    def __init__(self, text: str, src: SrcInfo) -> None:
        self.text, self.src, self.at = text, src, 0

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        """What a pattern matches."""
        found = self._match(pattern)
        if found is None:
            self.fail(expected)
        return found

    def take(self, literal: str) -> bool:
        """Whether a literal comes next; if so, step over it."""
        return self._match(_pattern(literal)) is not None

    def expect(self, literal: str) -> None:
        """A literal."""
        if not self.take(literal):
            self.fail(repr(literal))

    def take_one_of[T](self, words: Sequence[T]) -> T | None:
        """The one of some words that comes next, or None."""
        return next((word for word in words if self.take(str(word))), None)

    def one_of[T](self, words: Sequence[T]) -> T:
        """One of some words."""
        word = self.take_one_of(words)
        if word is None:
            self.fail(" or ".join(map(repr, words)))
        return word

    def number(self) -> int:
        """An integer."""
        return int(self.match(_INT, "a number"))

    def identifier(self, letter: str) -> int:
        """The number of t7, e3 or d0, if that is the letter."""
        return int(self.match(_identifier(letter), f"{letter} and a number")[1:])

    def name(self) -> str:
        """A name, plain or quoted."""
        quoted = self._match(_QUOTED)
        if quoted is None:
            return self.match(PLAIN_NAME, "a name")
        try:
            return json.loads(quoted)
        except json.JSONDecodeError as error:
            self.refuse(f"{quoted} is no JSON string: {error.msg}")

    def expression(self) -> Expr:
        """An index expression."""
        try:
            value, self.at = parse_at(self.text, self.at)
        except ExprError as error:
            self.at = error.at
            self.fail(error.expected)
        return value

    def many[T](self, item: Callable[[], T], end: str = "") -> tuple[T, ...]:
        """Items between commas, up to a literal or to the end of the line."""
        items: list[T] = []
        while not self._ends(end):
            if items:
                self.expect(",")
            items.append(item())
        return tuple(items)

    def numbers(self, end: str = "") -> tuple[int, ...]:
        """Integers between commas, up to a literal or to the end of the line."""
        return self.many(self.number, end)

    def shape(self) -> tuple[int, ...]:
        """A shape: [8, 64]."""
        self.expect("[")
        return self.numbers("]")

    def done(self) -> None:
        """The end of the line."""
        if not self.ended:
            self.fail("the end of the line")

    @property
    def ended(self) -> bool:
        """True if nothing is left."""
        self._skip()
        return self.at == len(self.text)

    def fail(self, expected: str, hint: str = GRAMMAR) -> NoReturn:
        """Report what was expected here."""
        self._skip()
        found = repr(self.text[self.at :]) if not self.ended else "the end of the line"
        raise ParseError(
            f"expected {expected}, found {found}", self.src, self.text, self.at, hint
        )

    def refuse(self, what: str, hint: str = GRAMMAR) -> NoReturn:
        """Report what is wrong with what has been read."""
        raise ParseError(what, self.src, self.text, self.at, hint)

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        self._skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found.group()

    def _ends(self, end: str) -> bool:
        return self.take(end) if end else self.ended

    def _skip(self) -> None:
        found = _SPACES.match(self.text, self.at)
        self.at = found.end() if found else self.at


@functools.cache
def _identifier(letter: str) -> re.Pattern[str]:
    return re.compile(rf"{letter}\d+(?!\w)")


class Lines:
    """The lines of a text that are left to read."""

    def __init__(self, text: str, file: str) -> None:
        every = enumerate(text.splitlines(), 1)
        kept = [(n, s.strip()) for n, s in every if s.strip()]
        self._lines = [Line(s, SrcInfo(file, n)) for n, s in kept if s[0] != "#"]
        end = SrcInfo(file, kept[-1][0] + 1 if kept else 1)
        self._end, self._at = Line("", end), 0

    def peek(self, keyword: str) -> bool:
        """Whether the next line starts with a keyword."""
        return _pattern(keyword).match(self._next.text) is not None

    def take(self, keyword: str) -> Line | None:
        """The next line if it starts with a keyword, read up to what follows it."""
        line = self._next
        if not line.take(keyword):
            return None
        self._at += 1
        return line

    def expect(self, *keywords: str) -> tuple[str, Line]:
        """The next line, which starts with one of some keywords, and which."""
        word = self._next.one_of(keywords)
        self._at += 1
        return word, self._lines[self._at - 1]

    def take_identifier(self, letter: str) -> tuple[int, Line] | None:
        """The next line if it starts with t7, and the 7, if that is the letter."""
        line = self._next
        if not _identifier(letter).match(line.text):
            return None
        self._at += 1
        return line.identifier(letter), line

    def take_numbered(self, keyword: str, number: int, letter: str = "") -> Line | None:
        """As take, for a keyword that a given number follows, or a letter and it."""
        line = self.take(keyword)
        if line is not None:
            found = line.identifier(letter) if letter else line.number()
            if found != number:
                line.refuse(
                    f"expected {keyword} {letter}{number}: numbers are in order"
                )
        return line

    @property
    def end(self) -> Line:
        """The line after the last one."""
        return self._end

    def done(self) -> None:
        """The end of the text."""
        if self._at < len(self._lines):
            self._next.fail("the end of the text")

    @property
    def _next(self) -> Line:
        return self._lines[self._at] if self._at < len(self._lines) else self._end
