"""Parse index expressions: parse(str(e)) == e; the grammar is in expr.py."""

import re

from mkdsl.lang.expr import Expr, expr, maximum, minimum, read, var

_SPACE = re.compile(r"\s*")
_TOKEN = re.compile(r"\d+|//|[^\W\d][\w.]*|[-+*%(),\[\]]")
_NAME = re.compile(r"[^\W\d]")


class ExprError(ValueError):
    """A text is not in the grammar: `expected` something `at` an offset."""

    def __init__(self, text: str, at: int, expected: str) -> None:
        super().__init__(f"index expression {text!r}: expected {expected} at {at}")
        self.at, self.expected = at, expected


def parse(text: str) -> Expr:
    """The expression that prints as `text`.

    Raises:
        ExprError: the text is not in the grammar.
    """
    value, at = parse_at(text, 0)
    if at < len(text.rstrip()):
        raise ExprError(text, at, "the end")
    return value


def parse_at(text: str, at: int) -> tuple[Expr, int]:
    """The longest expression that starts at an offset, and the offset of its end.

    Raises:
        ExprError: no expression starts there.
    """
    scan = _Scan(text, at)
    return scan.sum(), scan.at


class _Scan:
    """The text from `at` on; every method reads what it is named after."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self.at = text, at

    def sum(self) -> Expr:
        negative, total = self._take("-"), expr(0)
        while True:
            term = self._product()
            total = total - term if negative else total + term
            negative = self._take("-")
            if not negative and not self._take("+"):
                return total

    def _product(self) -> Expr:
        value = self._primary()
        while self._take("*"):
            factor = self._primary()
            if not value.is_constant and not factor.is_constant:
                raise self._error("a product with a constant")
            value = value * factor
        return value

    def _primary(self) -> Expr:
        token = self._next()
        if token.isdecimal():
            self._expect(token)
            return expr(int(token))
        if self._take("("):
            return self._parenthesised()
        if not _NAME.match(token):
            raise self._error("a number, a name or '('")
        self._expect(token)
        if token in ("min", "max") and self._take("("):
            left = self.sum()
            self._expect(",")
            right = self.sum()
            self._expect(")")
            return minimum(left, right) if token == "min" else maximum(left, right)
        if not self._take("["):
            return var(token)
        index = [self.sum()]
        while self._take(","):
            index.append(self.sum())
        self._expect("]")
        return read(token, *index)

    def _parenthesised(self) -> Expr:
        left = self.sum()
        if self._take(")"):
            return left
        floor = self._take("//")
        if not floor and not self._take("%"):
            raise self._error("'//', '%' or ')'")
        right = self.sum()
        if right == expr(0):
            raise self._error("a divisor other than 0")
        self._expect(")")
        return left // right if floor else left % right

    def _next(self) -> str:
        """The token that comes next, "" if there is none."""
        self._skip()
        found = _TOKEN.match(self._text, self.at)
        return found.group() if found else ""

    def _take(self, token: str) -> bool:
        """Step over a token if it is the next one."""
        taken = self._next() == token
        self.at += len(token) if taken else 0
        return taken

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise self._error(repr(token))

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self.at)
        self.at = found.end() if found else self.at

    def _error(self, expected: str) -> ExprError:
        self._skip()
        return ExprError(self._text, self.at, expected)
