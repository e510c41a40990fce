"""Lesson 5: a consumer that starts when the first quarter is there.

`down` reads all of h, which 16 tasks write in four waves: SM 0 runs four of them one
after the other. A wait for all 16 would leave every SM idle at the end of the last
wave, which is the bubble between two kernels once more. So its operand comes in four
*blocks* with a wait each: `down` multiplies the first quarter of h while the last
quarter is not written.

The simulator's clock shows it, with the wait for whole calls (`coarse`) beside it. Only
two pages of weights fit in the ring here, as in a plan whose operands need most of the
shared memory: lesson 6 shows what a larger ring does to the bubble.

    python examples/lesson_05_first_quarter.py
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from mkdsl.runtime.timeline import Timeline, from_stamps
from mkdsl.runtime.timeline_text import chart
from mkdsl.runtime.virtual_time import simulate_stamps


@mk.task
def hidden(x, w):  # x [B, D], w [64, D] -> [B, 64]
    return jax.nn.silu(mk.dot(x, w)).astype(x.dtype)


@mk.task
def down(h, w):  # h [B, I], w [64, I] -> [B, 64]
    return mk.dot(h, w).astype(h.dtype)


def mlp(x, w1, w2):  # x [B, D], w1 [I, D], w2 [D, I] -> [B, D]
    (batch, depth), inner = x.shape, w1.shape[0]
    tile = mk.Spec((batch, 64), lambda i: (0, i))
    h = mk.call(
        hidden,
        grid=(inner // 64,),
        in_specs=(mk.whole, mk.Spec((64, depth), lambda i: (i, 0))),
        out_specs=tile,
        out_shape=mk.Shape((batch, inner), x.dtype),
    )(x, w1)
    return mk.call(
        down,
        grid=(depth // 64,),
        in_specs=(mk.whole, mk.Spec((64, inner), lambda i: (i, 0))),
        out_specs=tile,
        out_shape=mk.Shape((batch, depth), x.dtype),
    )(h, w2)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(1, 256), (1024, 256), (256, 1024)]
    return [
        jax.random.normal(k, s, jnp.bfloat16) * (s[-1] ** -0.5 if s[0] > 1 else 1)
        for k, s in zip(keys, sizes, strict=True)
    ]


def plan_options(ring: int, coarse: bool) -> mk.Options:
    options = mk.Options(coarse=coarse)
    return replace(options, pages=replace(options.pages, max_ring=ring))


def timed(options: mk.Options) -> tuple[jax.Array, Timeline, str]:
    """The result, the timeline, and the first line of `down` in the schedule."""
    step = mk.megakernel(mlp, implementation="simulate", options=options)
    lowered = step.lower(*arguments())
    stamps = simulate_stamps(lowered.plan, lowered.choice.machine)
    lines = lowered.as_text("elided").splitlines()
    line = next(x.strip() for x in lines if x.startswith("  t16 down"))
    return step(*arguments()), from_stamps(lowered.plan, stamps, "simulator"), line


def main() -> None:
    x, w1, w2 = (a.astype(jnp.float32) for a in arguments())
    exact = jax.nn.silu(x @ w1.T) @ w2.T
    for title, coarse in (("each quarter of h", False), ("all of h", True)):
        result, timeline, line = timed(plan_options(2, coarse))
        error = np.abs(np.asarray(result, np.float32) - exact).max()
        print(f"A wait for {title} (largest error {error:.3f})")
        print("  " + line.replace("; ", ";\n      "))
        print(f"  estimated: {timeline.end_ns / 1e3:.1f} us")
        produced = max(r.signalled_ns for r in timeline.runs if r.call == "hidden")
        landed = min(r.landed_ns for r in timeline.runs if r.call == "down")
        order = "before" if landed < produced else "after"
        print(f"  first block of h read at {landed / 1e3:.1f} us, {order} the last")
        print(f"  task of hidden is done, at {produced / 1e3:.1f} us")
        print(chart(timeline, width=56, roles=("consumer",), end_ns=12_000))


if __name__ == "__main__":
    main()
