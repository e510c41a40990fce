"""Names of calls around and inside of scans."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import mkdsl as mk
from mkdsl.lang.program import Program
from mkdsl.lang.trace import trace_program
from mkdsl.lower.verify_graph import verify_program

Array = Any
X = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)


@mk.task
def add(x: Array, *, amount: float) -> Array:
    return x + jnp.asarray(amount, x.dtype)


def bump(x: Array, amount: float, name: str) -> Array:
    whole = mk.Spec((8, 64), lambda: (0, 0))
    return mk.call(
        partial(add, amount=amount),
        in_specs=(mk.whole,),
        out_specs=whole,
        out_shape=mk.Shape((8, 64), jnp.bfloat16),
        name=name,
    )(x)


def names(f: Any) -> list[str]:
    program: Program = trace_program(f, (X,), "program", ["x"])[0]
    verify_program(program)
    return [call.name for call in program.calls()]


def test_calls_before_in_and_after_a_scan_have_names_of_their_own() -> None:
    def program(x: Array) -> Array:
        x = bump(x, 1, "bump")
        x = mk.scan(lambda x, _, i: bump(x, 1, "bump"), x, length=2)
        return bump(x, 1, "bump")

    assert names(program) == ["bump", "bump2", "bump3"]


def test_variants_of_a_scan_share_equal_calls() -> None:
    def layer(x: Array, _: Any, i: Any, amount: float) -> Array:
        return bump(bump(x, 1, "same"), amount, "other")

    def program(x: Array) -> Array:
        x = bump(x, 1, "first")
        return mk.scan(layer, x, length=3, static=[1.0, 2.0, 1.0])

    assert names(program) == ["first", "same", "other", "other@1"]
