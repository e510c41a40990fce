"""Hypothesis strategies that several test files share."""

from typing import Any

from hypothesis import strategies as st

from mkdsl.lang.expr import Expr, expr, maximum, minimum, read, var

ENV = {"g0": 3, "g1": 7, "layer": 2, "part": 1}
SCALARS = "lengths"
VALUES = (0, 5, 17, 64)


def read_scalar(buffer: str, index: tuple[Any, ...]) -> int:
    """Element of the scalar array; positions wrap so that every index is legal."""
    assert buffer == SCALARS
    return VALUES[index[0] % len(VALUES)]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[Expr, int]:
    """An expression and its value in ENV, computed by Python beside it."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(_leaves())
    left, x = draw(expressions(depth=depth - 1))
    kind = draw(st.sampled_from("+-*/%mM"))
    if kind in "*/%":
        k = draw(st.integers(1, 9))
        if kind == "*":
            return left * k, x * k
        return (left // k, x // k) if kind == "/" else (left % k, x % k)
    right, y = draw(expressions(depth=depth - 1))
    if kind == "+":
        return left + right, x + y
    if kind == "-":
        return left - right, x - y
    if kind == "m":
        return minimum(left, right), min(x, y)
    return maximum(left, right), max(x, y)


def _leaves() -> st.SearchStrategy[tuple[Expr, int]]:
    at = st.sampled_from(sorted(ENV))
    return st.one_of(
        st.integers(-99, 99).map(lambda n: (expr(n), n)),
        at.map(lambda v: (var(v), ENV[v])),
        at.map(
            lambda v: (
                read(SCALARS, var(v) % 4),
                read_scalar(SCALARS, (ENV[v] % 4,)),
            )
        ),
    )
