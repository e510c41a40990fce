"""Broken schedules, to find out what is wrong from the error.

    python examples/exercises/run.py              what there is
    python examples/exercises/run.py 3            the text, the error, the race
    python examples/exercises/run.py 3 mine.txt   whether your own version is right
    python examples/exercises/run.py 3 --answer   what was wrong, and the fixed version

Each exercise is the text of a stage for two SMs, with one mistake. Copy it, mend it,
and run your copy. A text is read with `mk.parse`, proved and run with `mk.replay`.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from mkdsl.runtime.replay import replay_unproved

FOLDER = Path(__file__).parent
MACHINE = mk.simulated(2)
TILE, WIDE = 64, 128
# Of the roles, in which a text without a proof is run until it breaks.
ORDERS = 20


@mk.task
def double(x):
    return x * 2


@mk.task
def project(x, w):
    return mk.dot(x, w).astype(x.dtype)


def _double(x, name, width=TILE, into=None):
    """2 * x, a task for each tile of `width` features."""
    grid = (x.shape[1] // width,) if x.shape[1] > width else ()
    tile = mk.Spec((1, width), lambda *g: (0, g[0] if g else 0))
    made = tile if into is None else mk.Into(into, (1, width), tile.index_map)
    shape = mk.Shape(x.shape, x.dtype) if into is None else None
    return mk.call(
        double, grid=grid, in_specs=tile, out_specs=made, out_shape=shape, name=name
    )(x)


def gather(x):
    """y = 2 x in two tiles; z = 2 y, which needs both."""
    return _double(_double(x, "y"), "z", WIDE)


def pairs(x, u):
    """Two chains that have nothing to do with each other: x, a, c and u, b, d."""
    a, b = _double(x, "a"), _double(u, "b")
    return _double(a, "c"), _double(b, "d")


def weights(x, w):
    """v = 2 w; z = 2 v reads v whole, and y = x @ v.T streams it."""
    square = mk.Spec((TILE, TILE), lambda: (0, 0))
    shape = mk.Shape(w.shape, w.dtype)
    both = {"in_specs": square, "out_specs": square, "out_shape": shape}
    v = mk.call(double, **both, name="v")(w)
    z = mk.call(double, **both, name="z")(v)
    y = mk.call(
        project,
        in_specs=(mk.whole, square),
        out_specs=mk.Spec((1, TILE), lambda: (0, 0)),
        out_shape=mk.Shape(x.shape, x.dtype),
        name="y",
    )(x, v)
    return z, y


def overwrite(s, t):
    """y = 2 s, then s = 2 t in place."""
    y = _double(s, "y")
    return y, _double(t, "s2", into=s)


# Number: (name of the text, its program, what it is about).
EXERCISES = {
    1: ("missing_edge", gather, "z = 2 y, and y has two tiles"),
    2: ("wrong_order", pairs, "two chains on two SMs"),
    3: ("first_of_two", gather, "z waits, and still it races"),
    4: ("elided_across_roles", weights, "a wait that seemed to be there already"),
    5: ("page_reused_early", weights, "more loads under way than slots in the ring"),
    6: ("overwritten_early", overwrite, "y = 2 s, while s gets a new value"),
}


def arguments(function):
    """The same arguments every time."""
    shapes = {
        gather: [(1, WIDE)],
        pairs: [(1, TILE)] * 2,
        weights: [(1, TILE), (TILE, TILE)],
        overwrite: [(1, TILE)] * 2,
    }[function]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
    ]


def program(function):
    """The traced program; the texts name every body #1, whatever JAX prints of it."""
    traced = mk.megakernel(function).trace(*arguments(function)).program
    steps = [replace(c, task=replace(c.task, digest="1")) for c in traced.calls()]
    return replace(traced, steps=tuple(steps))


def path(number: int, answer: bool = False) -> Path:
    """Where a text is."""
    return FOLDER / f"{number}_{EXERCISES[number][0]}{'.answer' * answer}.txt"


def wrong(number: int, text: str) -> str:
    """Prove a text and run it in six orders: what is wrong, or nothing."""
    function = EXERCISES[number][1]
    inputs = [np.asarray(x) for x in arguments(function)]
    exact = jax.tree.leaves(mk.megakernel(function)(*arguments(function)))
    for seed in range(6):
        try:
            results = mk.replay(
                text, inputs, program(function), machine=MACHINE, seed=seed
            )
        except mk.MkdslError as error:
            return str(error)
        if not all(np.array_equal(a, b) for a, b in zip(results, exact, strict=True)):
            return f"proved, but the results are wrong in order {seed}"
    return ""


def happens(number: int, text: str) -> str:
    """What the simulator sees where the text runs without a proof."""
    function = EXERCISES[number][1]
    inputs = [np.asarray(x) for x in arguments(function)]
    for seed in range(ORDERS):
        try:
            replay_unproved(text, inputs, program(function), machine=MACHINE, seed=seed)
        except mk.VerifyError as error:
            return f"In order {seed} of the roles: {error}"
    return (
        f"The simulator shows nothing in {ORDERS} orders: its slots are boxes of their "
        "own. `python examples/exercises/ring_by_hand.py` shows what a machine does."
    )


def _schedule(text: str) -> str:
    """The lines that say who does what when."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    start = next(i for i, line in enumerate(lines) if line.startswith("deps"))
    ring = [line for line in lines if line.strip().startswith("ring ")]
    return "\n".join(f"    {line}" for line in (*ring, *lines[start:]))


def _comments(text: str) -> str:
    lines = (line for line in text.splitlines() if line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines)


def show(number: int) -> None:
    """The exercise, its error, and what would happen."""
    text = path(number).read_text()
    print(f"Exercise {number}: {_comments(text)}\n\n{_schedule(text)}\n")
    print(f"The verifier says:\n\n{wrong(number, text)}\n")
    print(f"If it ran all the same:\n\n{happens(number, text)}\n")
    print("To mend it:")
    print(f"    cp examples/exercises/{path(number).name} mine.txt")
    print(f"    python examples/exercises/run.py {number} mine.txt")


def answer(number: int) -> None:
    """What was wrong, the lines that differ, and that the fixed text passes."""
    bad, good = (path(number, a).read_text() for a in (False, True))
    print(f"{_comments(good)}\n")
    plain = [[x for x in t.splitlines() if x[:1] != "#"] for t in (bad, good)]
    for line in difflib.unified_diff(*plain, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            print(f"    {line}")
    print(f"\nThe fixed text: {wrong(number, good) or 'proved, right in 6 orders'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if the reader's own version is not right yet."""
    parser = argparse.ArgumentParser(description="Exercises: broken schedules.")
    parser.add_argument("number", nargs="?", type=int, choices=list(EXERCISES))
    parser.add_argument("file", nargs="?", type=Path, help="your own version")
    parser.add_argument("--answer", action="store_true")
    args = parser.parse_args(argv)
    if args.number is None:
        for number, (_, _, about) in EXERCISES.items():
            print(f"{number}  {about}")
        return 0
    if args.answer:
        answer(args.number)
        return 0
    if args.file is None:
        show(args.number)
        return 0
    found = wrong(args.number, args.file.read_text())
    print(found or "right: proved, and the same results in 6 orders")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
