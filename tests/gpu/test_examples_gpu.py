"""The examples in bfloat16, on whatever runs them, against their plain JAX."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mkdsl as mk
from examples import lesson_09_decode_in_jit as lesson
from examples import linear_attention as la
from examples import parallel_block as pb

Array = Any

# Of the error of plain JAX in bfloat16, both against float32; measured on four seeds
# with "xla": 0.99 to 1.02 (2026-11-30).
ALLOWED = 1.25
# Of a score, the largest of 509; errors measured in bfloat16: up to 0.01.
SCORE = 0.03
LENGTHS = [0, 63, 64, 100, 119]
SLOTS, STEPS, LAUNCHES = 128, 8, 50

pytestmark = pytest.mark.timeout(150, method="thread")
everywhere = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("simulate", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
compiled = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)


def wide(tree: Any) -> Any:
    """The same numbers in float32."""
    narrow = jnp.bfloat16
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == narrow else x, tree
    )


def error(found: Array, exact: Array) -> float:
    """Norm of the difference over the norm; NaN counts as equal to NaN."""
    a, b = (np.asarray(jnp.nan_to_num(x.astype(jnp.float32))) for x in (found, exact))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def close(found: Array, plain: Array, exact: Array) -> bool:
    """Whether a result is about as near to the exact one as plain JAX is."""
    return error(found, exact) <= ALLOWED * error(plain, exact)


# -------------------------------------------------------------------- parallel_block


@pytest.fixture(scope="module")
def block() -> tuple[pb.Model, Any, Any, Array]:
    """(model, parameters, what makes a cache, tokens)."""
    m, key = pb.Model(), jax.random.key(0)
    cache = partial(pb.filled_cache, m, LENGTHS, SLOTS, key)
    return m, pb.random_params(m, key), cache, jnp.array([7, 300, 508, 1, 2])


@everywhere
def test_a_parallel_block_step(block: Any, implementation: Any) -> None:
    m, params, cache, tokens = block
    step = mk.megakernel(
        pb.decode(m, len(LENGTHS), SLOTS), implementation=implementation
    )
    token, score, new = step(params, cache(), tokens)
    with jax.default_matmul_precision("highest"):
        want, best, exact = pb.plain_decode(m, wide(params), wide(cache()), tokens)
    _, _, plain = pb.plain_decode(m, params, cache(), tokens)
    assert np.abs(score - best).max() <= SCORE
    # With these parameters the two best scores are further apart than that.
    assert token.tolist() == want.tolist()
    for name in ("k", "v"):
        before = np.asarray(cache()[name], np.float32)
        after = np.asarray(new[name], np.float32)
        written = np.zeros(before.shape, bool)
        for row, length in enumerate(LENGTHS):
            written[:, row, :, length] = True
        np.testing.assert_array_equal(after[~written], before[~written])
        found, other, sure = (
            jnp.asarray(np.asarray(c[name], np.float32)[written])
            for c in (new, plain, exact)
        )
        assert close(found, other, sure)


@compiled
def test_a_parallel_block_loop(block: Any, implementation: Any) -> None:
    """Given tokens, one after the other, in one jitted loop with a donated cache."""
    m, params, cache, _ = block
    ids = jax.random.randint(jax.random.key(1), (STEPS, len(LENGTHS)), 0, m.vocab)
    step = mk.megakernel(
        pb.decode(m, len(LENGTHS), SLOTS),
        donate_argnums=1,
        implementation=implementation,
    )

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def loop(step: Any, params: Any, cache: Any) -> tuple[Array, Any]:
        def one(t: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
            scores, cache = state
            _, score, cache = step(params, cache, ids[t])
            longer = {**cache, "lengths": cache["lengths"] + 1}
            return scores.at[t].set(score), longer

        zero = jnp.zeros(ids.shape, jnp.float32)
        return lax.fori_loop(0, STEPS, one, (zero, cache))

    scores, new = loop(step, params, cache())
    with jax.default_matmul_precision("highest"):
        plain = partial(pb.plain_decode, m)
        exact, _ = loop(plain, wide(params), wide(cache()))
    assert np.abs(scores - exact).max() <= SCORE
    assert new["lengths"].tolist() == [n + STEPS for n in LENGTHS]
    assert np.isfinite(np.asarray(new["k"][:, 0, :, :STEPS], np.float32)).all()
    assert np.isnan(np.asarray(new["k"][:, 0, :, STEPS:], np.float32)).all()


# ------------------------------------------------------------------ linear_attention


@pytest.fixture(scope="module")
def recurrent() -> tuple[la.Sizes, Any, Any, Array]:
    """(sizes, parameters, what makes a state, inputs of all steps)."""
    s, batch = la.Sizes(), 5
    xs = jax.random.normal(jax.random.key(3), (STEPS, batch, s.hidden), jnp.bfloat16)
    state = partial(la.random_state, s, batch, jax.random.key(4))
    return s, la.random_params(s, jax.random.key(5)), state, xs


@everywhere
def test_a_linear_attention_step(recurrent: Any, implementation: Any) -> None:
    s, params, state, xs = recurrent
    step = mk.megakernel(la.model(s, xs.shape[1]), implementation=implementation)
    found = step(params, state(), xs[0])
    with jax.default_matmul_precision("highest"):
        exact = la.plain_model(s, wide(params), wide(state()), wide(xs[0]))
    plain = la.plain_model(s, params, state(), xs[0])
    assert all(map(close, found, plain, exact))


@compiled
def test_a_linear_attention_loop(recurrent: Any, implementation: Any) -> None:
    s, params, state, xs = recurrent
    step = mk.megakernel(
        la.model(s, xs.shape[1]), donate_argnums=1, implementation=implementation
    )
    loop = jax.jit(la.run, static_argnums=0, donate_argnums=2)
    found = loop(step, params, state(), xs)
    with jax.default_matmul_precision("highest"):
        exact_step = partial(la.plain_model, s)
        exact = loop(exact_step, wide(params), wide(state()), wide(xs))
    plain = loop(partial(la.plain_model, s), params, state(), xs)
    assert all(map(close, found, plain, exact))
    assert step.traces == 1


@compiled
def test_the_state_after_many_launches_is_the_same_every_time(
    recurrent: Any, implementation: Any
) -> None:
    """A state that is read before it is overwritten: no task may come too late."""
    s, params, state, xs = recurrent
    step = mk.megakernel(
        la.model(s, xs.shape[1]), donate_argnums=1, implementation=implementation
    )
    many = jnp.tile(xs, (LAUNCHES // STEPS + 1, 1, 1))
    loop = jax.jit(la.run, static_argnums=0, donate_argnums=2)
    runs = [loop(step, params, state(), many) for _ in range(3)]
    for ys, new in runs[1:]:
        np.testing.assert_array_equal(ys.view(jnp.uint16), runs[0][0].view(jnp.uint16))
        np.testing.assert_array_equal(new.view(jnp.uint16), runs[0][1].view(jnp.uint16))


@compiled
def test_the_loop_of_lesson_9_chooses_what_plain_jax_chooses(
    implementation: Any,
) -> None:
    step = mk.megakernel(lesson.step, donate_argnums=1, implementation=implementation)
    found, plain = (
        lesson.generate(run, *lesson.data()[:2], 24, lesson.data()[2])[0]
        for run in (step, lesson.plain_step)
    )
    # A rounding may turn a close choice, after which the texts differ.
    same = np.asarray(found == plain).all(axis=0)
    assert same[:4].all(), (found, plain)
