"""Lesson 8: attention as a fold.

One new token attends to the rows of a cache. `mk.fold` walks blocks of 64 rows and
carries three values: the largest score, the sum of the weights, and the weighted sum of
the values (an online softmax). The number of rows is known at run time alone.

A long cache on one SM would leave the others idle. `merge` says how the carries of two
ranges of rows are joined, and that is all that the planner needs to *split* the fold:
parts on several SMs, and a combine that merges them.

    python examples/lesson_08_attention.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk

BLOCK, DIM, SLOTS = 64, 64, 2048


def merge(a, b):
    """Join (largest score, sum of weights, weighted values) of two ranges of rows."""
    top = jnp.maximum(a[0], b[0])
    x, y = (jnp.where(c[0] == -jnp.inf, 0.0, jnp.exp(c[0] - top)) for c in (a, b))
    return top, a[1] * x + b[1] * y, a[2] * x + b[2] * y


@mk.task
def attend(q, keys, values):  # q [G, D], keys, values [S, D] -> [G, D]
    def block(carry, rows, valid):
        scores = jnp.where(valid, mk.dot(q, rows[0]) / DIM**0.5, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        mixed = mk.dot(weights.astype(q.dtype), rows[1].T)
        return merge(carry, (top, jnp.sum(weights, axis=-1, keepdims=True), mixed))

    zero = jnp.zeros((q.shape[0], 1), jnp.float32)
    start = zero - jnp.inf, zero, jnp.zeros(q.shape, jnp.float32)
    _, total, mixed = mk.fold(block, start, (keys, values), block=BLOCK, merge=merge)
    return (mixed / total).astype(q.dtype)


def program(q, keys, values, length):  # q [H, G, D], keys, values [H, S, D], length [1]
    heads, group, dim = q.shape
    head = mk.Spec((None, group, dim), lambda h: (h, 0, 0))
    rows = mk.Spec(
        (None, mk.BoundedSlice(keys.shape[1]), dim),
        lambda h: (h, mk.ds(0, length[0]), 0),
    )
    return mk.call(
        attend,
        grid=(heads,),
        in_specs=(head, rows, rows),
        out_specs=head,
        out_shape=mk.Shape(q.shape, q.dtype),
    )(q, keys, values)


def plain(q, keys, values, length):
    """The same in plain JAX, in float32."""
    q, keys, values = (a.astype(jnp.float32) for a in (q, keys, values))
    scores = jnp.einsum("hgd,hsd->hgs", q, keys[:, :length]) / DIM**0.5
    return jnp.einsum("hgs,hsd->hgd", jax.nn.softmax(scores), values[:, :length])


def main() -> None:
    one, two, three = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(one, (2, 4, DIM), jnp.bfloat16)
    keys = jax.random.normal(two, (2, SLOTS, DIM), jnp.bfloat16)
    values = jax.random.normal(three, (2, SLOTS, DIM), jnp.bfloat16)
    step = mk.megakernel(program, implementation="simulate")
    for length in (1, 64, 777, SLOTS):
        # What lies behind the length is not read: it may be anything.
        filled = (jnp.where(jnp.arange(SLOTS)[:, None] < length, a, jnp.nan)
                  for a in (keys, values))  # fmt: skip
        found = step(q, *filled, jnp.array([length], jnp.int32))
        exact = plain(q, keys, values, length)
        error = np.abs(np.asarray(found, np.float32) - exact).max()
        print(f"length {length:4d}: largest error {error:.4f}")
    print(f"traced {step.traces} time: the length is an array, not a constant")

    lowered = step.lower(q, keys, values, jnp.array([1], jnp.int32))
    text = lowered.as_text("elided")
    print("\nTwo heads, four SMs:")
    print("sm 0\n" + text.split("\nsm 0\n")[1].rstrip())


if __name__ == "__main__":
    main()
