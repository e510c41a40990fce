"""Regions: which elements of a buffer an access touches, and whether two meet.

    Region   ::= buffer (in shape) [Interval, ...], exact | cover
    Interval ::= [lo, hi), each an integer or an index expression over scalars

Accesses may count in different reshaped views of one buffer. Their regions are
expressed in one shape, the common refinement of all views: [B, KV*G*D] and
[B, KV, G, D] meet in [B, KV, G, D]. An interval of the coarse view is exact there when
it is aligned (whole heads, or a piece of one head); otherwise the region is a cover of
it, and says so.

Bounds are compared by the proofs of bounds.py, without the values of run-time scalars:
what is proved holds at every length.

Cost: linear in the dimensions for constants.
Source: the role of the affine sets of Exo (exo/analysis) with only what cell-shaped
accesses need.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mkdsl.lang.bounds import at_most
from mkdsl.lang.expr import Expr, ExprLike, expr, maximum, minimum
from mkdsl.lang.program import Access, Axis, Buffer

Meeting = Literal["disjoint", "overlap", "maybe"]


class Interval(NamedTuple):
    """Elements [lo, hi); a plain integer wherever the bound is constant."""

    lo: ExprLike
    hi: ExprLike

    def __str__(self) -> str:
        return f"{self.lo}:{self.hi}"

    @property
    def is_constant(self) -> bool:
        """True if neither bound needs a run-time scalar."""
        return type(self[0]) is int and type(self[1]) is int


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a buffer.

    Attributes:
        shape: the row-major shape in which the intervals count.
        exact: False if the box only covers what the access touches.
    """

    buffer: str
    shape: tuple[int, ...]
    box: tuple[Interval, ...]
    exact: bool = True

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.box):
            raise ValueError(
                f"{self.buffer}: {self.box} does not count in {self.shape}"
            )

    def __str__(self) -> str:
        mark = "" if self.exact else "~"
        return f"{mark}{self.buffer}[{', '.join(map(str, self.box))}]"

    @property
    def is_constant(self) -> bool:
        """True if no bound needs a run-time scalar."""
        return all([type(lo) is int and type(hi) is int for lo, hi in self.box])

    @property
    def is_empty(self) -> bool:
        """True if the region provably holds no element."""
        return any(at_most(i.hi, i.lo) for i in self.box)


# ------------------------------------------------------------- algebra of regions


# (identity of x, of y) -> x, y, provably apart, provably touching. The intervals are
# kept so that their identities stay theirs.
Memo = dict[tuple[int, int], tuple[Interval, Interval, bool, bool]]


def overlap(a: Region, b: Region, memo: Memo | None = None) -> Meeting:
    """Whether two regions of one buffer share an element, for all scalars in range.

    "disjoint" and "overlap" are proved; "maybe" means that it depends on run-time
    scalars, or that a region is only a cover.

    Args:
        memo: remembers proofs about run-time intervals between calls.
    """
    if a.buffer != b.buffer or a.shape != b.shape:
        raise ValueError(f"{a} and {b} do not count in one shape")
    proved = a.exact and b.exact
    symbolic: list[tuple[Interval, Interval]] = []
    for x, y in zip(a.box, b.box, strict=True):
        if x.is_constant and y.is_constant:
            if max(int(x.lo), int(y.lo)) >= min(int(x.hi), int(y.hi)):
                return "disjoint"
        else:
            symbolic.append((x, y))
    for x, y in symbolic:
        key = id(x), id(y)
        if memo is None:
            known = (x, y, _apart(x, y), _touch(x, y))
        elif key in memo:
            known = memo[key]
        else:
            known = memo[key] = (x, y, _apart(x, y), _touch(x, y))
        if known[2]:
            return "disjoint"
        proved = proved and known[3]
    return "overlap" if proved else "maybe"


def _apart(x: Interval, y: Interval) -> bool:
    """True if two intervals provably share no element."""
    return any(at_most(hi, lo) for hi in (x.hi, y.hi) for lo in (x.lo, y.lo))


def _touch(x: Interval, y: Interval) -> bool:
    """True if two intervals provably share an element."""
    return all(at_most(lo + 1, hi) for lo in (x.lo, y.lo) for hi in (x.hi, y.hi))


def contains(outer: Region, inner: Region) -> bool:
    """True if every element of `inner` is proved to be in `outer`."""
    if outer.buffer != inner.buffer or outer.shape != inner.shape:
        raise ValueError(f"{outer} and {inner} do not count in one shape")
    return outer.exact and all(
        at_most(x.lo, y.lo) and at_most(y.hi, x.hi)
        for x, y in zip(outer.box, inner.box, strict=True)
    )


def cover(a: Region, b: Region) -> Region:
    """The smallest box that holds both; exact if one of them holds the other."""
    if contains(a, b):
        return a
    if contains(b, a):
        return b
    box = tuple(
        Interval(_plain(minimum(expr(x.lo), y.lo)), _plain(maximum(expr(x.hi), y.hi)))
        for x, y in zip(a.box, b.box, strict=True)
    )
    return Region(a.buffer, a.shape, box, exact=False)


def intersect(a: Region, b: Region) -> Region:
    """The box of the elements of both."""
    if a.buffer != b.buffer or a.shape != b.shape:
        raise ValueError(f"{a} and {b} do not count in one shape")
    box = tuple(
        Interval(_plain(maximum(expr(x.lo), y.lo)), _plain(minimum(expr(x.hi), y.hi)))
        for x, y in zip(a.box, b.box, strict=True)
    )
    return Region(a.buffer, a.shape, box, a.exact and b.exact)


def count(region: Region) -> ExprLike:
    """Elements of the box, an expression if one dimension is known at run time.

    Raises:
        ValueError: two dimensions are known only at run time.
    """
    total: ExprLike = 1
    for i in region.box:
        total = total * _plain(maximum(expr(i.hi) - i.lo, 0))
    return total


# ------------------------------------------------------------- accesses to regions


def refine(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The coarsest row-major shape of which every given shape is a merging.

    Where two shapes have no common refinement ([2, 3] and [3, 2]) the dimensions of
    the earlier one are kept; regions of the later one are then covers.
    """
    sizes = {math.prod(s) for s in shapes}
    if len(sizes) != 1:
        raise ValueError(f"{list(shapes)} do not have the same number of elements")
    strides = {1, sizes.pop()}
    for shape in shapes:
        for stride in _strides(shape):
            if all(a % stride == 0 or stride % a == 0 for a in strides):
                strides.add(stride)
    ordered = sorted(strides, reverse=True)
    units = [i for s in shapes[:1] for i in s]
    refined = tuple(a // b for a, b in itertools.pairwise(ordered))
    # Shapes that only differ in dimensions of size 1 keep the form of the first.
    return tuple(units) if refined == tuple(u for u in units if u != 1) else refined


def _strides(shape: Sequence[int]) -> list[int]:
    """Elements between neighbours of each dimension."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


Env = Mapping[str, int]
Bounds = tuple[tuple[Interval, ...], bool]


class AccessRegions:
    """The regions of one access for all instances of its call.

    Bounds are computed once per value of the variables that they depend on: thousands
    of tasks share a handful of intervals.
    """

    def __init__(
        self, access: Access, buffer: Buffer, shape: tuple[int, ...] | None = None
    ) -> None:
        self.access = access
        self.shape = shape or refine((buffer.shape, access.view))
        self._groups = [
            (tuple(sorted({v for a in axes for v in _variables(a)})), make)
            for axes, make in _groups(access, self.shape)
        ]
        self._bounds: list[dict[tuple[int, ...], Bounds]] = [{} for _ in self._groups]
        self.variables = tuple(sorted({v for names, _ in self._groups for v in names}))

    def at(self, env: Env) -> Region:
        """The region where the variables have these values."""
        box: tuple[Interval, ...] = ()
        exact = True
        for (names, make), memo in zip(self._groups, self._bounds, strict=True):
            key = tuple([env[v] for v in names])
            bounds = memo.get(key)
            if bounds is None:
                bounds = memo[key] = make(env)
            box += bounds[0]
            exact = exact and bounds[1]
        return Region(self.access.buffer, self.shape, box, exact)


def region(
    access: Access,
    buffer: Buffer,
    env: Env,
    shape: tuple[int, ...] | None = None,
) -> Region:
    """What an access touches where the variables have these values.

    Args:
        env: value of every variable of the access (layer, g0, .., part).
        shape: the shape to count in, from `refine`; by default that of the view and
            the buffer.
    """
    return AccessRegions(access, buffer, shape).at(env)


def _variables(axis: Axis) -> frozenset[str]:
    extent = frozenset[str]() if axis.extent is None else axis.extent.variables
    return axis.start.variables | extent


def _groups(
    access: Access, shape: tuple[int, ...]
) -> list[tuple[tuple[Axis, ...], Callable[[Env], Bounds]]]:
    """Runs of dimensions of the view that are runs of dimensions of `shape` too."""
    if access.view == shape:
        return [
            ((axis,), _one(axis, n)) for axis, n in zip(access.axes, shape, strict=True)
        ]
    view_ends = _ends(access.view)
    shape_ends = _ends(shape)
    groups: list[tuple[tuple[Axis, ...], Callable[[Env], Bounds]]] = []
    view_from = shape_from = 0
    for stride in sorted(set(view_ends) & set(shape_ends), reverse=True):
        view_to, shape_to = view_ends[stride], shape_ends[stride]
        axes = access.axes[view_from:view_to]
        dims, into = access.view[view_from:view_to], shape[shape_from:shape_to]
        groups.append((axes, _many(axes, dims, into)))
        view_from, shape_from = view_to, shape_to
    return groups


def _ends(shape: Sequence[int]) -> dict[int, int]:
    """Stride -> one past the last dimension of that stride."""
    return {stride: i + 1 for i, stride in enumerate(_strides(shape))}


def _one(axis: Axis, n: int) -> Callable[[Env], Bounds]:
    return lambda env: ((_interval(axis, n, env),), True)


def _many(
    axes: tuple[Axis, ...], dims: tuple[int, ...], into: tuple[int, ...]
) -> Callable[[Env], Bounds]:
    def make(env: Env) -> Bounds:
        parts = [_interval(a, n, env) for a, n in zip(axes, dims, strict=True)]
        line, exact = _flatten(parts, dims)
        box, aligned = _split(line, into)
        return box, exact and aligned

    return make


def _interval(axis: Axis, n: int, env: Env) -> Interval:
    """[start, start + size or extent), clipped to [0, n) where constant."""
    lo = _value(axis.start, env)
    if axis.extent is None:
        hi = lo + axis.size
    else:
        hi = _plain(lo + _value(axis.extent, env))
    if isinstance(lo, int):
        lo = min(max(lo, 0), n)
    if isinstance(hi, int):
        hi = min(max(hi, 0), n)
    return Interval(lo, hi)


def _value(value: Expr, env: Env) -> ExprLike:
    if value.is_constant:
        return value.constant
    try:
        return value.evaluate(env)
    except ValueError:  # a scalar that is known at run time
        return _plain(value.substitute(env))


def _plain(value: ExprLike) -> ExprLike:
    if isinstance(value, Expr) and value.is_constant:
        return value.constant
    return value


def _flatten(parts: Sequence[Interval], dims: Sequence[int]) -> tuple[Interval, bool]:
    """The run of elements, row by row, from the first to the last of a box."""
    lo: ExprLike = 0
    last: ExprLike = 0
    for part, stride in zip(parts, _strides(dims), strict=True):
        lo = lo + part.lo * stride
        last = last + (part.hi - 1) * stride
    # One index, or a range of them, and below that everything: then nothing is added.
    ranged = [i for i, p in enumerate(parts) if _plain(p.hi - p.lo) != 1]
    exact = not ranged or all(
        parts[i] == (0, dims[i]) for i in range(ranged[0] + 1, len(dims))
    )
    return Interval(_plain(lo), _plain(last + 1)), exact


def _split(line: Interval, dims: Sequence[int]) -> Bounds:
    """A run of elements as a box of the dimensions that it runs over."""
    box: tuple[Interval, ...] = ()
    for i, inner in enumerate(_strides(dims)):
        first = _plain(expr(line.lo) // inner)
        past = _plain((expr(line.hi) + (inner - 1)) // inner)
        box += (Interval(first, past),)
        if _plain(past - first) == 1:
            line = Interval(
                _plain(line.lo - first * inner), _plain(line.hi - first * inner)
            )
            continue
        full = tuple(Interval(0, n) for n in dims[i + 1 :])
        aligned = _is_multiple(line.lo, inner) and _is_multiple(line.hi, inner)
        return box + full, aligned
    return box, True


def _is_multiple(value: ExprLike, divisor: int) -> bool:
    return _plain(expr(value) % divisor) == 0
