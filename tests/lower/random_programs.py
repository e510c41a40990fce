"""Random small programs.

programs()   a few calls over arrays of 24 elements: random grids, blocks, ragged
             edges and index maps; views with and without a common refinement;
             arrays written in place; temps in tiles; scans with several layers and
             variants, with a carry; run-time scalars as positions and as extents
"""

import itertools
import math
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from mkdsl.lang.expr import Expr, cdiv, expr, maximum, minimum, read, var
from mkdsl.lang.program import Access, Axis, Buffer, Call, Output, Program, Scan, Step
from tests.lower.programs import array, at, call, on, task, tile
from tests.strategies import expressions_of

SIZE = 24
FORMS = ((24,), (2, 12), (4, 6), (12, 2), (2, 3, 4), (4, 2, 3), (3, 8), (2, 2, 6))
N = array("n", (3,), "int32", "input")
# Values of the scalars: inside of every array, at its edges, and beyond.
INSIDE = ((0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1), (1, 1, 0))
LENGTHS = (
    *INSIDE,
    (1, 2, 3),
    (3, 0, 2),
    (5, 3, 1),
    (8, 8, 8),
    (24, 5, 12),
    (40, 2, 24),
)
LAYER = var("layer")


# ---------------------------------------------------------------------- strategy


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stands: its grid, layers of the scan around it, or None."""

    grid: tuple[int, ...]
    layers: int | None
    run_time: bool

    @property
    def ranges(self) -> dict[str, int]:
        """Size of each variable."""
        sizes = {f"g{i}": n for i, n in enumerate(self.grid)}
        return sizes if self.layers is None else sizes | {"layer": self.layers}


@st.composite
def programs(draw: st.DrawFn, run_time: bool = False) -> Program:
    """A program of a few calls; some are refused, as two tasks write one element."""
    states = [array(s, draw(st.sampled_from(FORMS)), role="state") for s in "ab"]
    weight = array("w", draw(st.sampled_from(FORMS)), role="input")
    builder = _Builder(draw, run_time, [*states], [weight, *states])
    shape = draw(st.sampled_from(("calls", "scan", "calls around a scan")))
    around = 0 if shape == "scan" else draw(st.integers(1, 2))
    steps: list[Step] = [builder.call(None) for _ in range(around)]
    if shape != "calls":
        steps += builder.scan(draw(st.integers(1, 3)))
    steps += [builder.call(None) for _ in range(around)]
    buffers = (*states, weight, N, *builder.temps)
    inputs = ("a", "b", "w", "n")
    return Program("random", buffers, inputs, tuple(steps), (Output("a"),))


class _Builder:
    """Calls over the buffers that exist so far."""

    def __init__(
        self,
        draw: st.DrawFn,
        run_time: bool,
        states: list[Buffer],
        readable: list[Buffer],
    ) -> None:
        self._draw, self._run_time, self._states = draw, run_time, states
        self._readable, self._count = readable, 0
        # Temps of a scan: the layers in front, and which layer is there to be read.
        self._layered: dict[str, Expr] = {}
        self.temps: list[Buffer] = []

    def call(
        self, layers: int | None, carry: Buffer | None = None, temps: bool = True
    ) -> Call:
        """A call that reads what there is, and writes a state, a temp or the carry."""
        draw = self._draw
        self._count += 1
        into = carry is None and (not temps or draw(st.booleans()))
        if carry is not None:
            place, out = self._tiles(carry, layers, LAYER + 1)
        elif into:
            grid = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
            place = Place(grid, layers, self._run_time)
            place, out = self._own(draw(st.sampled_from(self._states)), place)
        else:
            shape = draw(st.sampled_from(FORMS))
            lead = () if layers is None else (layers,)
            made = array(f"t{self._count}", (*lead, *shape))
            place, out = self._tiles(made, layers, LAYER)
        some = st.sampled_from((*self._readable, *self._readable[1:]))
        sources = draw(st.lists(some, min_size=min(self._count - 1, 2), max_size=3))
        # Most reads of the array that is written are of the block that is overwritten.
        ins = [
            out
            if b.name == out.buffer and draw(st.integers(0, 3))
            else self._any(b, place)
            for b in sources
        ]
        if not into and carry is None:
            self.temps.append(made)
            self._readable.append(made)
            if layers is not None:
                self._layered[made.name] = LAYER
        uses = [draw(st.sampled_from(("tile", "stream"))) for _ in ins]
        definition = task(
            f"c{self._count}",
            [
                tile(f"x{i}", *a.shape, use=use)
                for i, (a, use) in enumerate(zip(ins, uses, strict=True))
            ],
            [tile("y", *out.shape)],
            1,
        )
        return call(f"c{self._count}", definition, place.grid, ins, [out])

    def scan(self, layers: int) -> list[Step]:
        """A scan, perhaps with a carry x: entry i + 1 is written by layer i."""
        draw = self._draw
        steps: list[Step] = []
        carry = None
        if draw(st.booleans()):
            carry = array("x", (layers + 1, *draw(st.sampled_from(FORMS))))
            place, out = self._tiles(carry, None, expr(0))
            enter = task("enter", [], [tile("y", *out.shape)], 1)
            steps.append(call("enter", enter, place.grid, [], [out]))
            self.temps.append(carry)
            self._readable.append(carry)
            self._layered["x"] = LAYER
        outer = list(self._readable)
        variants: list[tuple[Call, ...]] = []
        # Temps of a variant are written in its layers alone: several variants write
        # states and the carry, and alternate.
        count = draw(st.integers(1, min(2, layers)))
        for _ in range(count):
            temps = count == 1
            calls = [
                self.call(layers, temps=temps) for _ in range(draw(st.integers(1, 2)))
            ]
            if carry is not None:
                calls.append(self.call(layers, carry))
            variants.append(tuple(calls))
            self._readable = list(outer)
        choice = tuple(i % count for i in range(layers))
        if carry is not None:
            self._layered["x"] = expr(layers)
        steps.append(Scan(layers, tuple(variants), choice))
        return steps

    # ------------------------------------------------------------------ accesses

    def _view(self, buffer: Buffer) -> tuple[tuple[int, ...], tuple[Axis, ...]]:
        """A view, and the axes of the layers in front."""
        form = self._draw(st.sampled_from((*FORMS, buffer.shape)))
        lead = math.prod(buffer.shape) // SIZE
        if buffer.name in self._layered:
            form = form if math.prod(form) == SIZE else form[1:]
            return (lead, *form), (at(self._layered[buffer.name]),)
        return form, ()

    def _any(self, buffer: Buffer, place: Place) -> Access:
        """Any block of an array, at any position."""
        view, lead = self._view(buffer)
        axes = [self._axis(n, place, place.run_time) for n in view[len(lead) :]]
        return on(buffer, *lead, *axes, view=view)

    def _axis(self, n: int, place: Place, run_time: bool) -> Axis:
        draw = self._draw
        kind = draw(st.sampled_from("wwtti" + "rrr" * run_time))
        if kind == "w":
            return Axis(expr(0), n)
        if kind == "r":
            return draw(_run_time_axes(n, place))
        if kind == "t":
            name = draw(st.sampled_from(sorted(place.ranges)))
            size = draw(st.integers(1, max(1, n // 2)))
            step = draw(st.sampled_from((size, 1, 2)))
            start = var(name) * step + draw(st.integers(0, 2))
        else:
            size = draw(st.integers(1, n))
            start = draw(_positions(place))
        return Axis(_inside(start, n, place), size, squeezed=size == 1 and kind == "i")

    def _own(self, buffer: Buffer, place: Place) -> tuple[Place, Access]:
        """A block of a state: one for each grid point, most of the time."""
        draw = self._draw
        view, _ = self._view(buffer)
        grid_axes = [f"g{i}" for i in range(len(place.grid))]
        axes: list[Axis] = []
        for n in view:
            if grid_axes and draw(st.integers(0, 7)):
                name = grid_axes.pop()
                size = max(1, n // place.ranges[name])
                start = var(name) * size + draw(st.sampled_from((0, 0, 0, 0, 1)))
                axes.append(Axis(_inside(start, n, place), size))
            elif place.layers is not None and n >= place.layers and draw(st.booleans()):
                axes.append(at(LAYER))
            else:
                axes.append(self._axis(n, place, place.run_time))
        if draw(st.integers(0, 7)):
            sizes = place.ranges | dict.fromkeys(grid_axes, 1)
            grid = tuple(sizes[f"g{i}"] for i in range(len(place.grid)))
            place = replace(place, grid=grid)
        return place, on(buffer, *axes, view=view)

    def _tiles(
        self, buffer: Buffer, layers: int | None, layer: Expr
    ) -> tuple[Place, Access]:
        """Tiles that cover a temp once, the last of them ragged."""
        layered = len(buffer.shape) > 1 and math.prod(buffer.shape[1:]) == SIZE
        layered = layered and (layers is not None or buffer.name == "x")
        shape = buffer.shape[1:] if layered else buffer.shape
        cut = self._draw(
            st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=2)
        )
        grid: list[int] = []
        axes: list[Axis] = []
        for d, n in enumerate(shape):
            if d not in cut:
                axes.append(Axis(expr(0), n))
                continue
            size = self._draw(st.integers(cdiv(n, 3), n))
            axes.append(Axis(var(f"g{len(grid)}") * size, size))
            grid.append(cdiv(n, size))
        lead = (at(layer),) if layered else ()
        place = Place(tuple(grid), layers, self._run_time)
        return place, on(buffer, *lead, *axes)


@st.composite
def _positions(draw: st.DrawFn, place: Place) -> Expr:
    """An index map of the grammar over the variables of a call."""
    value, _ = draw(expressions_of(dict.fromkeys(place.ranges, 1), "", depth=2, most=9))
    return value


@st.composite
def _run_time_axes(draw: st.DrawFn, n: int, place: Place) -> Axis:
    """The first rows, the last ones of them, the next row, or some in the middle."""
    index = expr(draw(st.integers(0, 2)))
    if place.grid[0] <= 3 and draw(st.booleans()):
        index = var("g0")
    some = read("n", index)
    kind = draw(st.sampled_from(("past", "window", "next", "row", "between", "least")))
    if kind == "past":
        return Axis(expr(0), n, extent=some)
    if kind == "window":
        first = maximum(0, some + 1 - draw(st.integers(1, 3)))
        return Axis(first, n, extent=some - first)
    if kind == "next":
        return Axis(some, 1)
    if kind == "row":
        factor = draw(st.integers(1, min(2, n - 1)))
        return Axis(some * factor // draw(st.integers(1, 2)), 1)
    if kind == "between":
        return Axis(some, n, extent=read("n", draw(st.integers(0, 2))))
    return Axis(expr(0), n, extent=minimum(some, draw(st.integers(0, n))))


def _inside(start: Expr, n: int, place: Place) -> Expr:
    """The start if it is in the array at every point, else wrapped into it."""
    points = itertools.product(*map(range, place.ranges.values()))
    values = [start.evaluate(dict(zip(place.ranges, p, strict=True))) for p in points]
    return start if 0 <= min(values) and max(values) < n else start % n
