"""Products with 16 or 32 rows a task: pieces of their depth are stacked in a page."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import mkdsl as mk
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.emit.kernel import build
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.pages import dot_page
from mkdsl.lower.pipeline import Options, compile_program
from models.tasks import linear

Array = Any
BF16 = jnp.bfloat16
EPS = 1e-5


def block(rows: int, depth: int) -> Any:
    return mk.Spec((rows, depth), lambda i: (i, 0))


def mlp(rows: int, inner: int, hidden: int) -> Any:
    """y = x + (silu(n @ gate.T) * (n @ up.T)) @ down.T, `rows` features a task."""

    def f(x: Array, gain: Array, gate: Array, up: Array, down: Array) -> Array:
        batch = x.shape[0]
        tile = mk.Spec((batch, rows), lambda i: (0, i))

        u = mk.call(
            partial(linear.gate_up, eps=EPS),
            grid=(mk.cdiv(inner, rows),),
            in_specs=(mk.whole, mk.whole, block(rows, hidden), block(rows, hidden)),
            out_specs=tile,
            out_shape=mk.Shape((batch, inner), BF16),
        )(x, gain, gate, up)
        return mk.call(
            linear.residual,
            grid=(mk.cdiv(hidden, rows),),
            in_specs=(tile, mk.whole, block(rows, inner)),
            out_specs=tile,
            out_shape=mk.Shape((batch, hidden), BF16),
        )(x, u, down)

    return f


def arguments(batch: int, inner: int, hidden: int) -> list[Array]:
    keys = jax.random.split(jax.random.key(batch), 5)
    shapes = [(batch, hidden), (hidden,), (inner, hidden), (inner, hidden)]
    shapes.append((hidden, inner))
    values = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    scales = (1, 1, hidden**-0.5, hidden**-0.5, inner**-0.5)
    return [(v * s).astype(BF16) for v, s in zip(values, scales, strict=True)]


def plain(x: Array, gain: Array, gate: Array, up: Array, down: Array) -> Array:
    x, gain, gate, up, down = (v.astype(jnp.float32) for v in (x, gain, gate, up, down))
    n = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * gain
    return x + (jax.nn.silu(n @ gate.T) * (n @ up.T)) @ down.T


@pytest.mark.interpret
@pytest.mark.timeout(240, method="thread")
@pytest.mark.parametrize(
    ("rows", "batch", "inner", "hidden", "splits"),
    [
        (16, 1, 1024, 2048, ()),
        # One row in pieces: of the depth in smem, and of the body.
        (16, 1, 2048, 2048, ()),
        (32, 1, 512, 2048, ()),
        (64, 1, 2048, 4096, ()),
        (256, 1, 4096, 2048, ()),
        (16, 3, 1024, 1024, ()),
        (16, 16, 1024, 1024, ()),
        (32, 8, 512, 512, ()),
        (32, 1, 1024, 512, (("residual", 2),)),
        (16, 1, 2048, 1024, (("residual", 2),)),
        # The last task has half of its rows.
        (16, 2, 1024, 1032, ()),
        # A depth that fills no page of stacked pieces: rows are padded.
        (16, 2, 1088, 1024, ()),
        (8, 2, 1024, 1024, ()),
        (24, 2, 1536, 512, ()),
    ],
)
def test_few_rows_a_task(
    rows: int, batch: int, inner: int, hidden: int, splits: tuple[tuple[str, int], ...]
) -> None:
    args = arguments(batch, inner, hidden)
    program = mk.megakernel(mlp(rows, inner, hidden)).trace(*args).program
    options = Options(decompose=DecomposeOptions(split=False, splits=splits))
    plan = compile_program(program, simulated(1), options)
    (got,) = jax.jit(build(plan, plgpu.InterpretGPUParams()))(*args)
    want = plain(*args)
    assert np.abs(got.astype(jnp.float32) - want).max() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("batch", [1, 16])
def test_they_lower(rows: int, batch: int) -> None:
    args = arguments(batch, 2048, 1024)
    traced = mk.megakernel(mlp(rows, 2048, 1024)).trace(*args)
    plan = compile_program(traced.program, H200)
    pages = {p for k in plan.kinds for p in k.pages}
    assert pages == {dot_page(rows, 1024, H200.page_bytes)}
    assert pages == {(rows, 16384 // rows)}
    lowered = jax.jit(build(plan)).trace(*args).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1
