"""A Llama decode step written in the DSL, as a user would write it.

`LlamaStep(config, batch, slots)` is the program function, `example(config, ..)` makes
arguments for it. Parameters are the tree of models/params.py with the RoPE frequencies
beside it; the cache is a dictionary of k, v [L, B, KV, S, D] and lengths [B].
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from models import rope
from models.config import Rope
from models.llama import LlamaConfig, leaves
from models.params import random_tree
from models.tasks.attention import attend
from models.tasks.linear import gate_up, project, project_rope, residual
from models.tasks.rope import rope_table
from models.tasks.sample import best, embed, logits, pick

Array = Any
Tree = Any

TINY = LlamaConfig(
    vocab_size=509,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    tied=True,
    max_length=256,
    rope=Rope(theta=10_000.0),
)


@dataclass(frozen=True)
class LlamaStep:
    """The program (params, cache, tokens) -> (token or logits, {"k": .., "v": ..}).

    Attributes:
        slots: of the cache, per row.
        want: "token" or "logits".
        rows, head_rows: rows of a weight in one task.
        block: cached rows in one block of attention.
    """

    config: LlamaConfig
    batch: int
    slots: int
    dtype: Any = jnp.bfloat16
    want: str = "token"
    rows: int = 64
    head_rows: int = 256
    block: int = 64

    def __call__(self, params: Tree, cache: Tree, tokens: Array) -> Tree:
        lengths = cache["lengths"]
        x = self.embedding(params["embed"], tokens)
        cos, sin = self.tables(lengths, params["frequencies"])

        def layer(carry: Tree, p: Tree, i: Any) -> Tree:
            x, k_cache, v_cache = carry
            q = self.heads(project_rope, "q", self.config.num_heads, x, p, cos, sin)
            k = self.heads(project_rope, "k", self.config.num_kv_heads, x, p, cos, sin)
            v = self.heads(project, "v", self.config.num_kv_heads, x, p)
            old = k_cache[i], v_cache[i]
            out, k_cache, v_cache = self.attention(q, k, v, *old, lengths)
            x = self.add_product(x, out.reshape(self.batch, -1), p["o"], "o")
            u = self.gated(x, p)
            return self.add_product(x, u, p["down"], "down"), k_cache, v_cache

        carry = x, cache["k"], cache["v"]
        x, k, v = mk.scan(layer, carry, params["layers"])
        table = params.get("head", params["embed"])
        last = self.logits if self.want == "logits" else self.token
        return last(x, params["norm"], table), {"k": k, "v": v}

    def shape(self, *sizes: int) -> mk.Shape:
        """An array of activations."""
        return mk.Shape((self.batch, *sizes), self.dtype)

    @property
    def tile(self) -> mk.Spec:
        """`rows` features of all columns."""
        return mk.Spec((self.batch, self.rows), lambda i: (0, i))

    def by_rows(self, rows: int, depth: int) -> mk.Spec:
        """Whole rows of a weight."""
        return mk.Spec((rows, depth), lambda i: (i, 0))

    def embedding(self, table: Array, tokens: Array) -> Array:
        """[B, h]."""
        hidden = self.config.hidden_size
        return mk.call(
            functools.partial(embed, scale=1.0),
            grid=(self.batch, mk.cdiv(hidden, 256)),
            in_specs=(mk.Spec((1, 256), lambda b, j: (tokens[b], j)),),
            out_specs=mk.Spec((1, 256), lambda b, j: (b, j)),
            out_shape=self.shape(hidden),
        )(table)

    def tables(self, lengths: Array, frequencies: Array) -> tuple[Array, Array]:
        """cos and sin, [B, D] float32."""
        size = self.batch, self.config.head_dim
        return mk.call(
            rope_table,
            in_specs=(mk.Spec((self.batch,), lambda: (0,), column=True), mk.whole),
            out_specs=(mk.Spec(size, lambda: (0, 0)),) * 2,
            out_shape=(mk.Shape(size, jnp.float32),) * 2,
        )(lengths, frequencies)

    def heads(
        self, task: Any, name: str, count: int, x: Array, p: Tree, *tables: Array
    ) -> Array:
        """A projection with one head a task: [B, heads, D]."""
        c = self.config
        weight = self.by_rows(c.head_dim, c.hidden_size)
        return mk.call(
            functools.partial(task, eps=c.norm_eps),
            grid=(count,),
            in_specs=(mk.whole, mk.whole, weight, *(mk.whole for _ in tables)),
            out_specs=mk.Spec((self.batch, None, c.head_dim), lambda i: (0, i, 0)),
            out_shape=self.shape(count, c.head_dim),
            name=name,
        )(x, p["input_norm"], p[name], *tables)

    def attention(
        self, q: Array, k: Array, v: Array, k_old: Array, v_old: Array, lengths: Array
    ) -> tuple[Array, Array, Array]:
        """Attended values [B, H, D], and the caches with the new token."""
        c, dim = self.config, self.config.head_dim
        cached = mk.Spec(
            (None, None, mk.BoundedSlice(self.slots), dim),
            lambda b, g: (b, g, mk.ds(0, lengths[b]), 0),
        )
        group = mk.Spec(
            (None, c.num_heads // c.num_kv_heads, dim), lambda b, g: (b, g, 0)
        )
        one = mk.Spec((None, 1, dim), lambda b, g: (b, g, 0))

        def row(cache: Array) -> mk.Into:
            return mk.Into(
                cache, (None, None, 1, dim), lambda b, g: (b, g, lengths[b], 0)
            )

        return mk.call(
            functools.partial(attend, scale=dim**-0.5, block=self.block),
            grid=(self.batch, c.num_kv_heads),
            in_specs=(group, cached, cached, one, one),
            out_specs=(group, row(k_old), row(v_old)),
            out_shape=(self.shape(c.num_heads, dim), None, None),
        )(q, k_old, v_old, k, v)

    def add_product(self, x: Array, h: Array, w: Array, name: str) -> Array:
        """x + h @ w.T."""
        hidden = self.config.hidden_size
        return mk.call(
            residual,
            grid=(mk.cdiv(hidden, self.rows),),
            in_specs=(self.tile, mk.whole, self.by_rows(self.rows, h.shape[1])),
            out_specs=self.tile,
            out_shape=self.shape(hidden),
            name=name,
        )(x, h, w)

    def gated(self, x: Array, p: Tree) -> Array:
        """The activation inside the MLP, [B, I]."""
        c = self.config
        weight = self.by_rows(self.rows, c.hidden_size)
        return mk.call(
            functools.partial(gate_up, eps=c.norm_eps),
            grid=(mk.cdiv(c.intermediate_size, self.rows),),
            in_specs=(mk.whole, mk.whole, weight, weight),
            out_specs=self.tile,
            out_shape=self.shape(c.intermediate_size),
        )(x, p["post_norm"], p["gate"], p["up"])

    def logits(self, x: Array, norm: Array, table: Array) -> Array:
        """[B, V] float32."""
        c, rows = self.config, self.head_rows
        return mk.call(
            functools.partial(logits, eps=c.norm_eps, unit_offset=False),
            grid=(mk.cdiv(c.vocab_size, rows),),
            in_specs=(mk.whole, mk.whole, self.by_rows(rows, c.hidden_size)),
            out_specs=mk.Spec((self.batch, rows), lambda i: (0, i)),
            out_shape=mk.Shape((self.batch, c.vocab_size), jnp.float32),
        )(x, norm, table)

    def token(self, x: Array, norm: Array, table: Array) -> Array:
        """The likeliest token, int32 [B]."""
        c, batch = self.config, self.batch
        tiles = mk.cdiv(c.vocab_size, self.head_rows)
        found = mk.call(
            functools.partial(best, eps=c.norm_eps, unit_offset=False),
            grid=(tiles,),
            in_specs=(mk.whole, mk.whole, self.by_rows(self.head_rows, c.hidden_size)),
            out_specs=(mk.Spec((batch, 1), lambda i: (0, i)),) * 2,
            out_shape=(
                mk.Shape((batch, tiles), jnp.float32),
                mk.Shape((batch, tiles), jnp.int32),
            ),
        )(x, norm, table)
        return mk.call(
            pick,
            in_specs=(mk.whole, mk.whole),
            out_specs=mk.Spec((batch,), lambda: (0,), column=True),
            out_shape=mk.Shape((batch,), jnp.int32),
        )(*found)


def example(
    config: LlamaConfig,
    lengths: list[int],
    slots: int,
    *,
    dtype: Any = jnp.bfloat16,
    unused: float = np.nan,
    seed: int = 0,
) -> tuple[Tree, Tree, Array]:
    """Arguments of `LlamaStep`: parameters, a cache filled up to `lengths`, and tokens.

    Args:
        unused: what the slots beyond `lengths` hold.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    params = random_tree(leaves(config), keys[0], dtype)
    pairs = np.tile(rope.frequencies(config.rope, config.head_dim), 2)[None]
    batch, used = len(lengths), np.asarray(lengths)
    size = (config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
    exists = (np.arange(slots) < used[:, None])[None, :, None, :, None]
    k, v = jnp.where(exists, jax.random.normal(keys[1], (2, *size)), unused)
    cache = {
        "k": k.astype(dtype),
        "v": v.astype(dtype),
        "lengths": jnp.asarray(used, jnp.int32),
    }
    tokens = jax.random.randint(keys[2], (batch,), 0, config.vocab_size)
    return {**params, "frequencies": jnp.asarray(pairs)}, cache, tokens
