"""The examples in float32 against their plain JAX, lowered for CUDA, and as printed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from examples import linear_attention as la
from examples import parallel_block as pb
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.machine import H200
from mkdsl.lower.pipeline import Options
from tests.lower.emit.lowered import kernels
from tests.lower.emit.test_interpret import interpret

Array = Any

TOLERANCE = 1e-3
LENGTHS, SLOTS = [0, 63, 64, 65, 127], 128
TOKENS = jnp.array([7, 300, 508, 1, 2])
KEY = jax.random.key(0)
both = pytest.mark.parametrize("implementation", ["xla", "simulate"])


def in_place(kernel: Any, kind: str) -> int:
    """How many arrays of that type a kernel shares with its caller."""
    return sum(kernel.results[out] == kind for _, out in kernel.aliases)


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    "model",
    [
        pb.Model(),
        pb.Model(vocab=777, hidden=320, inner=640, heads=3, rotary=64, layers=2),
    ],
    ids=["a quarter is turned", "all is turned"],
)
def test_parallel_block_in_float32(model: pb.Model, implementation: Any) -> None:
    params = pb.random_params(model, KEY, jnp.float32)
    cache = pb.filled_cache(model, LENGTHS, SLOTS, KEY, jnp.float32)
    step = mk.megakernel(
        pb.decode(model, len(LENGTHS), SLOTS), implementation=implementation
    )
    token, score, new = step(params, cache, TOKENS)
    want, best, exact = pb.plain_decode(model, params, cache, TOKENS)
    assert token.tolist() == want.tolist()
    np.testing.assert_allclose(score, best, atol=TOLERANCE, rtol=0)
    for name in ("k", "v"):
        np.testing.assert_allclose(new[name], exact[name], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_features_that_are_not_turned_do_not_depend_on_the_position() -> None:
    """Partial rotary: the same token at two positions, in the first layer."""
    model = pb.Model(layers=1)
    params = pb.random_params(model, KEY, jnp.float32)
    cache = pb.filled_cache(model, [3, 90], SLOTS, KEY, jnp.float32)
    step = mk.megakernel(pb.decode(model, 2, SLOTS), implementation="xla")
    _, _, new = step(params, cache, jnp.array([5, 5]))
    first, second = new["k"][0, 0, :, 3], new["k"][0, 1, :, 90]
    far = np.abs(first - second).max(0)
    assert (far[model.rotary :] == 0).all()
    assert (far[: model.rotary] > 1e-3).all()


@pytest.mark.slow
@both
def test_no_score_is_below_the_mask(implementation: Any) -> None:
    """Scores of -1e31 and so on, in the part of a split that starts from nothing."""
    slots, dim = 256, 64
    k, v = jax.random.normal(KEY, (2, slots, dim))
    q, k = jnp.ones((1, dim)), -1e30 - jnp.abs(k) * 1e30

    def f(q: Array, k: Array, v: Array, k_new: Array, v_new: Array) -> Array:
        return mk.call(
            pb.attend,
            out_specs=mk.Spec((1, dim), lambda: (0, 0)),
            out_shape=mk.Shape((1, dim), jnp.float32),
        )(q, k, v, k_new, v_new)

    splits = DecomposeOptions(split=False, splits=(("attend", 4),))
    step = mk.megakernel(
        f, implementation=implementation, options=Options(decompose=splits)
    )
    found = step(q, k, v, k[:1], v[:1])
    # The scores are far apart: all weight is on the largest one.
    largest = jnp.argmax(jnp.sum(k, axis=-1))
    np.testing.assert_allclose(found[0], v[largest], atol=TOLERANCE)


@pytest.mark.slow
@both
def test_linear_attention_in_float32(implementation: Any) -> None:
    sizes, batch = la.Sizes(), 5
    params = la.random_params(sizes, KEY, jnp.float32)
    state = la.random_state(sizes, batch, KEY, jnp.float32)
    x = jax.random.normal(KEY, (batch, sizes.hidden))
    step = mk.megakernel(la.model(sizes, batch), implementation=implementation)
    found, exact = step(params, state, x), la.plain_model(sizes, params, state, x)
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_state_may_be_wider_than_the_activations() -> None:
    sizes, batch = la.Sizes(), 3
    params = la.random_params(sizes, KEY)
    state = la.random_state(sizes, batch, KEY, jnp.float32)
    x = jax.random.normal(KEY, (batch, sizes.hidden), jnp.bfloat16)
    step = mk.megakernel(la.model(sizes, batch), implementation="xla")
    y, new = step(params, state, x)
    assert (y.dtype, new.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_parallel_block_lowers_to_one_kernel_that_writes_its_cache() -> None:
    model, batch = pb.Model(), len(LENGTHS)
    params = pb.random_params(model, KEY)
    cache = pb.filled_cache(model, LENGTHS, SLOTS, KEY)
    step = mk.megakernel(
        pb.decode(model, batch, SLOTS),
        donate_argnums=1,
        implementation="mosaic_gpu",
        machine=H200,
    )
    traced = jax.jit(step, donate_argnums=1).trace(params, cache, TOKENS)
    (kernel,) = kernels(traced.lower(lowering_platforms=("cuda",)))
    rows = model.layers * batch * model.heads
    assert in_place(kernel, f"tensor<{rows}x{SLOTS}x{model.head_dim}xbf16>") == 2


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 5])
def test_linear_attention_lowers_to_one_kernel_that_writes_its_state(
    batch: int,
) -> None:
    sizes = la.Sizes()
    params, state = la.random_params(sizes, KEY), la.random_state(sizes, batch, KEY)
    xs = jax.ShapeDtypeStruct((9, batch, sizes.hidden), jnp.bfloat16)
    step = mk.megakernel(
        la.model(sizes, batch),
        donate_argnums=1,
        implementation="mosaic_gpu",
        machine=H200,
    )
    loop = jax.jit(la.run, static_argnums=0, donate_argnums=2)
    lowered = loop.trace(step, params, state, xs).lower(lowering_platforms=("cuda",))
    (kernel,) = kernels(lowered)
    rows, dim = sizes.layers * batch * sizes.heads, sizes.head_dim
    assert in_place(kernel, f"tensor<{rows}x{dim}x{dim}xbf16>") == 1


@pytest.mark.interpret
@pytest.mark.timeout(240, method="thread")
def test_parallel_block_as_a_kernel() -> None:
    """The body of the kernel, on one interpreted SM."""
    model, lengths, tokens = pb.Model(layers=2), [0, 64, 100], TOKENS[:3]
    params = pb.random_params(model, KEY)
    cache = pb.filled_cache(model, lengths, SLOTS, KEY)
    program = pb.decode(model, len(lengths), SLOTS)
    token, score, new = interpret(program, params, cache, tokens)
    want, best, plain = pb.plain_decode(model, params, cache, tokens)
    assert token.tolist() == want.tolist()
    np.testing.assert_allclose(score, best, atol=0.03)
    for name in ("k", "v"):
        a, b = (np.asarray(c[name], np.float32) for c in (new, plain))
        np.testing.assert_allclose(a, b, atol=0.02, rtol=0.02)


@pytest.mark.interpret
@pytest.mark.timeout(240, method="thread")
@pytest.mark.parametrize(("batch", "heads"), [(3, 4), (1, 32)])
def test_linear_attention_as_a_kernel(batch: int, heads: int) -> None:
    """With one row of 32 heads of 64, what `update` writes lies in pieces."""
    sizes = la.Sizes(inner=256, layers=1, heads=heads)
    params, state = la.random_params(sizes, KEY), la.random_state(sizes, batch, KEY)
    x = jax.random.normal(KEY, (batch, sizes.hidden), jnp.bfloat16)
    found = interpret(la.model(sizes, batch), params, state, x)
    plain = la.plain_model(sizes, params, state, x)
    for a, b in zip(found, plain, strict=True):
        a, b = (np.asarray(t, np.float32) for t in (a, b))
        np.testing.assert_allclose(a, b, atol=0.02, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "last"),
    [
        (pb, "plain JAX chooses the same"),
        (la, "20 steps of 3 rows; largest difference to plain JAX: "),
    ],
)
def test_what_is_printed(
    example: Any, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    first, *_, end = capsys.readouterr().out.splitlines()
    assert first.startswith("implementation: xla")
    assert end.startswith(last)
    if example is la:
        assert float(end.removeprefix(last)) < TOLERANCE
