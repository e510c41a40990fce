"""Every entry of the published table, and every construct that was once wrong.

Each runs in Pallas' GPU interpreter against plain jnp. Cases share kernels, so that the
file stays fast: a case is one call of the kernel of its group.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mkdsl as mk
from mkdsl.errors import PlanError
from mkdsl.lang.body import flatten
from mkdsl.lang.table import PRIMITIVES
from tests.lower.emit import bodies as b
from tests.lower.emit.bodies import BF16, F32, I32, Case, Kind

Array = Any
C, F = 3, 192
TILE, WIDE, INTS = Kind((C, F), BF16), Kind((C, F), F32), Kind((C, F), I32)
COLUMN, VECTOR, VECTOR32 = Kind((C, 1), F32), Kind((F,), BF16), Kind((1, F), F32)


def positive(x: Array) -> Array:
    return jnp.abs(x) + 0.5


# One case for each primitive: the function, on a WIDE tile unless others are named.
SAMPLES: dict[str, Callable[..., Array] | tuple[Callable[..., Array], Kind]] = {
    "add": lambda x: x + 1.5,
    "sub": lambda x: 1.5 - x,
    "mul": lambda x: x * x,
    "div": lambda x: x / positive(x),
    "max": lambda x: jnp.maximum(x, 0.25),
    "min": lambda x: jnp.minimum(x, 0.25),
    "rem": (lambda x: lax.rem(x, jnp.int32(3)), INTS),
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": lambda x: jnp.log(positive(x)),
    "log2": lambda x: jnp.log2(positive(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "expm1": jnp.expm1,
    "tanh": jnp.tanh,
    "rsqrt": lambda x: lax.rsqrt(positive(x)),
    "sqrt": lambda x: jnp.sqrt(positive(x)),
    "square": jnp.square,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "and": lambda x: jnp.where((x > 0) & (x < 1), x, 5),
    "or": lambda x: jnp.where((x > 1) | (x < -1), x, 5),
    "xor": lambda x: jnp.where((x > 0) ^ (x < 1), x, 5),
    "not": lambda x: jnp.where(~(x > 0), x, 5),
    "eq": (lambda x: jnp.where(x == 2, x, 5), INTS),
    "ne": (lambda x: jnp.where(x != 2, x, 5), INTS),
    "lt": lambda x: jnp.where(x < 0.5, x, 5),
    "le": lambda x: jnp.where(x <= 0.5, x, 5),
    "gt": (lambda x: jnp.where(x > 0.5, x, 5), TILE),
    "ge": (lambda x: jnp.where(x >= 0.5, x, 5), TILE),
    "select_n": lambda x: jnp.where(x > 0, x, -x),
    "integer_pow": lambda x: x**3,
    "pow": lambda x: jnp.power(positive(x), 1.7),
    "round": lambda x: jnp.round(3 * x),
    "floor": lambda x: jnp.floor(3 * x),
    "ceil": lambda x: jnp.ceil(3 * x),
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "convert_element_type": lambda x: x.astype(bool).astype(jnp.int32),
    "is_finite": lambda x: jnp.where(jnp.isfinite(x / jnp.zeros_like(x)), x, 5),
    "copy": lambda x: lax.copy_p.bind(x) * 2,
    "stop_gradient": lambda x: lax.stop_gradient(x) * 2,
    "broadcast_in_dim": (lambda c: jnp.broadcast_to(c, (C, F)) * 2, COLUMN),
    "reshape": (lambda g: g.reshape(1, F) * 2, VECTOR),
    "squeeze": (lambda g: g[0] * 2, VECTOR32),
    "reduce_sum": lambda x: jnp.sum(x, -1, keepdims=True),
    "reduce_max": lambda x: jnp.max(x, -1, keepdims=True),
    "reduce_min": lambda x: jnp.min(x, -1, keepdims=True),
    "argmax": lambda x: jnp.argmax(x, -1)[:, None].astype(jnp.int32),
    "iota": lambda x: x + jnp.arange(F),
    "slice": lambda x: x[:, 64:128] * 2,
    "split": lambda x: jnp.split(x, 3, axis=-1)[1] * 2,
    "concatenate": lambda x: jnp.concatenate([x[:, 64:], x[:, :64]], -1),
    "mk_roll": lambda x: mk.roll(x, 5),
    "mk_extent": lambda x: jnp.where(mk.valid(x), x, 5),
    "mk_program_id": lambda x: x + mk.program_id(0),
}


def sample(name: str) -> Case:
    entry = SAMPLES[name]
    fn, kind = entry if isinstance(entry, tuple) else (entry, WIDE)
    return Case(lambda x: fn(x), (kind,))


def test_there_is_a_sample_of_every_primitive_of_the_table() -> None:
    elsewhere = {"mk_dot", "mk_fold", "transpose"}
    assert SAMPLES.keys() == PRIMITIVES - elsewhere


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_sample_of_a_primitive_holds_it(name: str) -> None:
    case = sample(name)
    avals = [jax.ShapeDtypeStruct(k.shape, k.dtype) for k in case.operands]
    names = {
        e.primitive.name for e in flatten(jax.make_jaxpr(case.fn)(*avals).jaxpr).eqns
    }
    assert name in names


def check(cases: list[Case], **splits: int) -> None:
    """Lower the cases as one kernel, and compare it with jnp in the interpreter."""
    program = b.program_of(cases)
    plan = b.plan_of(program, **splits)
    assert b.lower(plan) <= plan.smem_bytes
    values = b.arguments(program, exact=False)
    for g, w in zip(b.interpret(plan, values), b.expected(cases, values), strict=True):
        # Results in bfloat16 and products of it.
        np.testing.assert_allclose(g.reshape(w.shape), w, rtol=2e-2, atol=2e-2)


@pytest.mark.interpret
@pytest.mark.parametrize("group", range(6))
def test_every_primitive_agrees_with_jnp(group: int) -> None:
    check([sample(name) for name in sorted(SAMPLES)[group::6]])


# Constructs.


def weight(rows: int = 128, depth: int = F) -> Kind:
    return Kind((rows, depth), BF16)


def norm(x: Array) -> Array:
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def two_results(x: Array) -> tuple[Array, Array, Array]:
    return x * 2, x * 2, jnp.zeros(x.shape, jnp.float32)


RESULTS = {
    "an operand unchanged": Case(lambda x, n: (x, n), (TILE, INTS)),
    "a value twice and a literal": Case(two_results, (WIDE,)),
    "a column operand unchanged": Case(lambda c: c, (COLUMN,)),
    "a vector of a task with columns": Case(lambda x, g: (x, g * 2), (TILE, VECTOR)),
    "a 32-bit vector": Case(lambda x, g: (x, g * 2), (TILE, VECTOR32)),
    "vectors alone": Case(lambda g: norm(g[None])[0] * 2, (VECTOR,)),
    "one number of a vector": Case(
        lambda x, g: x * jnp.sum(g, -1, keepdims=True), (WIDE, VECTOR32)
    ),
}


@pytest.mark.interpret
def test_results_of_every_form() -> None:
    check(list(RESULTS.values()))


def of_constants(x: Array, w: Array) -> Array:
    ones = jnp.ones((C, F), jnp.float32)
    total = jnp.sum(ones, -1, keepdims=True) + jnp.max(ones, -1, keepdims=True)
    rolled = mk.roll(jnp.ones((C, 64), jnp.float32), 3)
    joined = jnp.concatenate([rolled, jnp.zeros((C, 64), jnp.float32)], -1)
    return mk.dot(ones.astype(w.dtype), w) + x[:, :128] * joined * total


DOTS = {
    "rows of 8": Case(lambda x, w: mk.dot(x, w), (TILE, weight(8))),
    "rows of 100": Case(lambda x, w: mk.dot(x, w), (TILE, weight(100))),
    "depth of 72": Case(
        lambda x, w: mk.dot(x, w), (Kind((C, 72), BF16), weight(128, 72))
    ),
    "a vector": Case(lambda x, w: mk.dot(x, w), (VECTOR, weight())),
    "a computed vector": Case(lambda x, w: mk.dot(x * 2, w), (VECTOR, weight())),
    "one row for all columns": Case(
        lambda x, y, w: mk.dot(x, w) + y[:, :128],
        (Kind((1, F), BF16), WIDE, weight()),
    ),
    "constants": Case(of_constants, (WIDE, weight())),
    "different rows": Case(
        lambda x, v, w: (mk.dot(x, v), mk.dot(x, w)), (TILE, weight(64), weight())
    ),
    "one after the other": Case(
        lambda x, v, w: mk.dot(mk.dot(x, v).astype(x.dtype), w),
        (TILE, weight(64), weight(128, 64)),
    ),
    "of a norm, beside its operand": Case(
        lambda x, w: (mk.dot(norm(x * 3), w), x), (TILE, weight())
    ),
    "of a norm, beside the norm": Case(
        lambda x, w: (mk.dot(norm(x * 3), w), norm(x * 3) * 2), (TILE, weight())
    ),
    "of a norm and of its operand": Case(
        lambda x, v, w: mk.dot(norm(x * 3), v) + mk.dot(x, w),
        (TILE, weight(), weight()),
    ),
    "largest of padded rows": Case(
        lambda x, w: jnp.max(mk.dot(x, w) - 100, -1, keepdims=True),
        (TILE, weight(100)),
    ),
}


@pytest.mark.interpret
@pytest.mark.parametrize("group", range(2))
def test_dots(group: int) -> None:
    check(list(DOTS.values())[group::2])


SPLIT_DOTS = {
    "body0": Case(
        lambda x, w: mk.roll(mk.dot(mk.roll(x, 3), w), 64),
        (Kind((C, 256), BF16), weight(128, 256)),
    ),
    "body1": Case(
        lambda x, w: jax.nn.softmax(mk.dot(norm(x), w), -1),
        (Kind((C, 256), BF16), weight(100, 256)),
    ),
    "body2": Case(
        lambda x, v, w, g: jax.nn.silu(mk.dot(x, v)) * mk.dot(x, w) * g,
        (Kind((16, 512), BF16), *[weight(64, 512)] * 2, Kind((64,), F32)),
    ),
}


@pytest.mark.interpret
def test_split_dots_with_epilogues() -> None:
    check(list(SPLIT_DOTS.values()), **dict.fromkeys(SPLIT_DOTS, 2))


def fold_sum(q: Array, k: Array, init: Array) -> Array:
    def step(c: Array, blocks: Any, valid: Array) -> Array:
        return c + jnp.where(valid, mk.dot(q, blocks[0]), 0.0).sum(-1, keepdims=True)

    zero = jnp.zeros((q.shape[0], 1), jnp.float32)
    join = lambda a, b: a + b  # noqa: E731
    return mk.fold(step, init, (k,), block=64, merge=join, identity=zero)


def fold_values(q: Array, k: Array, v: Array, gain: Array, scale: Array) -> Array:
    """Operands beside the streams, a roll and a computed left side, in every step."""
    q = (q * 2).astype(q.dtype)

    def step(c: Any, blocks: Any, valid: Array) -> Any:
        p = jnp.where(valid, mk.dot(q, blocks[0]) * scale * gain[:64], 0.0)
        p = mk.roll(jnp.clip(p, -1, 1), 3)
        return c[0] + mk.dot(p.astype(q.dtype), blocks[1].T), c[1] + 1

    init = jnp.ones(v.shape[-1:], jnp.float32) * jnp.ones_like(scale)
    return mk.roll(mk.fold(step, (init, scale), (k, v), block=64)[0], 1)


def online_softmax(q: Array, k: Array, v: Array) -> Array:
    def step(c: Any, kv: Any, valid: Array) -> Any:
        top, total, acc = c
        s = jnp.where(valid, mk.dot(q, kv[0]), -jnp.inf)
        new = jnp.maximum(top, jnp.max(s, -1, keepdims=True))
        p, old = jnp.exp(s - new), jnp.exp(top - new)
        acc = acc * old + mk.dot(p.astype(q.dtype), kv[1].T)
        return new, total * old + jnp.sum(p, -1, keepdims=True), acc

    def join(a: Any, b: Any) -> Any:
        new = jnp.maximum(a[0], b[0])
        x, y = jnp.exp(a[0] - new), jnp.exp(b[0] - new)
        return new, a[1] * x + b[1] * y, a[2] * x + b[2] * y

    low = jnp.full((q.shape[0], 1), -1e30, jnp.float32)
    init = (low, low * 0, jnp.zeros(q.shape, jnp.float32))
    _, total, acc = mk.fold(step, init, (k, v), block=64, merge=join)
    return (acc / total).astype(q.dtype)


def attention(columns: int, features: int) -> tuple[Kind, Kind, Kind]:
    rows = Kind((300, features), BF16)
    return Kind((columns, features), BF16), rows, rows


FOLDS = {
    "body0": Case(fold_sum, (Kind((C, 64), BF16), Kind((300, 64), BF16), COLUMN)),
    "body1": Case(online_softmax, attention(1, 256)),
    "body2": Case(online_softmax, attention(8, 72)),
}


@pytest.mark.interpret
def test_folds() -> None:
    more = (*attention(C, 64), Kind((64,), F32), COLUMN)
    check([*FOLDS.values(), Case(fold_values, more)])


@pytest.mark.interpret
def test_split_folds_use_init_once() -> None:
    check(list(FOLDS.values()), **dict.fromkeys(FOLDS, 2))


@pytest.mark.interpret
def test_argmax_of_nan_is_the_first_nan() -> None:
    def best(x: Array, n: Array) -> tuple[Array, ...]:
        nan = jnp.where((n == 2) & (x > 0), jnp.nan, x)
        first = jnp.argmax(nan, -1)[:, None].astype(jnp.int32)
        return first, jnp.argmax(n, -1)[:, None].astype(jnp.int32)

    wide = 1100
    check([Case(best, (Kind((C, wide), F32), Kind((C, wide), I32)))])


# What has no form in the kernel is refused by name.


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(lambda x, w: mk.dot(x, w), (WIDE, Kind((64, F), F32))), "bfloat16"),
        (
            Case(
                lambda x, w: mk.dot(x, w),
                (Kind((C, F), "float16"), Kind((64, F), "float16")),
            ),
            "bfloat16",
        ),
        (Case(lambda x: x * 2, (Kind((C, 100), BF16),)), "pad its last axis to 104"),
        (Case(lambda x, w: mk.dot(x, w), (TILE, weight(320))), "at most 256 rows"),
    ],
)
def test_a_form_that_the_kernel_has_not_is_a_plan_error(case: Case, words: str) -> None:
    with pytest.raises(PlanError, match=words) as error:
        b.lower(b.plan_of(b.program_of([case])))
    assert error.value.hint
    assert error.value.src.line
