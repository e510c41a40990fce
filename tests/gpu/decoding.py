"""Decode loops, their oracle, and what the compiled HLO of a loop has to look like."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mkdsl as mk
from models.cache import KVCache
from models.registry import family_of

Array = Any
Tree = Any
Step = Callable[[Tree, KVCache, Array], tuple[Array, KVCache]]

CUSTOM_CALL = re.compile(r" custom-call\(.*custom_call_target=\"mosaic_gpu")
# The type, and the opcode behind it.
INSTRUCTION = re.compile(r" = (.*?) ([a-z][a-z-]*)\(")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")
# Instructions that move nothing.
FREE = frozenset("parameter tuple get-tuple-element bitcast while call".split())


def make_step(
    config: Any,
    batch: int,
    slots: int,
    implementation: Any,
    machine: Any = None,
    **options: Any,
) -> Any:
    """`(decode_params, cache, tokens) -> (tokens or logits, cache)`, a megakernel.

    Args:
        machine: to lower for where there is no GPU.
        options: of `decode_program`.
    """
    return mk.megakernel(
        family_of(config).decode_program(config, batch, slots, **options),
        donate_argnums=1,
        implementation=implementation,
        machine=machine,
    )


def advance(cache: KVCache) -> KVCache:
    """The program leaves the lengths as they are."""
    return replace(cache, lengths=cache.lengths + 1)


def filled_cache(
    config: Any, lengths: Sequence[int], slots: int, key: Any, unused: float = np.nan
) -> KVCache:
    """Standard normal bf16 up to `lengths`, and from there on `unused`."""
    size = config.num_layers, len(lengths), config.num_kv_heads, slots, config.head_dim
    used = jnp.asarray(lengths, jnp.int32)
    return KVCache(*_filled(size, key, used, unused), used)


@partial(jax.jit, static_argnums=0)
def _filled(
    size: tuple[int, ...], key: Any, used: Array, unused: float
) -> tuple[Array, Array]:
    exists = (jnp.arange(size[3]) < used[:, None])[None, :, None, :, None]

    def rows(key: Any) -> Array:
        values = jax.random.normal(key, size, jnp.bfloat16)
        return jnp.where(exists, values, jnp.asarray(unused, jnp.bfloat16))

    k, v = jax.random.split(key)
    return rows(k), rows(v)


def greedy_loop(step: Step, most: int) -> Any:
    """jit of (params, cache, tokens [B], n) -> (tokens [most, B], cache).

    One executable for every n <= most and all lengths; the cache is donated. Rows of
    the result from n on are -1.
    """

    def run(params: Tree, cache: KVCache, tokens: Array, n: Array) -> Any:
        def one(i: Array, state: Any) -> Any:
            cache, tokens, all_tokens = state
            tokens, cache = step(params, cache, tokens)
            return advance(cache), tokens, all_tokens.at[i].set(tokens)

        none = jnp.full((most, tokens.shape[0]), -1, jnp.int32)
        cache, _, all_tokens = lax.fori_loop(0, n, one, (cache, tokens, none))
        return all_tokens, cache

    return jax.jit(run, donate_argnums=1)


def forced_loop(step: Step) -> Any:
    """jit of (params, cache, ids [n, B]) -> (outputs of all steps [n, B, ..], cache).

    The cache is donated.
    """

    def run(params: Tree, cache: KVCache, ids: Array) -> Any:
        def one(cache: KVCache, tokens: Array) -> tuple[KVCache, Array]:
            out, cache = step(params, cache, tokens)
            return advance(cache), out

        cache, outs = lax.scan(one, cache, ids)
        return outs, cache

    return jax.jit(run, donate_argnums=1)


@partial(jax.jit, static_argnums=(0, 4))
def oracle_loop(
    config: Any, params: Tree, cache: KVCache, ids: Array, dtype: Any
) -> tuple[Array, KVCache]:
    """Logits [n, B, V] of plain JAX on the same tokens, one at a time, and the cache.

    Args:
        dtype: to compute in; bf16 parameters and cache are converted to it.
    """
    prefill = family_of(config).prefill
    params = {name: x for name, x in params.items() if "frequencies" not in name}
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    cache = replace(cache, k=cache.k.astype(dtype), v=cache.v.astype(dtype))

    def one(cache: KVCache, tokens: Array) -> tuple[KVCache, Array]:
        logits, cache = prefill(
            config, params, cache, tokens[:, None], jnp.ones_like(tokens)
        )
        return cache, logits

    cache, logits = lax.scan(one, cache, ids)
    return logits, cache


def inputs_of(first: Array, chosen: Array) -> Array:
    """The tokens that a greedy loop read: the first, then all chosen but the last."""
    return jnp.concatenate([first[None], chosen[:-1]])


@jax.jit
def logit_gap(logits: Array, chosen: Array) -> Array:
    """How far below the largest logit each chosen token is: [n, B]."""
    mine = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    return jnp.max(logits, axis=-1) - mine


@jax.jit
def new_rows(cache: KVCache, before: Array) -> tuple[Array, Array, Array]:
    """Which slots were appended after `before`; and k and v, zero elsewhere."""
    slot = jnp.arange(cache.max_length)
    new = (slot >= before[:, None]) & (slot < cache.lengths[:, None])
    new = new[None, :, None, :, None]
    k, v = (jnp.where(new, x.astype(jnp.float32), 0) for x in (cache.k, cache.v))
    return new, k, v


@jax.jit
def relative_error(found: Any, expected: Any) -> Array:
    """Norm of the difference over the norm, of two trees together."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    squares = [(jnp.sum((a - b) ** 2), jnp.sum(b**2)) for a, b in pairs]
    return jnp.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares))


@jax.jit
def same_bits(a: Tree, b: Tree) -> Array:
    """Whether two trees are equal, NaN to NaN."""

    def bits(x: Array) -> Array:
        sizes = {2: jnp.uint16, 4: jnp.uint32}
        return lax.bitcast_convert_type(x, sizes[x.dtype.itemsize])

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.stack([jnp.all(bits(x) == bits(y)) for x, y in pairs]).all()


@jax.jit
def same_outside(cache: KVCache, old: KVCache) -> Array:
    """Whether only appended slots differ from the old cache, bitwise."""
    new, *_ = new_rows(cache, old.lengths)
    kept = [
        (jnp.where(new, 0, a), jnp.where(new, 0, b))
        for a, b in ((cache.k, old.k), (cache.v, old.v))
    ]
    return same_bits([a for a, _ in kept], [b for _, b in kept])


def computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """(first line, instructions) of each computation of an HLO text."""
    head, body = "", []
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            head, body = line, []
        elif line.startswith("}"):
            yield head, body
        else:
            body.append(line)


def kernel_calls(hlo: str) -> list[tuple[str, list[str]]]:
    """The computation of every call of a Mosaic kernel."""
    return [
        (head, body)
        for head, body in computations(hlo)
        for line in body
        if CUSTOM_CALL.search(line)
    ]


def elements(line: str) -> int:
    """Elements of the largest array that an instruction gives."""
    made = INSTRUCTION.search(line)
    shapes = SHAPE.findall(made[1]) if made else []
    return max(
        (prod(int(n) for n in dims.split(",") if n) for dims in shapes), default=0
    )


def opcode(line: str) -> str:
    """E.g. "get-tuple-element"; empty for a line that is no instruction."""
    made = INSTRUCTION.search(line)
    return made[2] if made else ""


def large(lines: Iterable[str], size: int) -> list[tuple[str, str]]:
    """(opcode, line) of instructions that move or make so many elements, or more."""
    named = ((opcode(line), line.strip()) for line in lines if elements(line) >= size)
    return [(code, line) for code, line in named if code not in FREE]
