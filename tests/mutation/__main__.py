"""python -m tests.mutation --count 5000 --write docs/mutation.md"""

import argparse
import datetime
import time
from pathlib import Path

from tests.mutation.judge import SEEDS, Count, judge
from tests.mutation.mutants import MUTATIONS

TEXT = """\
# Mutants of plans, and what the verifier says of them

{date}, `{command}`: {count} mutants in {seconds:.0f} s, **{wrong} false accepts**.

A mutant is a valid small plan with one random fault (tests/mutation/mutants.py). The
plans are eight programs on 1 to 4 SMs, one of them on 5 too, with all waits, with
normalized waits and with
elided ones (tests/mutation/bases.py). The verifier is all of what stands before a
launch.

A mutant that it accepts is run in the simulator under {seeds} random interleavings,
with a check of every access by vector clocks. It is a *false accept* if any of them
shows a race, a deadlock or an error, or another bit than the plan without the fault.
One in {try_one_in} of the rejected ones is run, too: *broken* says with how many of
those the simulator found fault. The others were refused by a rule that is stricter than
this simulator (numbers of bytes, which it does not model; a store that waits at the
other gate; a threshold below the number of members), or the interleaving was not drawn.

| fault | mutants | accepted | false accepts | rejected | run | broken |
|---|---|---|---|---|---|---|
{rows}

What each fault is:

{faults}
"""


def row(name: str, counts: list[Count]) -> str:
    """One line of the table, the sum of counts."""
    cells = [
        sum(c.accepted + c.rejected for c in counts),
        sum(c.accepted for c in counts),
        sum(len(c.false_accepts) for c in counts),
        sum(c.rejected for c in counts),
        sum(c.tried for c in counts),
        sum(c.broken for c in counts),
    ]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def main() -> int:
    """Judge mutants, print the table, write it if asked; 1 if one is false."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--count", type=int, default=5000, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants")
    parser.add_argument("--try-one-in", type=int, default=4, help="rejected ones run")
    parser.add_argument("--write", type=Path, help="file for the table")
    args = parser.parse_args()
    start = time.perf_counter()
    counts = judge(args.count, args.try_one_in, args.seed)
    wrong = [line for c in counts.values() for line in c.false_accepts]
    rows = [row(name, [count]) for name, count in counts.items()]
    text = TEXT.format(
        date=datetime.date.today(),
        command=f"python -m tests.mutation --count {args.count} --seed {args.seed} "
        f"--try-one-in {args.try_one_in}",
        count=args.count,
        seconds=time.perf_counter() - start,
        wrong=len(wrong),
        seeds=SEEDS,
        try_one_in=args.try_one_in,
        rows="\n".join((*rows, row("**all**", list(counts.values())))),
        faults="\n".join(f"- {n}: {f.__doc__}" for n, f in MUTATIONS.items()),
    )
    print("\n".join((text, *wrong)))
    if args.write is not None:
        args.write.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
