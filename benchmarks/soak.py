"""Long runs: does a kernel stay right and fast over 20,000 tokens or 100,000 launches?

    python -m benchmarks.soak --model llama-3.2-1b --tokens 20000 --max-length 8192
    python -m benchmarks.soak --alternate 100000 --max-length 1024

The first generates text greedily in one jitted loop per segment. The cache grows up to
its end and then starts anew: from there on every token must be as it was, and so must
the time of a segment at the same positions. Within a round it may grow with the bytes
of the cache. The second runs plans in turn, with inputs in turn, and compares the
logits of every launch with those of the first one, bitwise (alternation.py).

All logits are checked, so the timed step has those as its result, and XLA chooses the
token: it is slower than that of bench_decode.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import megakernel, results
from benchmarks.alternation import Alternation, alternate, make_step, params_of
from benchmarks.shapes import SHAPES, DecodeShape
from models.cache import KVCache

Array = Any
Tree = Any

INPUTS = (
    "random: bf16 weights normal with std 0.02, gains of norms 1 plus that, cache "
    "standard normal, first token of row r is 5 + r"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """Some hundred tokens of the long text.

    Attributes:
        round: how often the cache has started anew before.
        position: positions cached before the segment.
        steps: tokens of each row.
        us_per_token: microseconds of one step, mean.
        bytes: that a step must read at least, mean; see DecodeShape.step_bytes.
        finite: whether every logit was.
        repeated: whether tokens are those of the first round; None in it.
    """

    model: str
    batch: int
    implementation: str
    round: int
    position: int
    steps: int
    us_per_token: float
    bytes: int
    finite: bool
    repeated: bool | None


def make_segment(step: Any, steps: int) -> Any:
    """jit of (params, cache, tokens) -> (cache, tokens, all tokens [n, B], finite)."""

    def segment(params: Tree, cache: KVCache, tokens: Array) -> Any:
        def one(i: Array, state: Any) -> Any:
            cache, tokens, found, finite = state
            logits, cache = step(params, cache, tokens)
            tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            cache = KVCache(cache.k, cache.v, cache.lengths + 1)
            found = found.at[i].set(tokens)
            return cache, tokens, found, finite & jnp.isfinite(logits).all()

        found = jnp.zeros((steps, tokens.shape[0]), jnp.int32)
        return lax.fori_loop(0, steps, one, (cache, tokens, found, jnp.bool_(True)))

    return jax.jit(segment, donate_argnums=1)


def generate(
    shape: DecodeShape,
    batch: int,
    tokens: int,
    *,
    max_length: int,
    segment: int,
    context: int,
    implementation: Any,
    deadline: float,
) -> Iterator[Segment]:
    """Run segment after segment, until all tokens are there or time is up.

    Args:
        tokens: of each row, in all.
        context: positions cached at the start of a round.
        deadline: of time.perf_counter; no segment starts behind it.

    Raises:
        ValueError: a segment does not fit in the cache.
    """
    if context + segment > max_length:
        raise ValueError(f"{context=} + {segment=} does not fit in {max_length=}")
    params = params_of(shape, max_length)
    run = make_segment(make_step(shape, batch, max_length, implementation), segment)
    cache = megakernel.stacked_cache(shape, batch, max_length)
    first = jnp.arange(batch, dtype=jnp.int32) + 5
    known: dict[int, np.ndarray] = {}

    def start(cache: KVCache) -> KVCache:
        # What was generated stays where it is: slots behind the length are unused.
        return KVCache(cache.k, cache.v, jnp.full(batch, context, jnp.int32))

    cache, *_ = run(params, start(cache), first)  # compiles, and warms up
    cache, token, position, round_ = start(cache), first, context, 0
    for _ in range(tokens // segment):
        if time.perf_counter() > deadline:
            return
        if position + segment > max_length:
            cache, token, position, round_ = start(cache), first, context, round_ + 1
        jax.block_until_ready(cache)
        began = time.perf_counter()
        cache, token, found, finite = run(params, cache, token)
        jax.block_until_ready(token)
        us = (time.perf_counter() - began) / segment * 1e6
        before = known.setdefault(position, np.asarray(found))
        yield Segment(
            shape.name,
            batch,
            str(implementation),
            round_,
            position,
            segment,
            us,
            shape.step_bytes(batch, position, segment),
            bool(finite),
            bool((before == found).all()) if round_ else None,
        )
        position += segment


def faults(rows: Sequence[Segment], drift: float) -> list[str]:
    """What is wrong with a long text.

    Args:
        drift: share by which a segment may be slower than the first one of its round,
            bytes aside, and than that of the first round at the same position.
    """
    found: list[str] = []
    at = {row.position: row for row in reversed(rows)}  # the first round wins
    opening = {row.round: row for row in reversed(rows)}
    for row in rows:
        where = f"round {row.round}, position {row.position}"
        if not row.finite:
            found.append(f"{where}: a logit is not finite")
        if row.repeated is False:
            found.append(f"{where}: other tokens than in the first round")
        start, same = opening[row.round], at[row.position]
        growth = row.us_per_token / start.us_per_token
        if growth > (1 + drift) * row.bytes / start.bytes:
            found.append(
                f"{where}: {growth:.3f} times the time of the first segment of the "
                f"round, for {row.bytes / start.bytes:.3f} times its bytes"
            )
        if row.us_per_token > (1 + drift) * same.us_per_token:
            ratio = row.us_per_token / same.us_per_token
            found.append(f"{where}: {ratio:.3f} times the time of the first round")
    return found


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", help=", ".join(SHAPES))
    add("--batch", type=int, default=1)
    add("--tokens", type=int, default=20_000, help="of each row")
    add("--max-length", type=int, default=8192, help="positions of the cache")
    add("--context", type=int, default=1, help="positions cached at the start")
    add(
        "--segment", type=int, default=500, help="tokens, or rounds, of one jitted loop"
    )
    add("--alternate", type=int, help="this many launches of plans in turn, no text")
    add("--seconds", type=float, default=600, help="then no segment starts any more")
    add("--drift", type=float, default=0.1, help="share that a segment may be slower")
    add("--implementation", default="mosaic_gpu", help="mosaic_gpu, xla or simulate")
    add("--out", type=Path, default=results.RESULTS, help="folder of the JSON file")
    add("--commit", help="to record where there is no git")
    return parser.parse_args(arguments)


def _line(row: Segment | Alternation) -> str:
    if isinstance(row, Alternation):
        return (
            f"{row.plan:16} {row.launches:7} launches  {row.mismatches} mismatches  "
            f"{row.us_per_launch:9.1f} us"
        )
    rate = row.bytes / row.us_per_token / 1e6
    state = {None: "first round", True: "as in the first", False: "OTHER TOKENS"}
    return (
        f"round {row.round} position {row.position:6} {row.us_per_token:9.1f} us/token "
        f"{rate:6.3f} TB/s  {state[row.repeated]}{'' if row.finite else '  NOT FINITE'}"
    )


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    shape, deadline = SHAPES[options.model], time.perf_counter() + options.seconds
    head = results.collect_head(arguments, {}, INPUTS, options.commit)
    common = {
        "max_length": options.max_length,
        "segment": options.segment,
        "implementation": options.implementation,
        "deadline": deadline,
    }
    rows: list[Any] = []
    # The simulator runs on the host, and is not called from inside of jax.jit.
    with jax.disable_jit(options.implementation == "simulate"):
        if options.alternate:
            made = iter(alternate(shape, options.alternate, **common))
        else:
            text = partial(generate, shape, options.batch, options.tokens, **common)
            made = text(context=options.context)
        for row in made:
            rows.append(row)
            print(_line(row), flush=True)
            path = results.write("soak", head, rows, folder=options.out)
    if options.alternate:
        wrong = [f"{r.plan}: {r.mismatches} mismatches" for r in rows if r.mismatches]
        done, planned = sum(r.launches for r in rows), options.alternate
    else:
        wrong = faults(rows, options.drift)
        done, planned = sum(r.steps for r in rows), options.tokens
    batch = 0 if options.alternate else options.batch
    failed = [
        results.Failure(shape.name, batch, options.context, "soak", w) for w in wrong
    ]
    path = results.write("soak", head, rows, failed, options.out)
    if done < planned - options.segment:
        print(f"time is up after {done} of {planned}")
    for fault in wrong:
        print(f"FAILED {fault}")
    print(f"written: {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
