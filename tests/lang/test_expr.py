"""Index expressions: the grammar prints and parses, and means what Python means."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.lang.expr import Expr, expr, maximum, minimum, read, var
from mkdsl.lang.expr_text import ExprError, parse, parse_at
from tests.strategies import ENV, SCALARS, expressions, read_scalar


@given(expressions())
def test_parse_of_str_is_the_expression(pair: tuple[Expr, int]) -> None:
    value, _ = pair
    assert parse(str(value)) == value


@given(expressions())
def test_evaluate_agrees_with_python(pair: tuple[Expr, int]) -> None:
    value, expected = pair
    assert value.evaluate(ENV, read_scalar) == expected


@given(expressions())
def test_substitute_agrees_with_evaluate(pair: tuple[Expr, int]) -> None:
    value, expected = pair
    known = value.substitute(ENV)
    assert not known.variables
    assert known.evaluate({}, read_scalar) == expected


@given(expressions(), expressions())
def test_difference_of_equals_folds(a: tuple[Expr, int], b: tuple[Expr, int]) -> None:
    assert (a[0] + b[0]) - b[0] == a[0]
    assert int(a[0] - a[0]) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (var("g0") * 64 + 3, "64*g0 + 3"),
        (read("lengths", var("g0")) + 1 - 512, "lengths[g0] - 511"),
        (maximum(0, var("g0") - 4), "max(0, g0 - 4)"),
        ((var("g1") + 63) // 64 * 64, "64*((g1 + 63) // 64)"),
        (-var("g0"), "-g0"),
        (expr(0), "0"),
        (minimum(var("g0"), var("g0") + 1), "g0"),
    ],
)
def test_canonical_text(value: Expr, text: str) -> None:
    assert str(value) == text
    assert parse(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a number, a name or '(' at 0"),
        ("g0 +", "a number, a name or '(' at 4"),
        ("1 2", "the end at 2"),
        ("g0 ** 2", "a number, a name or '(' at 4"),
        ("min(1)", "',' at 5"),
        ("a[1", "']' at 3"),
        ("(g0 + 1", "'//', '%' or ')' at 7"),
        ("(g0 // 0)", "a divisor other than 0 at 8"),
        ("g0*g1", "a product with a constant at 5"),
        ("$", "a number, a name or '(' at 0"),
    ],
)
def test_bad_text_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ExprError, match=re.escape(f"expected {expected}")):
        parse(text)


@pytest.mark.parametrize("name", ["min", "max.lengths", "minimum", "é"])
def test_any_name_of_an_input_is_read(name: str) -> None:
    value = read(name, var("g0"), 3) + 1
    assert parse(str(value)) == value


def test_an_expression_ends_where_another_text_starts() -> None:
    value, at = parse_at("in x[64*g0 :+ 64]", 5)
    assert (value, at) == (var("g0") * 64, 11)


def test_truth_of_a_formula_is_refused() -> None:
    with pytest.raises(TypeError, match="use mk"):
        bool(var("g0"))
    with pytest.raises(TypeError, match="use mk"):
        _ = var("g0") < 3


def test_product_of_two_variables_is_refused() -> None:
    with pytest.raises(ValueError, match="one factor"):
        _ = var("g0") * var("g1")


def test_reads_and_variables_are_found_inside() -> None:
    value = maximum(0, read(SCALARS, var("g0")) // 2 - var("layer"))
    assert value.reads == {SCALARS}
    assert value.variables == {"g0", "layer"}


@given(st.integers(-50, 50))
def test_integers_are_expressions(n: int) -> None:
    assert int(parse(str(expr(n)))) == n
