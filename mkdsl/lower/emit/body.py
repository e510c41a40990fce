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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.errors import InternalError
from mkdsl.lang.body import is_literal, line_of
from mkdsl.lang.primitives import dot_p, extent_p, fold_p, program_id_p, roll_p
from mkdsl.lang.table import ELEMENTWISE, RENAMES
from mkdsl.lower.emit.dots import DotOps
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
    is_tile,
    position,
)

Value = Any
Ref = Any


class Emitter(DotOps):
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
        super().__init__(columns, scratch, sums, streams)
        self.extents, self.grid, self.first_part = extents, grid, first_part
        self.parameters: dict[int, int] = {}

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

    # Folds.

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
