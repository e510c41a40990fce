"""Lesson 1: one task.

A *task function* is a pure function from tiles to tiles. `mk.call` applies it over a
grid, and `mk.megakernel` makes a function of such calls behave like `jax.jit` of it.
Here the grid has no axes: one call, one task, which sees the whole array as its only
tile.

    python examples/lesson_01_one_task.py
"""

import jax.numpy as jnp

import mkdsl as mk


@mk.task
def double(x):  # x [1, 128] -> [1, 128]
    return x * 2


def program(x):
    tile = mk.Spec((1, 128), lambda: (0, 0))
    return mk.call(
        double,
        in_specs=tile,
        out_specs=tile,
        out_shape=mk.Shape(x.shape, x.dtype),
    )(x)


def main() -> None:
    x = jnp.arange(128, dtype=jnp.bfloat16)[None]

    print("The task function is an ordinary function:", double(x)[0, :4])

    step = mk.megakernel(program)
    print("The program of it behaves like a jitted one:", step(x)[0, :4])
    print("What ran, and why:", step.why())

    simulated = mk.megakernel(program, implementation="simulate")
    same = bool((simulated(x) == 2 * x).all() and (step(x) == 2 * x).all())
    print("The schedule on simulated SMs gives the same:", same)

    print("\nThe call, and the one task that it became:")
    text = simulated.lower(x).as_text("tasks")
    call = text[text.index("call double") : text.index("kind 0")]
    task = text[text.index("t0 ") :]
    print("  " + (call + task).rstrip().replace("\n", "\n  "))


if __name__ == "__main__":
    main()
