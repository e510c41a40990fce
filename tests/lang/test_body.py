"""Bodies as equations: inlined calls, merged equations, the two sides of the cut."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from mkdsl.lang.body import Body, evaluate, flatten, line_of, make_body, without_cut

Array = Any


def body_of(f: Any, *shapes: tuple[int, ...]) -> Body:
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def run(*args: Array) -> list[Array]:
        out = f(*args)
        return list(out) if isinstance(out, tuple) else [out]

    return make_body(jax.make_jaxpr(run)(*avals).jaxpr)


def names(equations: Any) -> list[str]:
    return [e.primitive.name for e in equations]


def test_calls_are_inlined() -> None:
    inner = jax.jit(lambda x: jax.nn.relu(x) * 2)
    body = body_of(lambda x: inner(x) + inner(x), (2, 4))
    assert names(body.equations) == ["max", "mul", "add"]


def test_what_no_result_needs_is_left_out() -> None:
    body = body_of(lambda x, y: (jnp.sin(x), jnp.cos(y))[0], (2, 4), (2, 4))
    assert names(body.equations) == ["sin"]
    assert body.operands(body.equations, body.outvars) == {0}


def test_the_sides_of_a_cut() -> None:
    def f(x: Array, w: Array, y: Array) -> Array:
        return jnp.tanh(mk.dot(x * 2, w)) + y

    body = body_of(f, (2, 64), (8, 64), (2, 8))
    assert body.cut == "dot"
    assert names(body.before) == ["mul"]
    assert names(body.cut_equations) == ["mk_dot"]
    assert names(body.after) == ["tanh", "add"]
    whole = without_cut(body)
    assert (whole.cut, whole.cut_vars, whole.before) == ("none", (), ())
    assert whole.after == body.equations


def test_before_and_after_are_the_whole() -> None:
    def f(x: Array, w: Array) -> Array:
        y = x * 2
        return jnp.tanh(mk.dot(y, w)) + jnp.sum(y, -1, keepdims=True)

    body = body_of(f, (2, 64), (8, 64))
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s, np.float32) for s in ((2, 64), (8, 64))]
    known = dict(zip(body.invars, values, strict=True))
    part = (*body.before, *body.cut_equations)
    cuts = evaluate(part, known, body.cut_vars, {})
    known |= dict(zip(body.cut_vars, cuts, strict=True))
    (got,) = evaluate(body.after, known, body.outvars, {})
    np.testing.assert_allclose(got, f(*values), rtol=1e-6)


def test_equal_equations_inside_of_a_fold_are_merged() -> None:
    def f(q: Array, k: Array) -> Array:
        def step(c: Array, blocks: Any, valid: Array) -> Array:
            return c + jnp.sin(mk.dot(q, blocks[0])) + jnp.sin(mk.dot(q, blocks[0]))

        return mk.fold(step, jnp.zeros((2, 64)), (k,), block=64)

    (fold,) = [
        e for e in body_of(f, (2, 8), (64, 8)).equations if "fold" in str(e.primitive)
    ]
    assert names(fold.params["jaxpr"].eqns).count("mk_dot") == 1


def test_an_equation_knows_the_line_of_the_user() -> None:
    body = body_of(lambda x: jnp.sin(x), (2, 4))
    src = line_of(body.equations[0])
    assert src.file == __file__
    assert src.line


def test_flattening_twice_changes_nothing() -> None:
    closed = jax.make_jaxpr(lambda x: jax.nn.silu(x) * 2)(jnp.zeros((2, 4)))
    once = flatten(closed.jaxpr)
    assert str(flatten(once)) == str(once)
