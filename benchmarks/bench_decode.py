"""Time per token of greedy decode, of every implementation on the same inputs.

    python -m benchmarks.bench_decode --models llama-3.2-1b --batches 1,8,16

Method, and how to plug an implementation in: README.md in this folder.
"""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import baselines, ceiling, results
from benchmarks.baselines import DecodeLoop, LoopResult, MakeStep
from benchmarks.shapes import SHAPES, DecodeShape

WARM_UPS = 3
INPUTS = (
    f"random: bf16 weights normal with std {baselines.WEIGHT_STD}, gains of norms 1 "
    "plus that, cache standard normal, first token of row r is 5 + r"
)

# The list to plug implementations into.
IMPLEMENTATIONS: dict[str, MakeStep] = {
    name: baselines.make_step_of(variant)
    for name, variant in baselines.VARIANTS.items()
}


@dataclass(frozen=True, slots=True)
class Case:
    shape: DecodeShape
    batch: int
    context: int
    max_length: int
    steps: int

    def __post_init__(self) -> None:
        if self.context + self.steps > self.max_length:
            raise ValueError(
                f"{self.context=} + {self.steps=} does not fit in {self.max_length=}"
            )

    @property
    def token(self) -> jax.Array:
        return jnp.arange(self.batch, dtype=jnp.int32) + 5

    @property
    def position(self) -> jax.Array:
        return jnp.int32(self.context)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a loop chose, on the host: tokens and scores are [steps, batch]."""

    tokens: np.ndarray
    scores: np.ndarray | None

    @classmethod
    def of(cls, result: LoopResult) -> "Outputs":
        scores = None if result.scores is None else np.asarray(result.scores)
        return cls(np.asarray(result.tokens), scores)

    def same_bits(self, other: "Outputs") -> bool:
        pairs = [(self.tokens, other.tokens)]
        if self.scores is not None and other.scores is not None:
            pairs.append((self.scores, other.scores))
        return all(a.tobytes() == b.tobytes() for a, b in pairs)


def reference_outputs(case: Case) -> Outputs:
    """The same loop in f32, on the same bf16 weights and cache."""
    make_step = baselines.make_step_of(baselines.REFERENCE)
    loop, (params, cache) = make_step(
        case.shape, case.batch, case.max_length, case.steps
    )
    return Outputs.of(loop(params, cache, case.token, case.position))


def time_loop(
    loop: DecodeLoop, params: object, cache: object, case: Case, repeats: int
) -> tuple[list[float], Outputs, LoopResult]:
    """Microseconds per step of each repeat, first outputs, last result.

    Every repeat starts at the same position on the cache that the last one returned:
    it overwrites the same rows with the same values.
    """
    token, position = case.token, case.position

    def run(cache: object) -> tuple[float, LoopResult]:
        jax.block_until_ready(cache)
        start = time.perf_counter()
        result = loop(params, cache, token, position)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / case.steps * 1e6, result

    _, result = run(cache)
    first = Outputs.of(result)
    for _ in range(WARM_UPS - 1):
        _, result = run(result.cache)
    us: list[float] = []
    for _ in range(repeats):
        elapsed, result = run(result.cache)
        us.append(elapsed)
    return us, first, result


def check_outputs(result: LoopResult, outputs: Outputs, case: Case) -> None:
    """Refuse to report the time of a wrong answer.

    Raises:
        ValueError: a token outside the vocabulary, a score or a cache row that is not
            finite, or outputs of another shape.
    """
    expected = (case.steps, case.batch)
    if outputs.tokens.shape != expected:
        raise ValueError(f"tokens have shape {outputs.tokens.shape}, not {expected}")
    if outputs.tokens.min() < 0 or outputs.tokens.max() >= case.shape.vocab:
        raise ValueError(f"a token is outside the vocabulary of {case.shape.vocab}")
    if outputs.scores is not None and not np.isfinite(outputs.scores).all():
        raise ValueError("a score is not finite")
    for leaf in jax.tree.leaves(result.cache):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.isfinite(leaf).all():
            raise ValueError(f"the cache holds a value that is not finite: {leaf.aval}")


def compare(outputs: Outputs, reference: Outputs) -> tuple[int, float | None]:
    """(agreeing steps, max error) against the reference.

    A row's inputs agree up to and including the step of its first other token: scores
    are compared so far and no further.
    """
    steps = len(reference.tokens)
    differs = outputs.tokens != reference.tokens
    agreeing = np.where(differs.any(axis=0), differs.argmax(axis=0), steps)
    if outputs.scores is None or reference.scores is None:
        return int(agreeing.min()), None
    compared = np.arange(steps)[:, None] <= agreeing
    error = np.abs(outputs.scores - reference.scores)[compared]
    return int(agreeing.min()), float(error.max())


def measure(
    name: str,
    make_step: MakeStep,
    case: Case,
    reference: Outputs,
    ceiling_tb_per_s: float,
    repeats: int,
) -> results.Row:
    """Time one implementation on one case, and check what it computes."""
    loop, (params, cache) = make_step(
        case.shape, case.batch, case.max_length, case.steps
    )
    us, first, result = time_loop(loop, params, cache, case, repeats)
    last = Outputs.of(result)
    check_outputs(result, last, case)
    agreeing_steps, max_error = compare(last, reference)
    spread = results.Spread.of(us)
    nbytes = case.shape.step_bytes(case.batch, case.context, case.steps)
    return results.Row(
        model=case.shape.name,
        dtype="bf16",
        batch=case.batch,
        context=case.context,
        implementation=name,
        us_per_token=spread,
        bytes=nbytes,
        tb_per_s=nbytes / spread.median / 1e6,
        ceiling_tb_per_s=ceiling_tb_per_s,
        max_error=max_error,
        agreeing_steps=agreeing_steps,
        repeatable=first.same_bits(last),
        max_length=case.max_length,
        steps=case.steps,
        repeats=repeats,
    )


def measure_case(
    case: Case,
    implementations: Mapping[str, MakeStep],
    ceiling_tb_per_s: float,
    repeats: int,
) -> tuple[list[results.Row], list[results.Failure]]:
    """Every implementation on one case; one that fails does not stop the others."""
    rows: list[results.Row] = []
    failures: list[results.Failure] = []
    reference = reference_outputs(case)
    for name, make_step in implementations.items():
        start = time.perf_counter()
        try:
            row = measure(name, make_step, case, reference, ceiling_tb_per_s, repeats)
        except Exception as error:  # whatever it is, the others are still worth timing
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:500]
            failures.append(
                results.Failure(case.shape.name, case.batch, case.context, name, text)
            )
        else:
            rows.append(row)
        gc.collect()  # free the weights of this implementation before the next
        seconds = time.perf_counter() - start
        print(f"{case.shape.name} {case.batch=} {name}: {seconds:.0f} s", flush=True)
    return rows, failures


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="bench_decode", description=__doc__)
    add = parser.add_argument
    add("--models", type=names, default=["llama-3.2-1b"], help=", ".join(SHAPES))
    add("--batches", type=numbers, default=[1, 8, 16])
    add("--contexts", type=numbers, default=[1024])
    add("--max-length", type=int, default=2048, help="positions of the cache")
    add("--steps", type=int, default=baselines.STEPS, help="tokens of one loop")
    add("--repeats", type=int, default=20, help="timed loops, at least 20 to publish")
    add(
        "--implementations",
        type=names,
        default=list(IMPLEMENTATIONS),
        help=", ".join(IMPLEMENTATIONS),
    )
    add("--ceiling", type=float, help="TB/s, where already measured on this card today")
    add("--out", type=Path, default=results.RESULTS, help="folder of the JSON file")
    add("--commit", help="to record where there is no git")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    cases = [
        Case(SHAPES[model], batch, context, options.max_length, options.steps)
        for model in options.models
        for context in options.contexts
        for batch in options.batches
    ]
    chosen = {name: IMPLEMENTATIONS[name] for name in options.implementations}
    given = options.ceiling
    reads = {"given": given} if given else ceiling.measure_reads()
    best = max(reads.values())
    head = results.collect_head(arguments, reads, INPUTS, options.commit)
    print(f"{head.card}, driver {head.driver}: reads {best:.2f} TB/s", flush=True)
    rows: list[results.Row] = []
    failures: list[results.Failure] = []
    path = None
    for case in cases:
        new_rows, new_failures = measure_case(case, chosen, best, options.repeats)
        rows = results.with_gaps([*rows, *new_rows])
        failures += new_failures
        path = results.write("decode", head, rows, failures, options.out)
    print(results.table(rows))
    for failure in failures:
        print(f"FAILED {failure.implementation}, {failure.batch=}: {failure.error}")
    print(f"written: {path}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
