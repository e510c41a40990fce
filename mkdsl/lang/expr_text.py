"""Parse index expressions: parse(str(e)) == e; the grammar is in expr.py."""

import re

from mkdsl.lang.expr import Expr, expr, maximum, minimum, read, var

_TOKEN = re.compile(r"\s*(\d+|//|min\b|max\b|[A-Za-z_][\w.]*|[-+*%(),\[\]])")


def parse(text: str) -> Expr:
    """The expression that prints as `text`.

    Raises:
        ValueError: the text is not in the grammar.
    """
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s+", "", text):
        raise ValueError(f"not an index expression: {text!r}")
    value, rest = _sum(tokens)
    if rest:
        raise ValueError(f"not an index expression: {text!r} (at {rest[0]!r})")
    return value


def _sum(tokens: list[str]) -> tuple[Expr, list[str]]:
    sign, total = 1, expr(0)
    if tokens and tokens[0] == "-":
        sign, tokens = -1, tokens[1:]
    while True:
        term, tokens = _product(tokens)
        total = total + term * sign
        if not tokens or tokens[0] not in "+-":
            return total, tokens
        sign, tokens = (1 if tokens[0] == "+" else -1), tokens[1:]


def _product(tokens: list[str]) -> tuple[Expr, list[str]]:
    value, tokens = _primary(tokens)
    while tokens and tokens[0] == "*":
        right, tokens = _primary(tokens[1:])
        value = value * right
    return value, tokens


def _expect(tokens: list[str], token: str) -> list[str]:
    if not tokens or tokens[0] != token:
        raise ValueError(f"expected {token!r} at {' '.join(tokens)!r}")
    return tokens[1:]


def _primary(tokens: list[str]) -> tuple[Expr, list[str]]:
    if not tokens:
        raise ValueError("an index expression ends too early")
    head, tokens = tokens[0], tokens[1:]
    if head.isdigit():
        return expr(int(head)), tokens
    if head == "(":
        return _parenthesised(tokens)
    if head in ("min", "max"):
        left, tokens = _sum(_expect(tokens, "("))
        right, tokens = _sum(_expect(tokens, ","))
        value = minimum(left, right) if head == "min" else maximum(left, right)
        return value, _expect(tokens, ")")
    if not tokens or tokens[0] != "[":
        return var(head), tokens
    index: list[Expr] = []
    while True:
        at, tokens = _sum(tokens[1:])
        index.append(at)
        if not tokens or tokens[0] != ",":
            return read(head, *index), _expect(tokens, "]")


def _parenthesised(tokens: list[str]) -> tuple[Expr, list[str]]:
    left, tokens = _sum(tokens)
    op, tokens = (tokens[0], tokens[1:]) if tokens else ("", tokens)
    if op == ")":
        return left, tokens
    right, tokens = _sum(tokens)
    tokens = _expect(tokens, ")")
    if op == "//":
        return left // right, tokens
    if op == "%":
        return left % right, tokens
    raise ValueError(f"unknown operator {op!r} in an index expression")
