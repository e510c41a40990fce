"""A task body as Mosaic operations, transposed: values are [features, columns].

    user                          kernel
    tile [columns, features]      [features, columns] in WGMMA layout; a `Tile`, made
                                  chunk by chunk, where it is longer than a chunk
    column [columns (, 1)]        [columns] in WGMMA.reduce(0)
    vector [(1,) features]        as a tile, equal in all columns
    scalar []                     a scalar
    stream [rows, features]       `Pages`, or a `PageBlock` inside a fold

A user axis has a role, so broadcasts and reshapes only rename, and roles meet in
elementwise operations. Features are padded to a multiple of 64; padding is masked where
it could be seen: in reductions and in operands of wgmma. Rows of weights, keys and
values are operand A of wgmma, activations and queries operand B.
"""

# pyright: reportPrivateImportUsage=false
# (Pallas is typed in part.)

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.errors import InternalError
from mkdsl.lang.body import is_literal, line_of
from mkdsl.lang.primitives import dot_p, extent_p, fold_p, program_id_p, roll_p
from mkdsl.lang.table import ELEMENTWISE, RENAMES
from mkdsl.lower.emit.tiles import TileOps
from mkdsl.lower.emit.values import (
    COLUMN,
    EXPANDED,
    F32,
    I32,
    REDUCE,
    WG,
    Long,
    PageBlock,
    Pages,
    Streams,
    Tile,
    is_tile,
    position,
)
from mkdsl.lower.pages import PIECE, round_up, stacks

Value = Any
Ref = Any


class Emitter(TileOps):
    """Emits the equations of one kind.

    Args:
        columns: columns of the task, a multiple of 8.
        scratch: shared memory for computed operands and rolls, in order of use.
        sums: shared memory for stacked products, in order of use.
        streams: where pages come from.
        extents: (parameter, axis) -> number of elements that exist.
        grid: grid indices.
        first_part: true for the part of a split fold that starts from `init`.
    """

    def __init__(
        self,
        columns: int,
        scratch: Sequence[Ref],
        sums: Sequence[Ref],
        streams: Streams,
        extents: Callable[[int, int], Value],
        grid: Sequence[Value],
        first_part: Value,
    ) -> None:
        super().__init__(columns)
        self.scratch: Iterator[Ref] = iter(scratch)
        self.sums: Iterator[Ref] = iter(sums)
        self.streams = streams
        self.extents, self.grid, self.first_part = extents, grid, first_part
        self.stored: dict[int, Ref] = {}
        self.parameters: dict[int, int] = {}
        self.in_place: dict[int, Ref] = {}
        self.pieces: dict[int, Ref] = {}

    def run(
        self, equations: Sequence[Any], known: Mapping[Any, Value]
    ) -> dict[Any, Value]:
        """Values of the results of the equations, given those of their operands."""
        env = dict(known)
        for e in equations:
            ins = [
                jnp.asarray(v.val, v.aval.dtype) if is_literal(v) else env[v]
                for v in e.invars
            ]
            env.update(zip(e.outvars, self.equation(e, ins), strict=True))
        return env

    def equation(self, e: Any, ins: list[Value]) -> list[Value]:
        """Results of one equation."""
        name = e.primitive.name
        special: dict[Any, Callable[..., list[Value]]] = {
            dot_p: self.dot,
            fold_p: self.fold,
            roll_p: self.roll,
            extent_p: self.extent,
            program_id_p: lambda e: [self.grid[e.params["axis"]]],
        }
        if any(isinstance(x, Long) for x in ins) and e.primitive is not dot_p:
            return [self.long(e, ins)]
        if e.primitive in special:
            return special[e.primitive](e, *ins)
        if name in RENAMES:
            return ins
        if name in ELEMENTWISE:
            return [self.elementwise(e, ins)]
        if name == "split":
            return self.split(e, ins[0])
        if name in REDUCE:
            return [self.reduce(e, ins[0], *REDUCE[name])]
        others: dict[str, Callable[..., Value]] = {
            "argmax": self.argmax,
            "iota": self.iota,
            "slice": self.slice,
            "concatenate": self.concatenate,
            "transpose": lambda e, x: x._replace(transposed=not x.transposed),
        }
        if name not in others:
            raise InternalError(
                f"{e} passed the role check but has no rule", line_of(e)
            )
        return [others[name](e, *ins)]

    def long(self, e: Any, ins: list[Value]) -> Value:
        """An operation on rows in pieces: what lang/pieces.py lets through."""
        name = e.primitive.name
        if name in RENAMES:
            return ins[0]
        if name in REDUCE:
            reduce, _ = REDUCE[name]
            return reduce(reduce(ins[0].value, axis=1), axis=0)
        op = self.operation(e)

        def make() -> Value:
            (shape,) = {x.value.shape for x in ins if isinstance(x, Long)}
            whole = [
                x.value
                if isinstance(x, Long)
                else plgpu.layout_cast(jnp.broadcast_to(x, shape), WG)
                for x in ins
            ]
            return op(*whole)

        return Long(make)

    def operation(self, e: Any) -> Callable[..., Value]:
        """An elementwise equation as a function of arrays."""
        name = e.primitive.name
        if name == "convert_element_type" and e.outvars[0].aval.dtype == bool:
            return lambda x: x != jnp.zeros((), x.dtype)
        return EXPANDED.get(name) or functools.partial(e.primitive.bind, **e.params)

    def elementwise(self, e: Any, args: list[Value]) -> Value:
        op = self.operation(e)
        if any(map(is_tile, args)):
            features = e.outvars[0].aval.shape[-1]
            return self.tile(
                features, lambda s, r, m: op(*[self.rows(a, s, r, m) for a in args])
            )
        if any(map(jnp.ndim, args)):
            args = [a if jnp.ndim(a) else self.as_column(a) for a in args]
        return op(*args)

    def reduce(self, e: Any, x: Value, reduce: Any, join: Any) -> Value:
        if e.invars[0].aval.shape[-1:] in ((), (1,)):
            return x
        features, dtype = e.invars[0].aval.shape[-1], e.invars[0].aval.dtype
        low = -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
        high = jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
        neutral = {jnp.sum: 0, jnp.max: low, jnp.min: high}[reduce]

        def at(start: Any, rows: int) -> Value:
            return self.masked(self.rows(x, start, rows, {}), start, features, neutral)

        return self.over_features(features, at, reduce, join)

    def argmax(self, e: Any, x: Value) -> Value:
        """Lowest index among the largest; NaN is larger than all, as in jnp."""
        features, dtype = e.invars[0].aval.shape[-1], e.invars[0].aval.dtype
        floating = jnp.issubdtype(dtype, jnp.floating)
        low = -jnp.inf if floating else jnp.iinfo(dtype).min
        top = self.reduce(e, x, jnp.max, lax.max)

        def at(start: Any, rows: int) -> Value:
            v = self.masked(self.rows(x, start, rows, {}), start, features, low)
            none = plgpu.layout_cast(jnp.full(v.shape, 2**31 - 1, I32), WG)
            best = self.rows(top, start, rows, {})
            same = v == best
            if floating:
                # NaN is at the top only if one is there: max propagates it.
                same = jnp.where(best != best, v != v, same)
            return jnp.where(same, position(start, rows, self.columns), none)

        return self.over_features(features, at, jnp.min, lax.min)

    def iota(self, e: Any) -> Value:
        shape, dtype = e.params["shape"], e.params["dtype"]
        return self.tile(
            shape[-1], lambda s, r, m: position(s, r, self.columns).astype(dtype)
        )

    def slice(self, e: Any, x: Value) -> Value:
        low = e.params["start_indices"][-1]
        return self.part(x, low, e.outvars[0].aval.shape[-1])

    def split(self, e: Any, x: Value) -> list[Value]:
        sizes = tuple(map(int, e.params["sizes"]))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.part(x, s, n) for s, n in zip(starts, sizes, strict=True)]

    def part(self, x: Value, low: int, features: int) -> Value:
        """Features [low, low + features)."""
        if not is_tile(x):
            return x
        return self.tile(features, lambda s, r, m: self.rows(x, low + s, r, {}))

    def concatenate(self, e: Any, *xs: Value) -> Value:
        parts = [
            self.whole(x, v.aval.shape[-1]) for x, v in zip(xs, e.invars, strict=True)
        ]
        return lax.concatenate(parts, 0)

    def extent(self, e: Any, x: Value) -> list[Value]:
        if isinstance(x, Pages):
            return [self.extents(x.parameter, e.params["axis"])]
        return [self.extents(self.parameters[id(e.invars[0])], e.params["axis"])]

    def roll(self, e: Any, x: Value) -> list[Value]:
        """Across warps: store the tile twice, load it shifted."""
        ref, aval = next(self.scratch), e.invars[0].aval
        features = aval.shape[-1]
        v = self.whole(x, features).astype(F32)
        for start in (0, features):
            ref.at[pl.ds(start, v.shape[0])][...] = v
        plgpu.commit_smem()
        first = features - e.params["shift"]
        v = plgpu.load(ref.at[pl.ds(first, v.shape[0])], layout=WG, optimized=False)
        return [v.astype(aval.dtype)]

    # Dots and folds.

    def operand(self, v: Any, x: Value) -> Ref:
        """A value as operand B: its block, or stored to shared memory, once."""
        if isinstance(x, Tile | Long) and x.ref is not None:
            return x.ref
        if id(v) in self.stored:
            return self.stored[id(v)]
        place = self.in_place.get(id(v))
        ref = self.stored[id(v)] = next(self.scratch) if place is None else place
        if isinstance(x, Long):
            ref.transpose((1, 0))[...] = x.value.astype(ref.dtype)
            plgpu.commit_smem()
            return ref
        features = v.aval.shape[-1]
        padded = round_up(features, 64)

        def put(start: Any, rows: int, carry: Value) -> Value:
            part = ref if rows == padded else ref.at[:, pl.ds(start, rows)]
            value = self.masked(self.rows(x, start, rows, {}), start, features, 0)
            part.transpose((1, 0))[...] = value.astype(ref.dtype)
            return carry

        self.loop(features, put, 0)
        plgpu.commit_smem()
        return ref

    def dot(self, e: Any, x: Value, w: Value) -> list[Value]:
        b = self.operand(e.invars[0], x)
        if isinstance(w, PageBlock):
            return [self.block_dot(b, w)]

        if isinstance(x, Long):
            return [self.long_dot(b, w)]
        if w.rows < 64:
            return [self.stacked_dot(b, w)]

        def pages(acc: Ref) -> Value:
            def step(chunks: Sequence[Ref], first: Any, none: Value) -> Value:
                at = first
                for ref in chunks:
                    # Pallas cannot slice a tiled array at a constant that is traced.
                    start = at if isinstance(at, int) else pl.multiple_of(at, 64)
                    k = pl.ds(start, ref.shape[1])
                    plgpu.wgmma(acc, ref, b.at[:, k].transpose((1, 0)))
                    at = at + ref.shape[1]
                plgpu.wgmma_wait(0)
                return none

            self.streams.dot(w, step, 0)
            return acc[...]

        out = pl.run_scoped(pages, plgpu.ACC((w.rows, self.columns), F32))
        self.streams.advance(w)
        return [out]

    def stacked_dot(self, b: Ref, w: Pages) -> Value:
        """A dot of fewer than 64 rows: pieces of the depth as rows (pages.stacks).

        Row c * rows + r of a product has piece c of row r. Of its 8 columns for each
        piece of b, those of piece c count. Eight columns of the task at a time.
        """
        n, groups = stacks(w.rows), self.columns // 8
        view = self.pieces.get(id(b))

        def multiply(acc: Ref, group: int, ref: Ref, first: Any, at: int) -> None:
            """Add the product with features [at, at + n) of every piece."""
            width = ref.shape[1]
            if view is not None:
                row = group * (view.shape[0] // groups) + lax.div(first, w.width) * 8
                rows = pl.ds(pl.multiple_of(row, 8), 8 * n)
                part = view.at[rows, pl.ds(at, width)]
                plgpu.wgmma(acc, ref, part.transpose((1, 0)))
                return
            for c in range(n):
                start = pl.multiple_of(first + c * w.width + at, 64)
                part = b.at[pl.ds(8 * group, 8), pl.ds(start, width)]
                plgpu.wgmma(acc.at[:, pl.ds(8 * c, 8)], ref, part.transpose((1, 0)))

        def pages(*accs: Ref) -> Value:
            def step(chunks: Sequence[Ref], first: Any, none: Value) -> Value:
                at = 0
                for ref in chunks:
                    for group, acc in enumerate(accs):
                        multiply(acc, group, ref, jnp.int32(first), at)
                    at += ref.shape[1]
                plgpu.wgmma_wait(0)
                return none

            self.streams.dot(w, step, 0)
            return [acc[...] for acc in accs]

        shape = plgpu.ACC((64, 8 * n), F32)
        products = pl.run_scoped(pages, *[shape] * groups)
        self.streams.advance(w)
        row, owns = position(0, 64, 8), list[Value]()
        for product in products:
            own = product[:, :8]
            for c in range(1, n):
                own = jnp.where(row < c * w.rows, own, product[:, 8 * c : 8 * c + 8])
            owns.append(own)
        return self.sum_of_pieces(owns, w.rows)

    def long_dot(self, b: Ref, w: Pages) -> Value:
        """A dot of one column whose left side lies in pieces, one of which is a column.

        Of the products of a page with eight pieces of b, that with its own counts; in a
        stacked page (pages.stacks) each piece of the depth has its own.
        """
        n = stacks(w.rows)
        rows = w.rows * n
        column = plgpu.broadcasted_iota(I32, (rows, 8), 1, layout=WG)
        below = lax.div(position(0, rows, 8), jnp.int32(w.rows)) if n > 1 else 0

        def step(chunks: Sequence[Ref], first: Any, total: Value) -> Value:
            piece, inside = lax.div(first, PIECE), lax.rem(first, PIECE)
            group = pl.ds(pl.multiple_of(lax.div(piece, 8) * 8, 8), 8)

            def product(acc: Ref) -> Value:
                at = 0
                for ref in chunks:
                    start = pl.multiple_of(inside + at, 64)
                    part = b.at[group, pl.ds(start, ref.shape[1])]
                    plgpu.wgmma(acc, ref, part.transpose((1, 0)))
                    at += ref.shape[1]
                plgpu.wgmma_wait(0)
                return acc[...]

            own = pl.run_scoped(product, plgpu.ACC((rows, 8), F32))
            zero = plgpu.layout_cast(jnp.zeros((rows, 8), F32), WG)
            mine = column == below + lax.rem(piece, 8)
            return plgpu.layout_cast(total + jnp.where(mine, own, zero), WG)

        zero = plgpu.layout_cast(jnp.zeros((rows, 8), F32), WG)
        total = jnp.sum(self.streams.dot(w, step, zero), axis=1)
        self.streams.advance(w)
        every = lax.broadcast_in_dim(total, (rows, 8), (0,))
        every = plgpu.layout_cast(every, WG)
        return every if n == 1 else self.sum_of_pieces([every], w.rows)

    def sum_of_pieces(self, owns: Sequence[Value], rows: int) -> Value:
        """The sum over pieces of [pieces * rows, 8], for every 8 columns of the task:
        [64, columns], of which the first `rows` rows count."""
        sums = next(self.sums)
        for group, own in enumerate(owns):
            for start in (0, 64):
                sums.at[pl.ds(start, 64), pl.ds(8 * group, 8)][...] = own
        plgpu.commit_smem()
        # Row r of piece 0 meets row r of the others; rows from `rows` on are padding.
        shifted = [
            plgpu.load(sums.at[pl.ds(c * rows, 64)], layout=WG, optimized=False)
            for c in range(stacks(rows))
        ]
        return functools.reduce(lax.add, shifted)

    def block_dot(self, b: Ref, w: PageBlock) -> Value:
        """A dot with a block of a fold, as it stands or transposed."""

        def accumulate(pairs: Sequence[tuple[Ref, Ref]], rows: int) -> Value:
            def body(acc: Ref) -> Value:
                for left, right in pairs:
                    plgpu.wgmma(acc, left, right.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return acc[...]

            return pl.run_scoped(body, plgpu.ACC((rows, self.columns), F32))

        if w.transposed:
            parts = [accumulate([(c.transpose((1, 0)), b)], 64) for c in w.chunks]
            return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)
        many = len(w.chunks) > 1
        pairs = [
            (c, b.at[:, pl.ds(64 * j, 64)] if many else b)
            for j, c in enumerate(w.chunks)
        ]
        return accumulate(pairs, w.rows)

    def flat(self, values: Sequence[Value], avals: Sequence[Any]) -> list[Value]:
        """A carry in one layout before, inside and after a loop."""
        out: list[Value] = []
        for v, aval in zip(values, avals, strict=True):
            if len(aval.shape) == 1 or aval.shape[1] == 1:
                v = v if jnp.ndim(v) else jnp.broadcast_to(v, (self.columns,))
                out.append(plgpu.layout_cast(v, COLUMN))
            else:
                out.append(plgpu.layout_cast(self.whole(v, aval.shape[1]), WG))
        return out

    def fold(self, e: Any, count: Value, *args: Value) -> list[Value]:
        p, avals = e.params, [v.aval for v in e.outvars]
        a, b = p["consts"], p["consts"] + p["streams"]
        c = b + len(avals)
        closed, streams, block = args[:a], args[a:b], p["block"]
        init, neutral = self.flat(args[b:c], avals), self.flat(args[c:], avals)
        same = all(
            x is y or (is_literal(x) and is_literal(y) and x.val == y.val)
            for x, y in zip(e.invars[1 + b : 1 + c], e.invars[1 + c :], strict=True)
        )
        if self.first_part is not None and not same:
            pairs = zip(init, neutral, avals, strict=True)
            init = [self.choose(x, y) for x, y, _ in pairs]
        inner = p["jaxpr"]
        outer = self.parameters
        for v, o in zip(inner.invars[:a], e.invars[1 : 1 + a], strict=True):
            if id(o) in outer:
                outer[id(v)] = outer[id(o)]
            if id(o) in self.stored:
                self.stored[id(v)] = self.stored[id(o)]
        scratch = list(self.scratch)

        def step(
            i: Value, blocks: Sequence[PageBlock], carry: list[Value]
        ) -> list[Value]:
            self.scratch = iter(scratch)
            valid = self.tile(
                block, lambda s, r, m: position(i * block + s, r, self.columns) < count
            )
            known = dict(
                zip(inner.invars, [*closed, *blocks, valid, *carry], strict=True)
            )
            env = self.run(inner.eqns, known)
            outs = [v.val if is_literal(v) else env[v] for v in inner.outvars]
            return self.flat(outs, avals)

        return self.streams.fold(streams, count, step, init)

    def choose(self, first: Value, other: Value) -> Value:
        """`first` in the first part of a split fold, else `other`."""
        shape, layout = first.shape, WG if first.ndim == 2 else COLUMN
        take = plgpu.layout_cast(jnp.broadcast_to(self.first_part, shape), layout)
        return jnp.where(take, first, other)

    def merge(self, e: Any, parts: int, part: Callable[[Any], list[Value]]) -> Any:
        """Carries of all parts of a split fold, joined in order."""
        p, avals = e.params, [v.aval for v in e.outvars]
        inner = p["merge"]

        def step(i: Any, carry: list[Value]) -> list[Value]:
            known = dict(zip(inner.invars, [*carry, *part(i)], strict=True))
            env = self.run(inner.eqns, known)
            return self.flat([env[v] for v in inner.outvars], avals)

        carry = self.flat(part(0), avals)
        for i in range(1, parts):
            carry = step(i, carry)
        return carry
