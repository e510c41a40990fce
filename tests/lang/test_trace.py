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


# What flows through a scan.

LAYERS = jax.ShapeDtypeStruct((3, 8, 64), jnp.bfloat16)


def trace(f: Any, *args: Any) -> Program:
    program = trace_program(f, args, "program", [f"arg{i}" for i in range(len(args))])[
        0
    ]
    verify_program(program)
    return program


def whole_of(access: Any) -> list[str]:
    """Starts of an access, one text per dimension."""
    return [str(axis.start) for axis in access.axes]


@mk.task
def plus(x: Array, y: Array) -> Array:
    return x + y


def joined(x: Array, y: Array, name: str = "plus") -> Array:
    return mk.call(
        plus,
        out_specs=mk.Spec((8, 64), lambda: (0, 0)),
        out_shape=mk.Shape((8, 64), jnp.bfloat16),
        name=name,
    )(x, y)


def test_a_carry_is_one_entry_of_a_stack_per_layer() -> None:
    def program(x: Array, xs: Array) -> Array:
        x = bump(x, 1, "first")
        return mk.scan(lambda c, y, _: joined(c, y), x, xs)

    made = trace(program, X, LAYERS)
    first, scan = made.steps
    stack = made.buffer("first.carry")
    assert (stack.shape, stack.role) == ((4, 8, 64), "temp")
    # The call before the scan writes entry 0 itself: nothing is copied.
    assert whole_of(first.outs[0]) == ["0", "0", "0"]
    assert first.outs[0].buffer == stack.name
    (call,) = scan.variants[0]
    assert whole_of(call.ins[0]) == ["layer", "0", "0"]
    assert whole_of(call.ins[1]) == ["layer", "0", "0"]
    assert whole_of(call.outs[0]) == ["layer + 1", "0", "0"]
    assert {call.ins[0].buffer, call.outs[0].buffer} == {stack.name}
    assert made.outputs[0].buffer == stack.name
    assert made.outputs[0].layer == 3
    assert [b.name for b in made.buffers] == ["arg0", "arg1", stack.name]


def test_a_carry_that_starts_from_an_argument_is_copied() -> None:
    made = trace(lambda x, xs: mk.scan(lambda c, y, _: joined(c, y), x, xs), X, LAYERS)
    copy, scan = made.steps
    assert copy.name == "copy"
    assert copy.ins[0].buffer == "arg0"
    assert made.buffer("arg0").role == "input"
    assert scan.variants[0][0].ins[0].buffer == copy.outs[0].buffer


def test_carries_that_change_places_are_copied() -> None:
    def layer(c: Any, y: Array, i: Any) -> Any:
        return joined(c[1], y), c[0]

    def program(x: Array, xs: Array) -> Any:
        start = bump(x, 1, "a"), bump(x, 2, "b")
        return mk.scan(layer, start, xs)

    made = trace(program, X, LAYERS)
    scan = made.steps[-1]
    assert [c.name for c in scan.variants[0]] == ["plus", "copy"]
    assert {o.layer for o in made.outputs} == {3}


def test_a_carry_in_place_keeps_its_array() -> None:
    def layer(c: Any, _: Any, i: Any) -> Any:
        x, cache = c
        out = mk.Into(cache[i], (8, 64), lambda: (0, 0))
        return bump(x, 1, "up"), mk.call(plus, out_specs=out)(x, cache[i])

    def program(x: Array, cache: Array) -> Any:
        return mk.scan(layer, (x, cache), length=3)

    made = trace(program, X, LAYERS)
    assert made.buffer("arg1").role == "state"
    write = made.steps[-1].variants[0][1]
    assert write.outs[0].buffer == "arg1"
    assert whole_of(write.outs[0]) == ["layer", "0", "0"]
    assert made.outputs[1].buffer == "arg1"
    assert made.outputs[1].layer is None


def test_what_a_layer_makes_has_memory_for_every_layer() -> None:
    def layer(c: Array, y: Array, i: Any) -> Array:
        return joined(c, bump(y, 1, "inner"))

    made = trace(lambda x, xs: mk.scan(layer, x, xs), X, LAYERS)
    assert made.buffer("inner").shape == (3, 8, 64)
    inner, outer = made.steps[-1].variants[0]
    assert whole_of(inner.outs[0]) == ["layer", "0", "0"]
    assert inner.outs[0] == outer.ins[1]


def test_static_values_reach_the_layer_as_numbers() -> None:
    seen: list[Any] = []

    def layer(c: Array, _: Any, i: Any, static: Any) -> Array:
        seen.append(static)
        return bump(c, static["by"], "bump")

    static = {"by": [1.0, 2.0, 1.0], "kind": ["a", "b", "a"]}
    made = trace(lambda x: mk.scan(layer, x, length=3, static=static), X)
    assert made.steps[-1].choice == (0, 1, 0)
    # Layers of equal constants are traced once (and the first once more, to see which
    # carries it replaces).
    assert [s["by"] for s in seen] == [1.0, 1.0, 2.0]
    assert {s["kind"] for s in seen} == {"a", "b"}


# Views and indices.


def test_a_reshape_is_a_view_of_the_same_buffer() -> None:
    def program(x: Array) -> Array:
        view = x.reshape(8, 2, -1)
        assert view.shape == (8, 2, 32)
        out = mk.Spec((8, 32), lambda i: (0, i))
        spec = mk.Spec((8, None, 32), lambda i: (0, i, 0))
        return mk.call(
            partial(add, amount=1.0),
            grid=(2,),
            in_specs=spec,
            out_specs=out,
            out_shape=mk.Shape((8, 64), jnp.bfloat16),
        )(view)

    (call,) = trace(program, X).steps
    (access,) = call.ins
    assert (access.buffer, access.view) == ("arg0", (8, 2, 32))
    assert access.shape == (8, 32)
    assert whole_of(access) == ["0", "g0", "0"]


def test_leading_indices_select_a_part() -> None:
    def program(xs: Array, at: Array) -> Array:
        part = xs[at[2]]
        assert part.shape == (8, 64)
        assert xs[1].reshape(4, 128).shape == (4, 128)
        assert xs[1][3].shape == (64,)
        return bump(part, 1, "bump")

    made = trace(program, LAYERS, jax.ShapeDtypeStruct((3,), jnp.int32))
    (access,) = made.steps[0].ins
    assert whole_of(access) == ["at[2]".replace("at", "arg1"), "0", "0"]
    assert access.axes[0].squeezed


def test_results_in_another_shape_and_arguments_as_results() -> None:
    made = trace(lambda x: (bump(x, 1, "bump").reshape(4, 128), x, x), X)
    assert [o.shape for o in made.outputs] == [(4, 128), (8, 64), (8, 64)]
    assert [o.buffer for o in made.outputs] == ["bump", "arg0", "arg0"]


def test_tracing_twice_gives_equal_programs() -> None:
    def program(x: Array, xs: Array) -> Array:
        x = mk.scan(lambda c, y, i: joined(bump(c, 1, "bump"), y), x, xs)
        return bump(bump(x, 1, "bump"), 2, "bump")

    first, second = (trace(program, X, LAYERS) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_names_of_arguments_are_their_paths() -> None:
    def program(tree: Any, x: Array) -> Array:
        return joined(tree["layers"][0]["up"], x)

    names = trace(program, {"layers": [{"up": X}]}, X).inputs
    assert names == ("arg0.layers.0.up", "arg1")
