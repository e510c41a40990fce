"""Lesson 2: two tasks and an event.

The second task reads what the first one writes. Nobody says so: mkdsl compares the
regions that tasks read and write, finds the *dependence*, and makes an *event* of it: a
counter that the first task raises (its *signal*) and the second one watches (its
*wait*). Without the wait the two tasks would race, for they run on different SMs.

    python examples/lesson_02_two_tasks_and_an_event.py
"""

import jax.numpy as jnp

import mkdsl as mk


@mk.task
def double(x):  # [1, 128] -> [1, 128]
    return x * 2


@mk.task
def add(x, y):  # [1, 128], [1, 128] -> [1, 128]
    return x + y


def program(x):
    tile = mk.Spec((1, 128), lambda: (0, 0))
    shape = mk.Shape(x.shape, x.dtype)
    y = mk.call(double, in_specs=tile, out_specs=tile, out_shape=shape)(x)
    return mk.call(add, in_specs=tile, out_specs=tile, out_shape=shape)(x, y)


def main() -> None:
    x = jnp.arange(128, dtype=jnp.bfloat16)[None]
    step = mk.megakernel(program, implementation="simulate")
    print("x + 2 x is right:", bool((step(x) == 3 * x).all()))

    print("\nWhat was derived (deps: the tasks that t1 comes after):")
    lines = step.lower(x).as_text("events").splitlines()
    for line in lines:
        if line.startswith(("deps", "event ", "t")) and not line.startswith("task"):
            print(f"  {line}")

    print("\nThe queues of two SMs that run it:")
    two = mk.megakernel(program, implementation="simulate", machine=mk.simulated(2))
    _, queues = two.lower(x).as_text("elided").split("\nsm 0")
    print("  sm 0" + queues.replace("\n", "\n  ").rstrip())


if __name__ == "__main__":
    main()
