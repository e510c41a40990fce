"""Time per token of greedy decode, of every implementation on the same inputs.

    python -m benchmarks.bench_decode --models llama-3.2-1b --batches 1,8,16

Everything is compiled first, in threads, and then measured one after the other.
Method, and how to plug an implementation in: README.md in this folder.
"""

import argparse
import gc
import hashlib
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import baselines, ceiling, megakernel, results
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
IMPLEMENTATIONS["mosaic_gpu"] = megakernel.make_step_of("mosaic_gpu")
for _name, _options in megakernel.EVENTS.items():
    IMPLEMENTATIONS[_name] = megakernel.make_step_of(
        "mosaic_gpu", _options, rows=megakernel.EVENT_ROWS
    )
# What runs without --implementations, and from which batch on: cuDNN attention was
# measured to be the fastest baseline at batch 8 and 16, and einsum at batch 1.
DEFAULT_FROM_BATCH = {"mosaic_gpu": 1, "xla_bksd": 1, "xla_cudnn": 8}
COMPILE_THREADS = 4
# XLA times what it chooses from on the device. The reference has to be right, not fast,
# and must not disturb that.
UNTUNED = {"xla_gpu_autotune_level": 0}


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

    @property
    def digest(self) -> str:
        """The same for the same bits of tokens and scores."""
        bits = hashlib.sha256(self.tokens.tobytes())
        if self.scores is not None:
            bits.update(self.scores.tobytes())
        return bits.hexdigest()[:12]


class Reference:
    """The same loop in f32, on the same bf16 weights and cache."""

    def __init__(self, case: Case) -> None:
        self.case = case
        judge = baselines.make_judge(case.shape, baselines.REFERENCE, case.steps)
        shapes = jax.eval_shape(lambda: self._arguments(self._free()))
        self._judge = judge.lower(*shapes).compile(UNTUNED)

    def _free(self) -> jax.Array:
        return jnp.full((self.case.steps, self.case.batch), -1, jnp.int32)

    def _arguments(self, follow: jax.Array) -> tuple[Any, ...]:
        case = self.case
        params = baselines.init_params(case.shape)
        cache = baselines.init_cache(
            case.shape, case.batch, case.max_length, baselines.REFERENCE
        )
        return params, cache, case.token, case.position, follow

    def outputs(self) -> Outputs:
        """What it chooses by itself."""
        tokens, scores, _ = self._judge(*self._arguments(self._free()))
        return Outputs(np.asarray(tokens), np.asarray(scores))

    def max_gap(self, tokens: np.ndarray) -> float:
        """How far below the best, after the same tokens, a chosen one is at most."""
        _, _, gaps = self._judge(*self._arguments(jnp.asarray(tokens)))
        return float(jnp.max(gaps))


@dataclass(frozen=True, eq=False)
class Compiled:
    """An implementation ready to be measured on a case; holds no weights."""

    make_step: MakeStep
    loop: DecodeLoop

    def arguments(self, case: Case) -> tuple[Any, Any]:
        """Its parameters and its cache."""
        return self.make_step(case.shape, case.batch, case.max_length, case.steps)[1]


def compile_loop(make_step: MakeStep, case: Case) -> Compiled:
    """Compile for a case. A loop that is no function of jax.jit stays as it is."""
    made: list[DecodeLoop] = []

    def arguments() -> tuple[Any, ...]:
        loop, args = make_step(case.shape, case.batch, case.max_length, case.steps)
        made.append(loop)
        return (*args, case.token, case.position)

    # Shapes alone: the device stays free for XLA, which times its choices on it.
    shapes = jax.eval_shape(arguments)
    lower = getattr(made[0], "lower", None)
    return Compiled(make_step, lower(*shapes).compile() if lower else made[0])


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
    compiled: Compiled,
    case: Case,
    reference: Reference,
    ceiling_tb_per_s: float,
    repeats: int,
) -> results.Row:
    """Time one implementation on one case, and check what it computes."""
    params, cache = compiled.arguments(case)
    us, first, result = time_loop(compiled.loop, params, cache, case, repeats)
    last = Outputs.of(result)
    check_outputs(result, last, case)
    agreeing_steps, max_error = compare(last, reference.outputs())
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
        max_gap=reference.max_gap(last.tokens),
        agreeing_steps=agreeing_steps,
        repeatable=first.same_bits(last),
        max_length=case.max_length,
        steps=case.steps,
        repeats=repeats,
        digest=last.digest,
    )


class Queue:
    """All cases and implementations, compiling in the background.

    Those of plain XLA one after the other, since XLA times its choices on the device;
    the others at the same time.

    Args:
        cases: with the implementations of each.
    """

    def __init__(self, cases: Sequence[tuple[Case, Mapping[str, MakeStep]]]) -> None:
        self._tuned = ThreadPoolExecutor(1)
        self._others = ThreadPoolExecutor(COMPILE_THREADS)
        self.cases: list[
            tuple[Case, Future[Reference], dict[str, Future[Compiled]]]
        ] = []
        for case, chosen in cases:
            loops = {
                name: self._pool(name).submit(compile_loop, make, case)
                for name, make in chosen.items()
            }
            self.cases.append((case, self._others.submit(Reference, case), loops))

    def _pool(self, name: str) -> ThreadPoolExecutor:
        return self._tuned if name.startswith(results.PLAIN_PREFIX) else self._others

    def wait(self) -> None:
        """Until all is compiled: nothing else runs while something is timed."""
        self._others.shutdown(wait=True)
        self._tuned.shutdown(wait=True)


def measure_case(
    case: Case,
    reference: Reference,
    loops: Mapping[str, Future[Compiled]],
    ceiling_tb_per_s: float,
    repeats: int,
) -> tuple[list[results.Row], list[results.Failure]]:
    """Every implementation on one case; one that fails does not stop the others."""
    rows: list[results.Row] = []
    failures: list[results.Failure] = []
    for name, loop in loops.items():
        start = time.perf_counter()
        try:
            row = measure(
                name, loop.result(), case, reference, ceiling_tb_per_s, repeats
            )
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
        print(
            f"{case.shape.name} batch {case.batch} {name}: {seconds:.0f} s", flush=True
        )
    return rows, failures


def chosen_for(batch: int, named: Sequence[str] | None) -> dict[str, MakeStep]:
    """The implementations that were named, or the default ones of a batch."""
    if named is None:
        named = [name for name, b in DEFAULT_FROM_BATCH.items() if batch >= b]
    return {name: IMPLEMENTATIONS[name] for name in named}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="bench_decode", description=__doc__)
    add = parser.add_argument
    add("--models", type=names, default=["llama-3.2-1b"], help=", ".join(SHAPES))
    add("--batches", type=numbers, default=[1, 8])
    add("--contexts", type=numbers, default=[1024])
    add("--max-length", type=int, default=2048, help="positions of the cache")
    add("--steps", type=int, default=baselines.STEPS, help="tokens of one loop")
    add("--repeats", type=int, default=20, help="timed loops, at least 20 to publish")
    add(
        "--implementations",
        type=names,
        help=f"{', '.join(IMPLEMENTATIONS)}; by default those of DEFAULT_FROM_BATCH",
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
    given = options.ceiling
    reads = {"given": given} if given else ceiling.measure_reads()
    best = max(reads.values())
    head = results.collect_head(arguments, reads, INPUTS, options.commit)
    print(f"{head.card}, driver {head.driver}: reads {best:.2f} TB/s", flush=True)
    start = time.perf_counter()
    queue = Queue([(c, chosen_for(c.batch, options.implementations)) for c in cases])
    queue.wait()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[results.Row] = []
    failures: list[results.Failure] = []
    path = None
    for case, reference, loops in queue.cases:
        new_rows, new_failures = measure_case(
            case, reference.result(), loops, best, options.repeats
        )
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
