"""Operations on tiles that are longer than what registers hold: chunk by chunk."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower.emit.values import COLUMN, WG, Tile, position
from mkdsl.lower.pages import round_up

Value = Any

# Features of one step over a long tile: 32 registers per thread in float32. On the H200
# (2026-11-29) RMSNorm of [8, 2048] took 2.6, 1.8, 1.5, 1.3 us at 64, 128, 256, 512.
CHUNK_ELEMENTS = 4096
MAX_CHUNK = 512


class TileOps:
    """Tiles of a task with `columns` columns, a multiple of 8."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.chunk = min(MAX_CHUNK, max(64, CHUNK_ELEMENTS // columns // 64 * 64))

    def rows(self, x: Value, start: Any, rows: int, memo: dict[int, Value]) -> Value:
        """Features [start, start + rows) of any value, as [rows, columns]."""
        if isinstance(x, Tile):
            if id(x) not in memo:
                memo[id(x)] = x.at(start, rows, memo)
            return memo[id(x)]
        if jnp.ndim(x) == 2:
            return x if rows == x.shape[0] else x[start : start + rows]
        shape = (rows, self.columns)
        if jnp.ndim(x) == 1:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (1,)), WG)
        return plgpu.layout_cast(jnp.broadcast_to(x, shape), WG)

    def tile(self, features: int, at: Callable[..., Value]) -> Value:
        """A tile: at once if it is short, on demand if it is long."""
        padded = round_up(features, 64)
        return at(0, padded, {}) if padded <= self.chunk else Tile(features, at)

    def whole(self, x: Value, features: int) -> Value:
        """All features of a short value as [padded, columns]."""
        return self.rows(x, 0, round_up(features, 64), {})

    def loop(self, features: int, step: Callable[..., Value], carry: Value) -> Value:
        """carry = step(start, rows, carry) over the chunks of a tile."""
        padded = round_up(features, 64)
        full, rest = divmod(padded, self.chunk)
        if full == 1:
            carry = step(0, self.chunk, carry)
        elif full:

            def one(i: Any, c: Value) -> Value:
                return step(pl.multiple_of(i * self.chunk, self.chunk), self.chunk, c)

            carry = lax.fori_loop(0, full, one, carry)
        return step(full * self.chunk, rest, carry) if rest else carry

    def masked(self, v: Value, start: Any, features: int, neutral: Value) -> Value:
        """v with its padding features replaced."""
        if features % 64 == 0:
            return v
        keep = position(start, v.shape[0], self.columns) < features
        other = plgpu.layout_cast(
            jnp.broadcast_to(jnp.asarray(neutral, v.dtype), v.shape), WG
        )
        return jnp.where(keep, v, other)

    def as_column(self, x: Value) -> Value:
        """A scalar in every column."""
        return plgpu.layout_cast(jnp.broadcast_to(x, (self.columns,)), COLUMN)

    def over_features(
        self,
        features: int,
        at: Callable[[Any, int], Value],
        reduce: Callable[..., Value],
        join: Callable[..., Value],
    ) -> Value:
        """Reduce chunks elementwise, then across warps once."""
        padded = round_up(features, 64)
        full, rest = divmod(padded, self.chunk)
        parts: list[Value] = []
        if full:
            first = plgpu.layout_cast(at(0, self.chunk), WG)

            def step(i: Any, c: Value) -> Value:
                return join(
                    c, at(pl.multiple_of(i * self.chunk, self.chunk), self.chunk)
                )

            total = lax.fori_loop(1, full, step, first) if full > 1 else first
            parts.append(reduce(total, axis=0))
        if rest:
            parts.append(reduce(at(full * self.chunk, rest), axis=0))
        return functools.reduce(join, parts)
