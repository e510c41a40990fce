"""Inequalities of index expressions, proved without the values of run-time scalars.

What it does: `least(e)` is a number that e never falls below; `at_most(a, b)` proves
a <= b by least(b - a) >= 0.
Needs: nothing.
Guarantees: what is proved holds for all non-negative values of scalars and variables.
Not everything that holds is proved.
Why it is correct: scalars and variables are counts and positions, so they are at least
0; min(a, b) <= a and b; max(a, b) >= a and b; c*(a // c) is in (a - c, a]. Terms that
both sides have cancel in the linear form, which is what makes [0, n) and [n, n + 1)
disjoint for every n.
Cost: 2 to the number of min, max and // of the expression.
"""

import math

from mkdsl.lang.expr import Expr, ExprLike, Op

INFINITY = math.inf


def least(value: ExprLike) -> float:
    """A number that the value never falls below; -inf if none is known."""
    if isinstance(value, int):
        return value
    ops = [(a, k) for a, k in value.terms if isinstance(a, Op)]
    for atom, k in ops:
        if atom.name not in ("min", "max"):
            continue
        rest = value - Expr(0, ((atom, k),))
        sides = least(rest + atom.left * k), least(rest + atom.right * k)
        # k*min(a, b) with k < 0 is the larger of k*a and k*b: either bound will do.
        either = (atom.name == "min") == (k < 0)
        return max(sides) if either else min(sides)
    for atom, k in ops:
        if atom.name == "//" and atom.right.is_constant and atom.right.constant > 0:
            rest = value - Expr(0, ((atom, k),))
            low, high = _range_of(atom)
            alone = least(rest) + k * (low if k > 0 else high)
            return max(alone, _least_without_floor(rest, atom, k))
    return _least_of_terms(value)


def _least_without_floor(rest: Expr, atom: Op, k: int) -> float:
    """The bound by c*(a // c) <= a, or >= a - (c - 1), if c divides k."""
    c = atom.right.constant
    if k % c:
        return -INFINITY
    linear = atom.left if k < 0 else atom.left - (c - 1)
    return least(rest + linear * (k // c))


def _least_of_terms(value: Expr) -> float:
    total: float = value.constant
    for atom, k in value.terms:
        low, high = _range_of(atom) if isinstance(atom, Op) else (0.0, INFINITY)
        total += k * (low if k > 0 else high)
    return total


def _range_of(atom: Op) -> tuple[float, float]:
    """Bounds of //, %, min or max."""
    left = least(atom.left), -least(-atom.left)
    right = least(atom.right), -least(-atom.right)
    if atom.name == "min":
        return min(left[0], right[0]), min(left[1], right[1])
    if atom.name == "max":
        return max(left[0], right[0]), max(left[1], right[1])
    if not atom.right.is_constant or atom.right.constant < 1:
        return -INFINITY, INFINITY
    c = atom.right.constant
    if atom.name == "%":
        return 0, c - 1
    low, high = (x if math.isinf(x) else x // c for x in left)
    return low, high


def at_most(left: ExprLike, right: ExprLike) -> bool:
    """True if left <= right is proved."""
    if isinstance(left, int) and isinstance(right, int):
        return left <= right
    return least(right - left) >= 0
