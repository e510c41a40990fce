"""Which of many regions of a buffer meet a given one, without looking at all of them.

What it does: sorts regions into cells by the dimensions in which they form a partition,
and those of a cell by where they start in one other dimension.
Needs: regions of one buffer, in one shape.
Guarantees: `meeting` returns every region that `overlap` does not prove disjoint.
Why it is correct: in a regular dimension all intervals are constant and equal or apart,
so an interval meets a contiguous range of them. In the sorted dimension all are
constant: members that start at or after the end of the question do not meet it, nor do
the first ones, none of which ends after its start. Other dimensions, and a run-time
bound of the question, exclude nothing. What is left is asked of `overlap`, unless every
dimension is regular and the question constant: then it is the answer.
Cost: n log n to build; per question the logarithm of the intervals, and the candidates.
Tiles of a call form a partition, and calls that write one array in tiles of different
sizes (a residual stream) are told apart by the sorted dimension, so candidates are
nearly always answers.
Source: gcd/lcm cells of producer and consumer partitions, found by bisection so that
ragged and run-time tiles need no case of their own.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mkdsl.lang.region import Interval, Memo, Region, overlap

Cell = tuple[int, ...]


class _Members(NamedTuple):
    """Regions of a cell, by their start in the sorted dimension.

    ends[i] is the greatest end of the first i + 1 of them.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]


class RegionIndex:
    """An index of regions by their position in a sequence."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._memo: Memo = {}
        rank = len(regions[0].box) if regions else 0
        self._dims = [d for d in range(rank) if _is_regular(regions, d)]
        self._decides = len(self._dims) == rank
        self._los: list[list[int]] = []
        self._his: list[list[int]] = []
        for d in self._dims:
            intervals = sorted(_constants(regions, d))
            self._los.append([lo for lo, _ in intervals])
            self._his.append([hi for _, hi in intervals])
        cells: dict[Cell, list[int]] = {}
        for i, region in enumerate(regions):
            cell = tuple(
                bisect_left(los, int(region.box[d].lo))
                for d, los in zip(self._dims, self._los, strict=True)
            )
            cells.setdefault(cell, []).append(i)
        self._sorted = _sorted_dim(regions, set(range(rank)) - set(self._dims))
        self._cells = {
            cell: _sorted_members(regions, members, self._sorted)
            for cell, members in cells.items()
        }

    @property
    def is_partition(self) -> bool:
        """True if no two of the regions meet."""
        return self._decides and len(self._cells) == len(self._regions)

    def meeting(self, region: Region) -> list[tuple[int, bool]]:
        """(position, proved) of every region that meets this one or may do so."""
        found: list[tuple[int, bool]] = []
        if self._decides and region.is_constant:
            # The ranges of cells are exact: nothing is left to ask.
            if not region.is_empty:
                found += [
                    (i, region.exact and self._regions[i].exact)
                    for i in self._candidates(region)
                ]
            return sorted(found)
        for i in self._candidates(region):
            how = overlap(self._regions[i], region, self._memo)
            if how != "disjoint":
                found.append((i, how == "overlap"))
        return sorted(found)

    def _candidates(self, region: Region) -> Iterator[int]:
        ranges = [self._range(n, region.box[d]) for n, d in enumerate(self._dims)]
        if math.prod(map(len, ranges)) <= len(self._cells):
            for cell in itertools.product(*ranges):
                if cell in self._cells:
                    yield from self._members(self._cells[cell], region)
            return
        for cell, members in self._cells.items():
            if all(at in some for at, some in zip(cell, ranges, strict=True)):
                yield from self._members(members, region)

    def _members(self, members: _Members, region: Region) -> Sequence[int]:
        if self._sorted is None:
            return members.ids
        lo, hi = region.box[self._sorted]
        first = bisect_right(members.ends, lo) if isinstance(lo, int) else 0
        past = bisect_left(members.starts, hi) if isinstance(hi, int) else None
        return members.ids[first:past]

    def _range(self, n: int, interval: Interval) -> range:
        los, his = self._los[n], self._his[n]
        lo, hi = interval
        first = bisect_right(his, lo) if isinstance(lo, int) else 0
        past = bisect_left(los, hi) if isinstance(hi, int) else len(los)
        return range(first, past)


def _constants(regions: Sequence[Region], d: int) -> set[tuple[int, int]]:
    """The constant intervals of a dimension."""
    return {
        (i.lo, i.hi)
        for i in (r.box[d] for r in regions)
        if isinstance(i.lo, int) and isinstance(i.hi, int)
    }


def _sorted_dim(regions: Sequence[Region], dims: set[int]) -> int | None:
    """That of the dimensions with constant bounds which tells most regions apart."""
    starts = {
        d: len({r.box[d].lo for r in regions})
        for d in sorted(dims)
        if _is_constant(regions, d)
    }
    return max(starts, key=lambda d: starts[d], default=None)


def _sorted_members(
    regions: Sequence[Region], members: list[int], d: int | None
) -> _Members:
    if d is None:
        return _Members(members, [], [])
    ids = sorted(members, key=lambda i: int(regions[i].box[d].lo))
    starts = [int(regions[i].box[d].lo) for i in ids]
    ends = itertools.accumulate((int(regions[i].box[d].hi) for i in ids), max)
    return _Members(ids, starts, list(ends))


def _is_constant(regions: Sequence[Region], d: int) -> bool:
    return all(r.box[d].is_constant for r in regions)


def _is_regular(regions: Sequence[Region], d: int) -> bool:
    """True if all intervals of the dimension are constant and equal or apart."""
    if not _is_constant(regions, d):
        return False
    ordered = sorted(_constants(regions, d))
    return all(a[1] <= b[0] < b[1] for a, b in itertools.pairwise(ordered)) and all(
        lo < hi for lo, hi in ordered
    )
