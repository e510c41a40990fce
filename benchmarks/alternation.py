"""Plans and inputs in turn, for 100,000 launches: are all of them like the first?

A counter that is not back at zero, a page that is read too early or a write that comes
too late shows as other logits, perhaps once in many launches. So every launch is
compared, bitwise, with the first one of its plan and its input. Run it with soak.py.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mkdsl as mk
from benchmarks import megakernel
from benchmarks.shapes import DecodeShape
from mkdsl.lower.pipeline import Options
from models.cache import KVCache
from models.decode import decode_params
from models.registry import family_of

Array = Any
Tree = Any

# Inputs: each has lengths and tokens of its own.
INPUT_SETS = 4
# Batches and options of the plans.
BATCHES = (1, 2)
PLANS = {"fine": Options(), "coarse": Options(coarse=True)}


@dataclass(frozen=True, slots=True)
class Alternation:
    """One plan of the alternating run.

    Attributes:
        plan: "batch 2, coarse".
        launches: of this plan.
        mismatches: launches whose logits were not, bitwise, those of the first one
            with the same input.
        us_per_launch: microseconds, mean over all plans.
    """

    model: str
    implementation: str
    plan: str
    launches: int
    mismatches: int
    us_per_launch: float


def make_step(
    shape: DecodeShape,
    batch: int,
    slots: int,
    implementation: Any,
    options: Any = None,
    machine: Any = None,
) -> Any:
    """(params, cache, tokens) -> (logits [B, V], cache); lengths stay as they are."""
    config = megakernel.config_of(shape, slots)
    return mk.megakernel(
        family_of(config).decode_program(config, batch, slots, logits=True),
        donate_argnums=1,
        implementation=implementation,
        options=options,
        machine=machine,
    )


def params_of(shape: DecodeShape, slots: int) -> Tree:
    """The parameters of the decode benchmark."""
    config = megakernel.config_of(shape, slots)
    return decode_params(config, megakernel.stacked_params(shape))


def input_sets(batch: int, slots: int, vocab: int) -> tuple[Array, Array]:
    """lengths and tokens, int32 [INPUT_SETS, B] each; lengths grow with the set.

    A step writes the slot at its length. Since later sets alone read it, the caches are
    what they will stay after the first time that the sets were run in order.
    """
    at, row = np.arange(INPUT_SETS)[:, None], np.arange(batch)
    lengths = (slots - 1) * (at + 1) // INPUT_SETS - row
    return jnp.asarray(lengths, jnp.int32), jnp.asarray((7 * at + row + 5) % vocab)


def make_alternation(steps: Sequence[Any], sets: Sequence[tuple[Array, Array]]) -> Any:
    """jit of (params, caches, wanted, rounds) -> (caches, logits, mismatches).

    A round runs every input with every plan: `rounds * INPUT_SETS` launches of each.
    `wanted` are logits [INPUT_SETS, B, V] of each plan, and so are the logits returned,
    of the last round; mismatches are int32 [plans].
    """

    def run(params: Tree, caches: Any, wanted: Any, rounds: Array) -> Any:
        def launch(i: Array, state: Any) -> Any:
            caches, found, wrong = map(list, state)
            which = lax.rem(i, INPUT_SETS)
            for plan, step in enumerate(steps):
                lengths, tokens = (x[which] for x in sets[plan])
                cache = KVCache(caches[plan].k, caches[plan].v, lengths)
                logits, caches[plan] = step(params, cache, tokens)
                found[plan] = found[plan].at[which].set(logits)
                other = _bits(logits) != _bits(wanted[plan][which])
                wrong[plan] += jnp.any(other).astype(jnp.int32)
            return tuple(caches), tuple(found), tuple(wrong)

        zero = tuple(jnp.int32(0) for _ in steps)
        empty = tuple(map(jnp.zeros_like, wanted))
        return lax.fori_loop(0, rounds * INPUT_SETS, launch, (caches, empty, zero))

    return jax.jit(run, donate_argnums=1)


def _bits(logits: Array) -> Array:
    return lax.bitcast_convert_type(logits, jnp.uint32)


def alternate(
    shape: DecodeShape,
    launches: int,
    *,
    max_length: int,
    segment: int,
    implementation: Any,
    deadline: float,
) -> list[Alternation]:
    """Run plans and inputs in turn, `launches` in all, or until time is up.

    Args:
        segment: rounds in one jitted loop.
    """
    cases = [(batch, name) for batch in BATCHES for name in PLANS]
    params = params_of(shape, max_length)
    steps = [
        make_step(shape, batch, max_length, implementation, PLANS[name])
        for batch, name in cases
    ]
    sets = [input_sets(batch, max_length, shape.vocab) for batch, _ in cases]
    caches = tuple(megakernel.stacked_cache(shape, b, max_length) for b, _ in cases)
    wanted: Any = tuple(
        jnp.zeros((INPUT_SETS, batch, shape.vocab), jnp.float32) for batch, _ in cases
    )
    run = make_alternation(steps, sets)
    caches, wanted, _ = run(params, caches, wanted, jnp.int32(1))
    if not all(bool(jnp.isfinite(w).all()) for w in wanted):
        raise ValueError("a logit of the first launches is not finite")
    counts, done, began = np.zeros(len(cases), int), 0, time.perf_counter()
    rounds = -(-launches // (INPUT_SETS * len(cases)))
    while done < rounds and time.perf_counter() < deadline:
        now = min(segment, rounds - done)
        caches, _, wrong = run(params, caches, wanted, jnp.int32(now))
        counts += np.array([int(w) for w in wrong])
        done += now
    each = done * INPUT_SETS
    us = (time.perf_counter() - began) / max(1, each * len(cases)) * 1e6
    return [
        Alternation(
            shape.name,
            str(implementation),
            f"batch {batch}, {name}",
            each,
            int(count),
            us,
        )
        for (batch, name), count in zip(cases, counts, strict=True)
    ]
