"""Does the verifier accept a mutant, and does the simulator break it?

A mutant that is accepted must run without a race, a deadlock or another error in every
interleaving that is tried, and give the bits of the plan that was not mutated (of a
plan made anew where the mutant is for another program). Else it is a false accept.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from mkdsl.errors import MkdslError, PlanError, VerifyError
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import Machine
from mkdsl.lower.proof import Proof
from tests.mutation.bases import Base, bases, compiled, run
from tests.mutation.edits import Mutant
from tests.mutation.mutants import MUTATIONS

# Interleavings of an accepted mutant, and of a rejected one that is tried.
SEEDS = 20


def refusal(mutant: Mutant, machine: Machine) -> str:
    """Why the verifier refuses a mutant, or nothing."""
    try:
        Proof(mutant.plan, machine)
    except (VerifyError, PlanError) as error:
        return str(error)
    return ""


def breaks(
    plan: KernelPlan,
    inputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray] | None,
    seeds: int = SEEDS,
) -> str:
    """What goes wrong in some interleaving, or nothing."""
    for seed in range(seeds):
        try:
            found = run(plan, inputs, seed)
        except MkdslError as error:
            return f"seed {seed}: {error}"
        except Exception as error:  # a plan that is not proved may do anything
            return f"seed {seed}: {type(error).__name__}: {error}"
        for n, (a, b) in enumerate(
            zip(found, expected or (), strict=expected is not None)
        ):
            if not np.array_equal(a.view(np.uint8), b.view(np.uint8)):
                return f"seed {seed}: output {n} has other values"
    return ""


@dataclass(slots=True)
class Count:
    """How the mutants of one kind fared."""

    accepted: int = 0
    rejected: int = 0
    tried: int = 0
    broken: int = 0
    false_accepts: list[str] = field(default_factory=list[str])


def expected_of(base: Base, mutant: Mutant) -> Sequence[np.ndarray] | None:
    """What an accepted mutant must compute; None if its program does not compile."""
    if mutant.program is None:
        return base.expected
    try:
        plan = compiled(mutant.program, base.machine, base.options, base.waits)
        Proof(plan, base.machine)
    except MkdslError:
        return None
    return run(plan, base.inputs, 0)


def mutants(count: int, seed: int = 0) -> Iterator[tuple[str, Base, Mutant]]:
    """So many mutants, kinds and bases in turn; a base without a place is skipped."""
    every = list(bases())
    random = Random(seed)
    made = 0
    for turn in itertools.count():
        for n, (kind, mutate) in enumerate(MUTATIONS.items()):
            first = turn * 5 + n
            for at in range(first, first + len(every)):
                base = every[at % len(every)]
                mutant = mutate(base, random)
                if mutant is not None:
                    yield kind, base, mutant
                    made += 1
                    break
            if made == count:
                return


def judge(count: int, try_one_in: int, seed: int = 0) -> dict[str, Count]:
    """The fate of so many mutants.

    Args:
        try_one_in: of the rejected ones, those that are run to see whether the
            simulator breaks them.
    """
    counts = {kind: Count() for kind in MUTATIONS}
    for kind, base, mutant in mutants(count, seed):
        mine = counts[kind]
        if refusal(mutant, base.machine):
            mine.rejected += 1
            if mine.rejected % try_one_in == 0:
                mine.tried += 1
                expected = expected_of(base, mutant)
                mine.broken += bool(breaks(mutant.plan, base.inputs, expected))
            continue
        mine.accepted += 1
        expected = expected_of(base, mutant)
        wrong = breaks(mutant.plan, base.inputs, expected)
        if expected is None:
            wrong = wrong or "its program does not compile"
        if wrong:
            where = f"{base.name} on {base.machine.name}, {base.waits} waits"
            mine.false_accepts.append(f"{kind}, {where}: {wrong}")
    return counts
