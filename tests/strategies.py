"""Hypothesis strategies that several test files share."""

from collections.abc import Mapping
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from mkdsl.lang.expr import Expr, expr, maximum, minimum, read, var

ENV = {"g0": 3, "g1": 7, "layer": 2, "part": 1}
SCALARS = "lengths"
VALUES = (0, 5, 17, 64)


def read_scalar(buffer: str, index: tuple[Any, ...]) -> int:
    """Element of the scalar array; positions wrap so that every index is legal."""
    assert buffer == SCALARS
    return VALUES[index[0] % len(VALUES)]


def expressions(depth: int = 3) -> st.SearchStrategy[tuple[Expr, int]]:
    """An expression and its value in ENV, computed by Python beside it."""
    return expressions_of(ENV, SCALARS, depth)


@st.composite
def expressions_of(
    draw: st.DrawFn, env: Mapping[str, int], scalars: str, depth: int, most: int = 99
) -> tuple[Expr, int]:
    """An expression over some variables, and its value where they have these values.

    Args:
        scalars: the array whose scalars it may read, or "".
        most: of constants, and of their negatives.
    """
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(_leaves(env, scalars, most))
    left, x = draw(expressions_of(env, scalars, depth - 1, most))
    kind = draw(st.sampled_from("+-*/%mM"))
    if kind in "*/%":
        k = draw(st.integers(1, 9))
        if kind == "*":
            return left * k, x * k
        return (left // k, x // k) if kind == "/" else (left % k, x % k)
    right, y = draw(expressions_of(env, scalars, depth - 1, most))
    if kind == "+":
        return left + right, x + y
    if kind == "-":
        return left - right, x - y
    if kind == "m":
        return minimum(left, right), min(x, y)
    return maximum(left, right), max(x, y)


def _leaves(
    env: Mapping[str, int], scalars: str, most: int
) -> st.SearchStrategy[tuple[Expr, int]]:
    at = st.sampled_from(sorted(env))
    leaves = [
        st.integers(-most, most).map(lambda n: (expr(n), n)),
        at.map(lambda v: (var(v), env[v])),
    ]
    if scalars:
        leaves.append(
            at.map(
                lambda v: (
                    read(scalars, var(v) % 4),
                    read_scalar(scalars, (env[v] % 4,)),
                )
            )
        )
    return st.one_of(*leaves)


def examples(count: int) -> settings:
    """So many examples of a property where others have 100 (see conftest.py)."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))
