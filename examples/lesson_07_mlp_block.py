"""Lesson 7: an MLP block.

norm, gate and up, SiLU, down, residual: half of a transformer layer in two task
functions. Each tile of gate_up computes the norm of x for itself: that costs less than
a stage of its own would. The left side of its dots is then a *computed operand*, and
down adds the residual where it stores.

What races there are would depend on who is first. So the schedule is replayed in
different orders, one for each seed, and every bit must be the same.

    python examples/lesson_07_mlp_block.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk

ROWS = 64


def rms_norm(x, gain):
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * gain.astype(jnp.float32)


@mk.task
def gate_up(x, gain, gate, up):  # x [B, D], gain [D], gate, up [64, D] -> [B, 64]
    n = rms_norm(x, gain).astype(gate.dtype)
    return (jax.nn.silu(mk.dot(n, gate)) * mk.dot(n, up)).astype(x.dtype)


@mk.task
def down(x, h, w):  # x [B, 64], h [B, I], w [64, I] -> [B, 64]
    return (x.astype(jnp.float32) + mk.dot(h, w)).astype(x.dtype)


def block(x, p):
    (batch, depth), inner = x.shape, p["gate"].shape[0]
    tile = mk.Spec((batch, ROWS), lambda i: (0, i))
    rows = mk.Spec((ROWS, depth), lambda i: (i, 0))
    h = mk.call(
        gate_up,
        grid=(mk.cdiv(inner, ROWS),),
        in_specs=(mk.whole, mk.whole, rows, rows),
        out_specs=tile,
        out_shape=mk.Shape((batch, inner), x.dtype),
    )(x, p["gain"], p["gate"], p["up"])
    return mk.call(
        down,
        grid=(mk.cdiv(depth, ROWS),),
        in_specs=(tile, mk.whole, mk.Spec((ROWS, inner), lambda i: (i, 0))),
        out_specs=tile,
        out_shape=mk.Shape(x.shape, x.dtype),
    )(x, h, p["down"])


def plain(x, p):
    """The same in plain JAX, in float32."""
    x, p = jax.tree.map(lambda a: a.astype(jnp.float32), (x, p))
    n = rms_norm(x, p["gain"])
    return x + (jax.nn.silu(n @ p["gate"].T) * (n @ p["up"].T)) @ p["down"].T


def main() -> None:
    depth, inner = 256, 704
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *s: jax.random.normal(next(keys), s, jnp.bfloat16)  # noqa: E731
    x = normal(2, depth)
    p = {
        "gain": normal(depth),
        "gate": normal(inner, depth) / 16,
        "up": normal(inner, depth) / 16,
        "down": normal(depth, inner) / 26,
    }
    step = mk.megakernel(block, implementation="simulate")
    result = np.asarray(step(x, p), np.float32)
    print(f"largest error against float32: {np.abs(result - plain(x, p)).max():.3f}")

    text = step.lower(x, p).as_text("pages")
    print("\nThe queue of SM 0:")
    print(text.split("\nsm 0\n")[1].split("\nsm 1")[0])

    found = set[bytes]()
    for seed in range(8):
        (replayed,) = mk.replay(
            text,
            [np.asarray(a) for a in jax.tree.leaves((x, p))],
            tasks=step.trace(x, p).program,
            machine=mk.simulated(4),
            seed=seed,
        )
        found.add(np.asarray(replayed).tobytes())
    print(f"\nDifferent results in 8 orders of the roles: {len(found)}")


if __name__ == "__main__":
    main()
