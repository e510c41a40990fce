"""The index of regions against a look at all pairs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mkdsl.lang.expr import read
from mkdsl.lang.region import Interval, Region, overlap
from mkdsl.lower import region_index
from mkdsl.lower.region_index import RegionIndex

SHAPE = (3, 8, 40)


def intervals(size: int, run_time: bool) -> st.SearchStrategy[Interval]:
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    constant = ends.map(lambda e: Interval(min(e), max(e)))
    if not run_time:
        return constant
    length = read("length", 0)
    return st.one_of(constant, st.just(Interval(length, length + 1)))


@st.composite
def regions(draw: st.DrawFn) -> Region:
    box = tuple(draw(intervals(n, n == 40)) for n in SHAPE)
    return Region("x", SHAPE, box, draw(st.booleans()))


@settings(max_examples=200, deadline=None)
@given(st.lists(regions(), min_size=1, max_size=12), regions())
def test_it_finds_what_all_pairs_find(many: list[Region], one: Region) -> None:
    want = [
        (i, how == "overlap")
        for i, other in enumerate(many)
        if (how := overlap(other, one)) != "disjoint"
    ]
    assert RegionIndex(many).meeting(one) == want


def tiles(layer: int, width: int, features: int) -> list[Region]:
    box = Interval(layer, layer + 1), Interval(0, 8)
    starts = range(0, features, width)
    return [
        Region("x", (9, 8, features), (*box, Interval(s, s + width))) for s in starts
    ]


def test_tiles_of_different_sizes_cost_a_look_at_those_that_meet(monkeypatch) -> None:
    rows = [
        Region("x", (9, 8, 4096), (Interval(0, 1), Interval(b, b + 1), Interval(s, e)))
        for b in range(8)
        for s, e in ((0, 2048), (2048, 4096))
    ]
    layers = [t for layer in range(9) for t in tiles(layer, 16 << layer % 3, 4096)]
    index = RegionIndex([*rows, *layers])
    asked = []
    monkeypatch.setattr(
        region_index, "overlap", lambda *a: asked.append(a) or overlap(*a)
    )
    for tile in layers:
        index.meeting(tile)
    assert len(asked) < 20 * len(layers)
