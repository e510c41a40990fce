"""Lesson 10: read a timeline.

A timeline says when each task passed its stages, and what held it back. It is made from
stamps: those of the kernel on a GPU, or those of the simulator, whose clock follows the
cost model of the machine. Here: two layers of an MLP whose work does not divide evenly,
on four SMs. Read it in this order: the length, the shares of the consumers, who waited
longest and why, then the chart.

    python examples/lesson_10_read_a_timeline.py [trace.json]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from mkdsl.runtime.timeline import from_stamps
from mkdsl.runtime.timeline_report import report
from mkdsl.runtime.timeline_text import chart
from mkdsl.runtime.trace_json import write_trace
from mkdsl.runtime.virtual_time import simulate_stamps

ROWS = 64


@mk.task
def up(x, w):  # x [B, D], w [64, D] -> [B, 64]
    return jax.nn.silu(mk.dot(x, w)).astype(x.dtype)


@mk.task
def down(x, h, w):  # x [B, 64], h [B, I], w [64, I] -> [B, 64]
    return x + mk.dot(h, w).astype(x.dtype)


def layer(x, p, i):
    (batch, depth), inner = x.shape, p["up"].shape[0]
    tile = mk.Spec((batch, ROWS), lambda i: (0, i))
    h = mk.call(
        up,
        grid=(mk.cdiv(inner, ROWS),),
        in_specs=(mk.whole, mk.Spec((ROWS, depth), lambda i: (i, 0))),
        out_specs=tile,
        out_shape=mk.Shape((batch, inner), x.dtype),
    )(x, p["up"])
    return mk.call(
        down,
        grid=(mk.cdiv(depth, ROWS),),
        in_specs=(tile, mk.whole, mk.Spec((ROWS, inner), lambda i: (i, 0))),
        out_specs=tile,
        out_shape=mk.Shape(x.shape, x.dtype),
    )(x, h, p["down"])


def program(x, layers):  # leaves of layers are stacked: [L, I, D] and [L, D, I]
    return mk.scan(layer, x, layers)


def plain(x, layers):
    x, layers = jax.tree.map(lambda a: a.astype(jnp.float32), (x, layers))
    for w1, w2 in zip(layers["up"], layers["down"], strict=True):
        x = x + jax.nn.silu(x @ w1.T) @ w2.T
    return x


def main(trace: str | None = None) -> None:
    one, two, three = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(one, (1, 256), jnp.bfloat16)
    layers = {
        "up": jax.random.normal(two, (2, 320, 256), jnp.bfloat16) / 16,
        "down": jax.random.normal(three, (2, 256, 320), jnp.bfloat16) / 18,
    }
    step = mk.megakernel(program, implementation="simulate")
    error = np.abs(np.asarray(step(x, layers), np.float32) - plain(x, layers)).max()
    print(f"largest error against float32: {error:.3f}\n")

    lowered = step.lower(x, layers)
    stamps = simulate_stamps(lowered.plan, lowered.choice.machine)
    timeline = from_stamps(lowered.plan, stamps, "simulator")
    print(report(timeline))
    print(chart(timeline, width=60, roles=("consumer", "storer")))
    for run in timeline.critical_path():
        print(
            f"  SM {run.sm}  {run.name:18}  operands {run.landed_ns / 1e3:4.1f}"
            f"  computed {run.computed_ns / 1e3:4.1f}"
            f"  signalled {run.signalled_ns / 1e3:4.1f} us"
        )
    if trace is not None:
        write_trace(timeline, Path(trace))
        print(f"wrote {trace}: open it in Perfetto or chrome://tracing")


if __name__ == "__main__":
    main(*sys.argv[1:])
