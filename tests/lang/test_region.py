"""Regions against masks: algebra by numpy, proofs by trying values of the scalars."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.lang.bounds import least
from mkdsl.lang.expr import Expr, ExprLike, cdiv, expr, maximum, minimum, read, var
from mkdsl.lang.program import Access, Axis, Buffer
from mkdsl.lang.region import (
    Interval,
    Region,
    contains,
    count,
    cover,
    intersect,
    overlap,
    refine,
    region,
)
from tests.strategies import ENV, VALUES, expressions

N = read("n", 0)


def value(bound: ExprLike, n: int) -> int:
    """A bound where every scalar is n."""
    return expr(bound).evaluate({}, lambda buffer, index: n)


def box(r: Region, n: int = 0) -> list[range]:
    """The elements of each dimension, not clipped to any array."""
    return [range(value(i.lo, n), value(i.hi, n)) for i in r.box]


def mask(r: Region, n: int = 0) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The elements of a region in its shape."""
    out = np.zeros(r.shape, bool)
    index = [slice(max(0, x.start), max(0, x.stop, x.start)) for x in box(r, n)]
    out[tuple(index)] = True
    return out


def line(lo: ExprLike, hi: ExprLike, shape: int = 10_000) -> Region:
    """A region of one dimension."""
    return Region("b", (shape,), (Interval(lo, hi),))


def plain(value: Expr) -> ExprLike:
    """Constants as integers."""
    return value.constant if value.is_constant else value


# ----------------------------------------------------------------- constant boxes

SHAPE = (5, 7)


@st.composite
def boxes(draw: st.DrawFn) -> Region:
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in SHAPE]
    return Region("b", SHAPE, tuple(Interval(lo, hi) for lo, hi in ends))


@given(boxes(), boxes())
def test_constant_boxes_agree_with_masks(a: Region, b: Region) -> None:
    x, y = mask(a), mask(b)
    assert overlap(a, b) == ("overlap" if (x & y).any() else "disjoint")
    assert np.array_equal(mask(intersect(a, b)), x & y)
    assert not ((x | y) & ~mask(cover(a, b))).any()
    assert count(a) == x.sum()
    assert a.is_empty == (not x.any())
    if contains(a, b):
        assert not (y & ~x).any()
    if y.any():
        assert contains(a, b) == (not (y & ~x).any())


def test_cover_is_exact_only_if_one_holds_the_other() -> None:
    assert cover(line(0, 8), line(2, 3)) == line(0, 8)
    both = cover(line(0, 2), line(4, 6))
    assert (both.box, both.exact) == ((Interval(0, 6),), False)
    assert overlap(both, line(2, 3)) == "maybe"
    assert overlap(both, line(6, 9)) == "disjoint"
    assert not contains(both, line(0, 1))


def test_regions_of_different_shapes_do_not_compare() -> None:
    with pytest.raises(ValueError, match="one shape"):
        overlap(line(0, 1, 4), line(0, 1, 5))


# ------------------------------------------------------------------ run-time bounds


def scalars() -> Iterator[Mapping[int, int]]:
    """Some values of the scalars that `expressions` reads."""
    rotations = [VALUES[i:] + VALUES[:i] for i in range(len(VALUES))]
    for values in (*rotations, (0,) * 4, (1,) * 4, (1000,) * 4, (63, 64, 65, 128)):
        yield dict(enumerate(values))


def at(bound: ExprLike, values: Mapping[int, int]) -> int:
    """A bound where the scalars have these values."""
    return expr(bound).evaluate({}, lambda buffer, index: values[index[0]])


@given(expressions())
def test_nothing_falls_below_least(pair: tuple[Expr, int]) -> None:
    bound = pair[0].substitute(ENV)
    assert least(bound) <= min(at(bound, values) for values in scalars())


@given(expressions(depth=2), expressions(depth=2), st.integers(0, 9), st.integers(0, 9))
def test_proofs_hold_for_all_scalars(
    one: tuple[Expr, int], other: tuple[Expr, int], m: int, n: int
) -> None:
    starts = [one[0].substitute(ENV), other[0].substitute(ENV)]
    a, b = (
        line(plain(s), plain(s + size)) for s, size in zip(starts, (m, n), strict=True)
    )
    how = overlap(a, b)
    inside, empty = contains(a, b), a.is_empty
    for values in scalars():
        x, y = (range(at(r.box[0].lo, values), at(r.box[0].hi, values)) for r in (a, b))
        meet = max(x.start, y.start) < min(x.stop, y.stop)
        assert how == "maybe" or meet == (how == "overlap")
        assert not inside or (x.start <= y.start and y.stop <= x.stop)
        assert not empty or not x


def test_cache_and_append_are_disjoint_at_every_length() -> None:
    new = line(N, N + 1)
    assert overlap(line(0, N), new) == "disjoint"
    assert overlap(line(maximum(0, N + 1 - 512), N), new) == "disjoint"
    assert overlap(line(0, N + 1), new) == "overlap"
    assert overlap(line(0, 100), new) == "maybe"
    assert overlap(line(N // 64 * 64, N), new) == "disjoint"
    assert overlap(line(N, N + 1), line(read("n", 1), read("n", 1) + 1)) == "maybe"


def test_aligned_block_holds_its_row() -> None:
    first = N // 64 * 64
    assert contains(line(first, first + 64), line(N, N + 1))
    assert overlap(line(first, first + 64), line(N, N + 1)) == "overlap"
    assert overlap(line(0, cdiv(N, 64) * 64), line(N + 63, N + 64)) == "disjoint"


def test_count_of_a_run_time_box() -> None:
    three_rows = Region("b", (9, 9), (Interval(0, 3), Interval(0, N)))
    assert count(three_rows) == 3 * maximum(N, 0)
    ragged = line(0, minimum(N, 4))
    assert [value(count(ragged), n) for n in (0, 3, 9)] == [0, 3, 4]
    with pytest.raises(ValueError, match="one factor"):
        count(Region("b", (9, 9), (Interval(0, N), Interval(0, N))))


# --------------------------------------------------------------------------- views


@st.composite
def merged(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A view that multiplies neighbouring dimensions of a shape, with some ones."""
    view: list[int] = []
    for n in shape:
        if view and draw(st.booleans()):
            view[-1] *= n
        else:
            view.append(n)
        if draw(st.integers(0, 5)) == 0:
            view.append(1)
    return tuple(view)


@st.composite
def viewed(draw: st.DrawFn) -> tuple[Buffer, Access, tuple[int, ...]]:
    factors = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    buffer = Buffer("b", draw(merged(factors)), "bfloat16", "temp")
    view = draw(merged(factors) | merged(tuple(reversed(factors))))
    axes: list[Axis] = []
    for n in view:
        start = draw(st.integers(0, n - 1))
        axes.append(Axis(expr(start), draw(st.integers(1, n + 1))))
    return buffer, Access("b", view, tuple(axes)), factors


@given(viewed())
def test_region_of_a_view_covers_its_elements(
    case: tuple[Buffer, Access, tuple[int, ...]],
) -> None:
    buffer, access, factors = case
    true = np.zeros(access.view, bool)
    true[tuple(slice(int(a.start), int(a.start) + a.size) for a in access.axes)] = True
    for shape in (None, refine((buffer.shape, access.view, factors))):
        r = region(access, buffer, {}, shape)
        mine = mask(r)
        assert not (true.ravel() & ~mine.ravel()).any()
        assert not r.exact or mine.sum() == true.sum()


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_refinement_has_every_view_as_a_merging(
    factors: list[int], data: st.DataObject
) -> None:
    views = [data.draw(merged(tuple(factors))) for _ in range(3)]
    shape = refine(views)
    ends = set(itertools.accumulate(reversed(shape), lambda a, b: a * b)) | {1}
    for view in views:
        strides = {math.prod(view[i:]) for i in range(len(view) + 1)}
        assert strides <= ends


def test_heads_of_a_flat_view_are_exact() -> None:
    b, kv, g, d = 2, 3, 4, 64
    buffer = Buffer("q", (b, kv * g * d), "bfloat16", "temp")
    heads = (b, kv, g, d)
    whole = Axis(expr(0), b)

    def flat(start: int, size: int) -> Region:
        axes = (whole, Axis(expr(start), size))
        return region(Access("q", buffer.shape, axes), buffer, {}, heads)

    one = flat(64 * 5, 64)
    assert (one.exact, [str(i) for i in one.box]) == (
        True,
        ["0:2", "1:2", "1:2", "0:64"],
    )
    group = flat(256, 256)
    assert (group.exact, str(group.box[1])) == (True, "1:2")
    half = flat(64 * 5 + 16, 32)
    assert (half.exact, str(half.box[3])) == (True, "16:48")
    across = flat(32, 64)
    assert (across.exact, [str(i) for i in across.box[1:]]) == (
        False,
        ["0:1", "0:2", "0:64"],
    )


def test_views_without_common_refinement_are_covered() -> None:
    buffer = Buffer("b", (2, 3), "bfloat16", "temp")
    axes = (Axis(expr(0), 1), Axis(expr(1), 1))
    r = region(Access("b", (3, 2), axes), buffer, {})
    assert r.shape == (2, 3)
    assert mask(r).ravel()[1]


def test_extent_and_clipping() -> None:
    buffer = Buffer("c", (4, 100), "bfloat16", "state")
    past = Axis(expr(0), 100, extent=read("n", var("g0")))
    access = Access("c", buffer.shape, (Axis(var("g0") * 3, 3), past))
    r = region(access, buffer, {"g0": 1})
    assert str(r) == "c[3:4, 0:n[1]]"
    assert not r.is_constant
