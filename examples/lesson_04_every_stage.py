"""Lesson 4: print every stage.

Between the function that you write and the kernel are nine stages. Each of them is data
that prints, and a verifier has checked each before the next is made. This lesson prints
the size of each stage, and follows one task through them: t6, a tile of `project`,
which needs all tiles of `hidden` and is the second `project` in the queue of its SM.

    python examples/lesson_04_every_stage.py
"""

import jax
import jax.numpy as jnp

import mkdsl as mk

STAGES = (
    "program",  # what you wrote: calls, blocks and index expressions
    "tasks",  # each call is its grid of tasks
    "dependences",  # who comes after whom, from the overlap of regions
    "events",  # tasks with the same successors share a counter
    "widened",  # waits for almost the same tasks become one
    "normalized",  # what follows from other waits is dropped
    "schedule",  # a queue for each SM
    "elided",  # what the same role of the same SM has waited for is dropped
    "pages",  # shared memory: the ring of pages, arena and staging slots
)


@mk.task
def hidden(x, w):  # x [B, D], w [64, D] -> [B, 64]
    return jax.nn.silu(mk.dot(x, w)).astype(x.dtype)


@mk.task
def project(x, h, w):  # x [B, 64], h [B, I], w [64, I] -> [B, 64]
    return x + mk.dot(h, w).astype(x.dtype)


def mlp(x, up, down):  # up [I, D], down [D, I]
    (batch, depth), inner = x.shape, up.shape[0]
    tile = mk.Spec((batch, 64), lambda i: (0, i))
    h = mk.call(
        hidden,
        grid=(inner // 64,),
        in_specs=(mk.whole, mk.Spec((64, depth), lambda i: (i, 0))),
        out_specs=tile,
        out_shape=mk.Shape((batch, inner), x.dtype),
    )(x, up)
    return mk.call(
        project,
        grid=(depth // 64,),
        in_specs=(tile, mk.whole, mk.Spec((64, inner), lambda i: (i, 0))),
        out_specs=tile,
        out_shape=mk.Shape(x.shape, x.dtype),
    )(x, h, down)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(4, 256), (256, 256), (256, 256)]
    normal = lambda k, s: jax.random.normal(k, s, jnp.bfloat16)  # noqa: E731
    x, up, down = (normal(k, s) / 16 for k, s in zip(keys, sizes, strict=True))
    two = mk.simulated(2)
    step = mk.megakernel(mlp, implementation="simulate", machine=two)
    wide = [a.astype(jnp.float32) for a in (x, up, down)]
    exact = wide[0] + jax.nn.silu(wide[0] @ wide[1].T) @ wide[2].T
    error = float(jnp.abs(step(x, up, down) - exact).max())
    print(f"largest error against float32: {error:.4f}")

    lowered, before = step.lower(x, up, down), ""
    for stage in STAGES:
        lines = lowered.as_text(stage).splitlines()
        print(f"{stage}: {len(lines)} lines")
        here = "".join(x.strip() for x in lines if x.strip().startswith("t6 "))
        if here != before:
            print(f"    {here}")
        before = here

    words = lowered.as_text("words").split("sm 1")[0].splitlines()
    print("words: what the kernel reads; SM 0, an instruction a line, then its waits")
    for line in words[1:]:
        print("   " + (line.split(" -1 -1 -1")[0].rstrip() or "  -1: the end"))


if __name__ == "__main__":
    main()
