"""Lesson 6: pages that are asked for long before they are needed.

Nobody writes a weight, so its loads wait for no task, only for a free page. The *weight
loader* of an SM therefore runs ahead of the others: while the consumer waits for h, the
weights of `down` arrive in the *ring*, as many pages as it has slots. This is what a
sequence of kernels cannot do, and where most of the gain of a megakernel comes from.

The program is that of lesson 5, with the coarse wait for all of h, and rings of 2 to 6.

    python examples/lesson_06_page_pipeline.py
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


def timed(ring: int) -> tuple[jax.Array, Timeline]:
    options = plan_options(ring, coarse=True)
    step = mk.megakernel(mlp, implementation="simulate", options=options)
    lowered = step.lower(*arguments())
    stamps = simulate_stamps(lowered.plan, lowered.choice.machine)
    return step(*arguments()), from_stamps(lowered.plan, stamps, "simulator")


def main() -> None:
    x, w1, w2 = (a.astype(jnp.float32) for a in arguments())
    exact = jax.nn.silu(x @ w1.T) @ w2.T
    print(
        "SM 0: when its first page of `down` was asked for, when its wait for h ended"
    )
    print("ring  asked for  wait ended  step")
    for ring in (2, 3, 4, 6):
        result, timeline = timed(ring)
        assert np.abs(np.asarray(result, np.float32) - exact).max() < 0.02
        down = next(r for r in timeline.runs if r.call == "down" and r.sm == 0)
        asked = min(
            s.start_ns
            for s in timeline.spans
            if (s.role, s.task) == ("weight loader", down.task)
        )
        times = (asked, down.waited_ns, timeline.end_ns)
        print(f"{ring:4d}" + "".join(f"{t / 1e3:8.1f} us" for t in times))
    for ring in (2, 6):
        print(f"\nSM 0 with a ring of {ring}:")
        rows = chart(timed(ring)[1], width=56, end_ns=12_000).splitlines()
        print("\n".join(rows[:4] + rows[-2:]))


if __name__ == "__main__":
    main()
