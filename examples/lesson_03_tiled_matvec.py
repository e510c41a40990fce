"""Lesson 3: a matrix times a vector, tile by tile.

y = x @ w.T, the operation that decoding is made of. The rows of w are cut into tiles of
64; each of them is one task. `mk.dot(x, w)` makes w a *streamed operand*: it passes
through shared memory page by page. x is *resident*: a task has it whole. The last tile
is ragged, 200 rows are no multiple of 64, and nobody has to care.

    python examples/lesson_03_tiled_matvec.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk

ROWS = 64


@mk.task
def project(x, w):  # x [B, D], w [64, D] -> [B, 64]
    return mk.dot(x, w).astype(x.dtype)


def matvec(x, w):  # x [B, D], w [N, D] -> [B, N]
    (batch, depth), count = x.shape, w.shape[0]
    return mk.call(
        project,
        grid=(mk.cdiv(count, ROWS),),
        in_specs=(mk.whole, mk.Spec((ROWS, depth), lambda i: (i, 0))),
        out_specs=mk.Spec((batch, ROWS), lambda i: (0, i)),
        out_shape=mk.Shape((batch, count), x.dtype),
    )(x, w)


def main() -> None:
    one, two = jax.random.split(jax.random.key(0))
    x = jax.random.normal(one, (1, 1024), jnp.bfloat16)
    w = jax.random.normal(two, (200, 1024), jnp.bfloat16) / 32

    step = mk.megakernel(matvec, implementation="simulate")
    exact = x.astype(jnp.float32) @ w.astype(jnp.float32).T
    error = np.abs(np.asarray(step(x, w), np.float32) - exact).max()
    print(f"largest error against float32: {error:.3f} (bfloat16: 8 bits)")

    lowered = step.lower(x, w)
    text = lowered.as_text("pages")
    print("\nWhat a task reads and writes (g0 is its place in the grid):")
    kind = text.split("\nkind 0 ")[1].split("\n")
    print("\n".join(f"  {line.strip()}" for line in kind[1:4]))

    print("\nOne task on each of four SMs, and no events: nothing depends on anything.")
    print("  sm 0" + text.split("\nsm 0")[1].replace("\n", "\n  ").rstrip())

    plan = lowered.plan
    pages = w.shape[0] * w.shape[1] * 2 / 32768
    print(f"\nw has {w.nbytes} bytes: {pages:.1f} pages of 32 KiB in all.")
    print(
        f"The ring of an SM has {plan.ring} pages, {plan.in_flight} of them in flight."
    )


if __name__ == "__main__":
    main()
