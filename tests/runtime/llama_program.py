"""A Llama decode step written in the DSL, as a user would write it.

`step(config, batch, slots)` is the program function, `example(config, ...)` makes
arguments for it. Parameters are the tree of models/params.py with the RoPE frequencies
beside it; the cache is a dictionary of k, v [L, B, KV, S, D] and lengths [B].
"""

import functools
from collections.abc import Callable
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


def step(
    config: LlamaConfig,
    batch: int,
    slots: int,
    *,
    dtype: Any = jnp.bfloat16,
    want: str = "token",
    rows: int = 64,
    head_rows: int = 256,
    block: int = 64,
) -> Callable[..., Tree]:
    """The program (params, cache, tokens) -> (token or logits, {"k": .., "v": ..})."""
    c, kv, dim = config, config.num_kv_heads, config.head_dim
    hidden, eps = c.hidden_size, c.norm_eps
    tile = mk.Spec((batch, rows), lambda i: (0, i))
    head = mk.Spec((batch, None, dim), lambda i: (0, i, 0))
    shape = functools.partial(mk.Shape, dtype=dtype)

    def by_rows(count: int, depth: int) -> mk.Spec:
        return mk.Spec((count, depth), lambda i: (i, 0))

    def embedding(table: Array, tokens: Array) -> Array:
        return mk.call(
            functools.partial(embed, scale=1.0),
            grid=(batch, mk.cdiv(hidden, 256)),
            in_specs=(mk.Spec((1, 256), lambda b, j: (tokens[b], j)),),
            out_specs=mk.Spec((1, 256), lambda b, j: (b, j)),
            out_shape=shape((batch, hidden)),
        )(table)

    def tables(lengths: Array, frequencies: Array) -> tuple[Array, Array]:
        table = mk.Spec((batch, dim), lambda: (0, 0))
        return mk.call(
            rope_table,
            in_specs=(mk.Spec((batch,), lambda: (0,), column=True), mk.whole),
            out_specs=(table, table),
            out_shape=(mk.Shape((batch, dim), jnp.float32),) * 2,
        )(lengths, frequencies)

    def attention(
        q: Array, k: Array, v: Array, old: tuple[Array, Array], i: Any, lengths: Array
    ) -> tuple[Array, Array, Array]:
        cached = mk.Spec(
            (None, None, mk.BoundedSlice(slots), dim),
            lambda b, g: (b, g, mk.ds(0, lengths[b]), 0),
        )
        group = mk.Spec((None, c.num_heads // kv, dim), lambda b, g: (b, g, 0))
        one = mk.Spec((None, 1, dim), lambda b, g: (b, g, 0))
        row = [
            mk.Into(x[i], (None, None, 1, dim), lambda b, g: (b, g, lengths[b], 0))
            for x in old
        ]
        return mk.call(
            functools.partial(attend, scale=dim**-0.5, block=block),
            grid=(batch, kv),
            in_specs=(group, cached, cached, one, one),
            out_specs=(group, *row),
            out_shape=(shape((batch, c.num_heads, dim)), None, None),
        )(q, old[0][i], old[1][i], k, v)

    def add_product(x: Array, h: Array, w: Array, name: str) -> Array:
        return mk.call(
            residual,
            grid=(mk.cdiv(hidden, rows),),
            in_specs=(tile, mk.whole, by_rows(rows, h.shape[1])),
            out_specs=tile,
            out_shape=shape((batch, hidden)),
            name=name,
        )(x, h, w)

    def program(params: Tree, cache: Tree, tokens: Array) -> Tree:
        lengths = cache["lengths"]
        x = embedding(params["embed"], tokens)
        cos, sin = tables(lengths, params["frequencies"])

        def layer(carry: Tree, p: Tree, i: Any) -> Tree:
            x, *old = carry
            specs = (mk.whole, mk.whole, by_rows(dim, hidden), mk.whole, mk.whole)

            def heads(task: Any, count: int, name: str, *more: Array) -> Array:
                return mk.call(
                    functools.partial(task, eps=eps),
                    grid=(count,),
                    in_specs=specs[: 3 + len(more)],
                    out_specs=head,
                    out_shape=shape((batch, count, dim)),
                    name=name,
                )(x, p["input_norm"], p[name], *more)

            q = heads(project_rope, c.num_heads, "q", cos, sin)
            k = heads(project_rope, kv, "k", cos, sin)
            v = heads(project, kv, "v")
            out, *new = attention(q, k, v, (old[0], old[1]), i, lengths)
            x = add_product(x, out.reshape(batch, c.num_heads * dim), p["o"], "o")
            u = mk.call(
                functools.partial(gate_up, eps=eps),
                grid=(mk.cdiv(c.intermediate_size, rows),),
                in_specs=(mk.whole, mk.whole, *(by_rows(rows, hidden),) * 2),
                out_specs=tile,
                out_shape=shape((batch, c.intermediate_size)),
            )(x, p["post_norm"], p["gate"], p["up"])
            return add_product(x, u, p["down"], "down"), *new

        carry = (x, cache["k"], cache["v"])
        x, k, v = mk.scan(layer, carry, params["layers"])
        result = sample(x, params["norm"], params.get("head", params["embed"]))
        return result, {"k": k, "v": v}

    def sample(x: Array, norm: Array, table: Array) -> Array:
        tiles = mk.cdiv(c.vocab_size, head_rows)
        specs = (mk.whole, mk.whole, by_rows(head_rows, hidden))
        constants = {"eps": eps, "unit_offset": False}
        if want == "logits":
            return mk.call(
                functools.partial(logits, **constants),
                grid=(tiles,),
                in_specs=specs,
                out_specs=mk.Spec((batch, head_rows), lambda i: (0, i)),
                out_shape=mk.Shape((batch, c.vocab_size), jnp.float32),
            )(x, norm, table)
        column = mk.Spec((batch, 1), lambda i: (0, i))
        values, tokens = mk.call(
            functools.partial(best, **constants),
            grid=(tiles,),
            in_specs=specs,
            out_specs=(column, column),
            out_shape=tuple(
                mk.Shape((batch, tiles), t) for t in (jnp.float32, jnp.int32)
            ),
        )(x, norm, table)
        return mk.call(
            pick,
            in_specs=(mk.whole, mk.whole),
            out_specs=mk.Spec((batch,), lambda: (0,), column=True),
            out_shape=mk.Shape((batch,), jnp.int32),
        )(values, tokens)

    return program


def example(
    config: LlamaConfig,
    lengths: list[int],
    slots: int,
    *,
    dtype: Any = jnp.bfloat16,
    unused: float = np.nan,
    seed: int = 0,
) -> tuple[Tree, Tree, Array]:
    """Arguments of `step`: parameters, a cache filled up to `lengths`, and tokens.

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
