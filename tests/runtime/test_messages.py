"""What mk.megakernel says of programs that are not legal: task, shape, line, remedy."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk

Array = Any
F32 = jnp.float32


def one_call(task: Any, specs: Any = (mk.whole,), out: Any = None) -> Any:
    def program(*arrays: Array) -> Array:
        spec = out or mk.Spec((1, 8), lambda: (0, 0))
        shape = mk.Shape((1, 8), F32)
        return mk.call(task, in_specs=specs, out_specs=spec, out_shape=shape)(*arrays)

    return program


def message(program: Any, *arrays: Array) -> str:
    with pytest.raises(mk.TraceError) as error:
        mk.megakernel(program)(*arrays)
    return str(error.value)


@mk.task
def cumulative(x: Array) -> Array:
    return jnp.cumsum(x, axis=-1)


@mk.task
def unmasked(x: Array) -> Array:
    return x * jnp.sum(x, axis=-1, keepdims=True)


@mk.task
def computed_valid(x: Array) -> Array:
    y = x * 2.0
    return jnp.where(mk.valid(y), y, 0.0)


@mk.task
def identity(x: Array) -> Array:
    return x


X = np.ones((1, 8), np.float32)


def test_wrong_block() -> None:
    text = message(one_call(identity, out=mk.Spec((1, 4), lambda: (0, 0))), X)
    assert "call 'identity', result 0" in text
    assert "float32[1, 8] for a block float32[1, 4]" in text
    assert "test_messages.py" in text
    assert "out_spec" in text


def test_index_out_of_bounds() -> None:
    text = message(one_call(identity, (mk.Spec((1, 8), lambda: (0, 1)),)), X)
    assert "call 'identity', operand 0: index out of bounds: dimension 1" in text
    assert "[1, 8] starts at 8" in text
    assert "test_messages.py" in text
    assert "check the grid and the index map" in text


def test_unsupported_primitive() -> None:
    text = message(one_call(cumulative), X)
    assert "task 'cumulative': cumsum(float32[1,8])" in text
    assert "return jnp.cumsum(x, axis=-1)" in text
    assert "mk.fold" in text


def test_reduction_over_padding() -> None:
    text = message(one_call(unmasked, (mk.Spec((1, 8), lambda: (0, 0)),)), X[:, :7])
    assert "task 'unmasked': reduce_sum(float32[1,8])" in text
    assert "past the edge" in text
    assert "x * jnp.sum" in text
    assert "mk.valid" in text


def test_valid_of_a_computed_value() -> None:
    text = message(one_call(computed_valid), X)
    assert "task 'computed_valid'" in text
    assert "no operand of the task" in text
    assert "jnp.where(mk.valid(y), y, 0.0)" in text


def test_two_writers() -> None:
    def program(x: Array) -> Array:
        call = functools.partial(mk.call, identity, grid=(3,), in_specs=(mk.whole,))
        out = mk.Spec((1, 8), lambda i: (0, 0))
        return call(out_specs=out, out_shape=mk.Shape((1, 8), F32))(x)

    text = message(program, X)
    assert "call 'identity': two writers: grid axis 0 of size 3" in text
    assert "test_messages.py" in text
    assert "use every grid axis" in text


def test_state_that_is_not_returned() -> None:
    def program(x: Array, state: Array) -> Array:
        mk.call(
            identity,
            in_specs=(mk.whole,),
            out_specs=mk.Into(state, (1, 8), lambda: (0, 0)),
        )(x)
        return x

    text = message(program, X, X)
    assert "state: written with mk.Into but not returned" in text
    assert "return the array" in text
