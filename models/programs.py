"""What the decode programs of the families have in common: calls on one token a row.

A decode program is `f(params, cache, tokens) -> (tokens or logits, cache)`, written
with mk.call: `decode_program` of each family. Row b is at position `cache.lengths[b]`:
its key and value go to that slot, which must exist; the program leaves `lengths` as it
is. `Step` holds the sizes; its methods record one call each, or a few.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from models import rope
from models.cache import KVCache
from models.config import ModelConfig, Rope
from models.params import Params
from models.tasks import attention, sample
from models.tasks.rope import rope_table
from models.tasks.sandwich import add_branch

type Array = Any
"""An array of the program."""

# Candidates that one argmax task reads: its operands stay in shared memory as a whole.
MOST_CANDIDATES = 128
# Rows of the vocabulary matrix in one task: many, so that few candidates are left.
VOCABULARY_TILES = (256, 128, 64)


def twice(kind: Rope, head_dim: int) -> Any:
    """Inverse frequency of every feature of a head, float32 [1, D]."""
    return jnp.asarray(np.tile(rope.frequencies(kind, head_dim), 2)[None])


def head_of(params: Params) -> Array:
    """The vocabulary matrix [V, h], tied to the embedding or not."""
    return params.get("head", params["embed"])


@dataclass(frozen=True, slots=True)
class Step:
    """Sizes of a decode step.

    Attributes:
        config: Of the model.
        batch: Rows, one token each (B).
        max_length: Slots of the cache (S).
        dtype: Of activations, that of the parameters.
        rows: Rows of a weight in one task; None for what the machine likes.
        vocabulary_rows: Rows of the vocabulary matrix in one task; None likewise.
        block: Cached tokens in one block of attention.
        machine: That the tiles are for; None for the one that the kernel is made for.
    """

    config: ModelConfig
    batch: int
    max_length: int
    dtype: Any
    rows: int | None = None
    vocabulary_rows: int | None = None
    block: int = 64
    machine: Any = None

    def shape(self, *sizes: int) -> mk.Shape:
        """An array of activations, [B, *sizes]."""
        return mk.Shape((self.batch, *sizes), self.dtype)

    def weight(self, rows: int, depth: int) -> mk.Spec:
        """The i-th block of whole rows of a matrix."""
        return mk.Spec((rows, depth), lambda i: (i, 0))

    def tile(self, rows: int) -> mk.Spec:
        """The i-th block of `rows` features of all rows of the batch."""
        return mk.Spec((self.batch, rows), lambda i: (0, i))

    def embed(self, task: Any, results: int, table: Array, tokens: Array) -> Any:
        """Rows `tokens` of the embedding: [B, h], or as many as the task returns."""
        hidden, width = self.config.hidden_size, 256
        out = mk.Spec((1, width), lambda b, j: (b, j))
        return mk.call(
            task,
            grid=(self.batch, mk.cdiv(hidden, width)),
            in_specs=(mk.Spec((1, width), lambda b, j: (tokens[b], j)),),
            out_specs=out if results == 1 else (out,) * results,
            out_shape=(
                self.shape(hidden) if results == 1 else (self.shape(hidden),) * results
            ),
            name="embed",
        )(table)

    def tables(self, lengths: Array, frequencies: Array) -> tuple[Array, Array]:
        """Cosines and sines at the position of each row, float32 [B, D] each."""
        size = (self.batch, self.config.head_dim)
        return mk.call(
            rope_table,
            in_specs=(mk.Spec((self.batch,), lambda: (0,), column=True), mk.whole),
            out_specs=(mk.Spec(size, lambda: (0, 0)),) * 2,
            out_shape=(mk.Shape(size, jnp.float32),) * 2,
        )(lengths, frequencies)

    def heads(
        self,
        task: Any,
        name: str,
        count: int,
        before: tuple[Array, ...],
        w: Array,
        after: tuple[Array, ...] = (),
    ) -> Array:
        """A projection with one head a task: [B, heads, D].

        Args:
            task: Called on `before`, a block of rows of `w`, and `after`.
        """
        dim = self.config.head_dim
        return mk.call(
            task,
            grid=(count,),
            in_specs=(
                *(mk.whole for _ in before),
                self.weight(dim, self.config.hidden_size),
                *(mk.whole for _ in after),
            ),
            out_specs=mk.Spec((self.batch, None, dim), lambda i: (0, i, 0)),
            out_shape=self.shape(count, dim),
            name=name,
        )(*before, w, *after)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: KVCache,
        layer: Any,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Array, KVCache]:
        """Attend over cached tokens and the new one, and append that to the cache.

        Args:
            q: [B, H, D], after RoPE.
            k, v: [B, KV, D] of the new token.
            cache: Its slots [0, length) are read; slot `length` is written.
            layer: Of the cache.
            window: Tokens that are seen, the new one included; None for all.

        Returns:
            [B, H * D], and the cache.
        """
        c, dim = self.config, self.config.head_dim
        lengths: Any = cache.lengths
        most = self.max_length if window is None else min(self.max_length, window - 1)

        def seen(b: Any, g: Any) -> Any:
            first = 0 if window is None else mk.maximum(0, lengths[b] + (1 - window))
            return b, g, mk.ds(first, lengths[b] - first), 0

        def slot(pages: Array) -> mk.Into:
            return mk.Into(
                pages[layer],
                (None, None, 1, dim),
                lambda b, g: (b, g, lengths[b], 0),
            )

        old = mk.Spec((None, None, mk.BoundedSlice(max(1, most)), dim), seen)
        group = mk.Spec(
            (None, c.num_heads // c.num_kv_heads, dim), lambda b, g: (b, g, 0)
        )
        one = mk.Spec((None, 1, dim), lambda b, g: (b, g, 0))
        grid = (self.batch, c.num_kv_heads)
        out = mk.call(
            partial(attention.attend, scale=scale, block=self.block),
            grid=grid,
            in_specs=(group, old, old, one, one),
            out_specs=group,
            out_shape=self.shape(c.num_heads, dim),
        )(q, cache.k[layer], cache.v[layer], k, v)
        k_pages, v_pages = mk.call(
            attention.append,
            grid=grid,
            in_specs=(one, one),
            out_specs=(slot(cache.k), slot(cache.v)),
            out_shape=(None, None),
        )(k, v)
        out = out.reshape(self.batch, c.num_heads * dim)
        return out, KVCache(k_pages, v_pages, lengths)

    def by_rows(
        self,
        task: Any,
        name: str,
        count: int,
        before: tuple[Array, ...],
        *weights: Array,
        tiled: int = 0,
        normed: bool = False,
    ) -> Array:
        """A projection to `count` features, some of them a task: [B, count].

        Args:
            task: Called on `before` and a block of rows of each weight.
            tiled: How many of `before` it sees by tiles as its result, the first ones.
            normed: Whether it norms what it multiplies.
        """
        depth = weights[0].shape[1]
        rows = self.rows or mk.projection_rows(
            count,
            depth,
            self.batch,
            self.machine,
            weights=len(weights),
            computed=normed,
        )
        tile = self.tile(rows)
        return mk.call(
            task,
            grid=(mk.cdiv(count, rows),),
            in_specs=(
                *(tile if i < tiled else mk.whole for i in range(len(before))),
                *(self.weight(rows, depth) for _ in weights),
            ),
            out_specs=tile,
            out_shape=self.shape(count),
            name=name,
        )(*before, *weights)

    def add_branch(self, x: Array, y: Array, y_gain: Array) -> Array:
        """x + norm(y), [B, h], see `tasks/sandwich.py`."""
        hidden, rows = self.config.hidden_size, self.rows or 64
        gain, tile = mk.Spec((rows,), lambda i: (i,)), self.tile(rows)
        return mk.call(
            partial(add_branch, eps=self.config.norm_eps),
            grid=(mk.cdiv(hidden, rows),),
            in_specs=(tile, tile, mk.whole, gain),
            out_specs=tile,
            out_shape=self.shape(hidden),
        )(x, y, y, y_gain)

    def result(
        self,
        x: Array,
        gain: Array,
        table: Array,
        *,
        unit_offset: bool,
        logits: bool,
        scores: bool,
    ) -> Any:
        """What a decode step returns: `logits`, or `greedy` with or without scores."""
        if logits:
            return self.logits(x, gain, table, unit_offset=unit_offset)
        tokens, best = self.greedy(x, gain, table, unit_offset=unit_offset)
        return (tokens, best) if scores else tokens

    def logits(
        self, x: Array, gain: Array, table: Array, *, unit_offset: bool
    ) -> Array:
        """Scores of the whole vocabulary, float32 [B, V]."""
        c, rows = self.config, self._vocabulary_rows
        return mk.call(
            partial(sample.logits, eps=c.norm_eps, unit_offset=unit_offset),
            grid=(mk.cdiv(c.vocab_size, rows),),
            in_specs=(mk.whole, mk.whole, self.weight(rows, c.hidden_size)),
            out_specs=mk.Spec((self.batch, rows), lambda i: (0, i)),
            out_shape=mk.Shape((self.batch, c.vocab_size), jnp.float32),
        )(x, gain, table)

    def greedy(
        self, x: Array, gain: Array, table: Array, *, unit_offset: bool
    ) -> tuple[Array, Array]:
        """Tokens of the largest scores, lowest on ties, int32 [B]; the scores."""
        c, rows = self.config, self._vocabulary_rows
        count = mk.cdiv(c.vocab_size, rows)
        found = mk.call(
            partial(sample.best, eps=c.norm_eps, unit_offset=unit_offset),
            grid=(count,),
            in_specs=(mk.whole, mk.whole, self.weight(rows, c.hidden_size)),
            out_specs=self._candidate,
            out_shape=self._candidates(count),
        )(x, gain, table)
        while count > MOST_CANDIDATES:
            count = mk.cdiv(count, MOST_CANDIDATES)
            block = mk.Spec((self.batch, MOST_CANDIDATES), lambda i: (0, i))
            found = mk.call(
                sample.better,
                grid=(count,),
                in_specs=(block, block),
                out_specs=self._candidate,
                out_shape=self._candidates(count),
            )(*found)
        row, size = mk.Spec((self.batch,), lambda: (0,), column=True), (self.batch,)
        return mk.call(
            sample.pick,
            in_specs=(mk.whole, mk.whole),
            out_specs=(row, row),
            out_shape=(mk.Shape(size, jnp.int32), mk.Shape(size, jnp.float32)),
        )(*found)

    @property
    def _vocabulary_rows(self) -> int:
        c = self.config
        return self.vocabulary_rows or mk.projection_rows(
            c.vocab_size,
            c.hidden_size,
            self.batch,
            self.machine,
            computed=True,
            tiles=VOCABULARY_TILES,
        )

    @property
    def _candidate(self) -> tuple[mk.Spec, mk.Spec]:
        spec = mk.Spec((self.batch, 1), lambda i: (0, i))
        return spec, spec

    def _candidates(self, count: int) -> tuple[mk.Shape, mk.Shape]:
        size = (self.batch, count)
        return mk.Shape(size, jnp.float32), mk.Shape(size, jnp.int32)
