"""Deliberate errors: each names the task, what is wrong with its shape, the user's line
with a caret, and what to do. The line that is meant is marked `# wrong` below.
"""

import functools
import linecache
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mkdsl as mk
from mkdsl.lang.trace import trace_program
from mkdsl.lower.machine import simulated
from mkdsl.lower.pipeline import compile_program

Array = Any
BF16, F32 = jnp.bfloat16, jnp.float32


def leaf(*shape: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, LAYERS = leaf(4, 256), leaf(512, 256), leaf(3, 4, 256)
ALL = mk.Spec((4, 256), lambda: (0, 0))


def of(*shape: int) -> mk.Shape:
    return mk.Shape(shape, BF16)


@mk.task
def double(x: Array) -> Array:
    return x * 2


@mk.task
def total(x: Array) -> Array:
    return jnp.sum(x.astype(F32), -1, keepdims=True)  # wrong


def call(task: Any, *arrays: Array, **how: Any) -> Any:
    """A call with whole operands and one whole result of the shape of X."""
    how = {"in_specs": mk.whole, "out_specs": ALL, "out_shape": of(4, 256), **how}
    return mk.call(task, **how)(*arrays)  # wrong


def refused(program: Callable[..., Any], *args: Any) -> str:
    """The text of the error that tracing raises, once its line and hint are checked."""
    with pytest.raises(mk.TraceError) as error:
        trace_program(program, args, "program", [f"arg{i}" for i in range(len(args))])
    return checked(error.value)


def checked(error: mk.MkdslError) -> str:
    src = error.src
    assert src.file == __file__
    line = linecache.getline(src.file, src.line)
    assert "# wrong" in line, line
    text = str(error)
    assert f"--> {__file__}:{src.line}" in text
    assert line.strip() in text
    assert "^^^" in text
    assert text.rstrip().endswith(f"hint: {error.hint}")
    assert error.hint
    return text


def body(task: Callable[..., Any], *args: Any) -> str:
    """What is said of a body."""
    return refused(lambda *arrays: call(mk.task(task), *arrays), *args)


# Calls.


def test_block_of_the_wrong_rank() -> None:
    spec = mk.Spec((256,), lambda: (0,))
    text = refused(lambda x: call(double, x, in_specs=spec), X)
    assert "call 'double', operand 0: block (256,)" in text
    assert "1 indices for an array bfloat16[4, 256]" in text


def test_index_out_of_bounds() -> None:
    half = mk.Spec((4, 128), lambda i: (0, i))
    text = refused(lambda x: call(double, x, grid=(3,), in_specs=half), X)
    assert "operand 0: index out of bounds: dimension 1 of arg0[4, 256]" in text
    assert "starts at 256 for g0=2" in text


@pytest.mark.parametrize(
    ("dim", "words"),
    [(0, "0 is not a block size"), (-128, "-128 is not a block size")],
)
def test_block_size(dim: int, words: str) -> None:
    spec = mk.Spec((4, dim), lambda: (0, 0))
    assert words in refused(lambda x: call(double, x, in_specs=spec), X)


def test_index_that_is_no_formula() -> None:
    spec = mk.Spec((4, 256), lambda: (0, 0.5))
    text = refused(lambda x: call(double, x, in_specs=spec), X)
    assert "the index 0.5 is not an index expression" in text


def test_index_that_is_no_integer_input() -> None:
    def program(x: Array) -> Array:
        return call(double, x, in_specs=mk.Spec((4, 256), lambda: (x[0, 0], 0)))

    assert "is not an index expression" in refused(program, X)


def test_bounded_slice_without_a_range() -> None:
    spec = mk.Spec((4, mk.BoundedSlice(256)), lambda: (0, 0))
    text = refused(lambda x: call(double, x, in_specs=spec), X)
    assert "the index of a BoundedSlice is 0" in text
    assert "mk.ds(start, size)" in text


def test_comparison_of_an_index() -> None:
    spec = mk.Spec(
        (4, 128),
        lambda i: (0, i if i < 1 else 0),  # wrong
    )
    text = refused(lambda x: call(double, x, grid=(2,), in_specs=spec), X)
    assert "operand 0: the index map fails on (g0): comparison of `g0` with 1" in text
    assert "mk.minimum" in text


def test_truth_of_an_index() -> None:
    spec = mk.Spec(
        (4, 128),
        lambda i: (0, i or 1),  # wrong
    )
    text = refused(lambda x: call(double, x, grid=(2,), in_specs=spec), X)
    assert "the truth of `g0` is not known while the program is traced" in text


def test_product_of_two_indices() -> None:
    spec = mk.Spec(
        (4, 128),
        lambda i, j: (0, i * j),  # wrong
    )
    text = refused(lambda x: call(double, x, grid=(2, 2), in_specs=spec), X)
    assert "one factor of a product in an index must be a constant" in text


def test_index_map_of_the_wrong_number_of_axes() -> None:
    spec = mk.Spec((4, 128), lambda i, j: (0, i))
    text = refused(lambda x: call(double, x, grid=(2,), in_specs=spec), X)
    assert "the index map fails on (g0)" in text
    assert "one index per grid axis" in text


def test_grid_axis_without_a_block_of_its_own() -> None:
    text = refused(
        lambda x: call(
            double, x, grid=(2,), out_specs=mk.Spec((4, 256), lambda i: (0, 0))
        ),
        X,
    )
    assert "call 'double': two writers: grid axis 0 of size 2" in text
    assert "double[4, 256]" in text


def test_two_instances_of_one_block() -> None:
    out = mk.Spec((4, 256), lambda i: (0, i // 2))
    text = refused(
        lambda x: call(double, x, grid=(4,), out_specs=out, out_shape=of(4, 512)), X
    )
    assert "two writers: instances [0] and [1] both write the block" in text
    assert "double[4, 512] at [0, 0]" in text


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"in_specs": (mk.whole,) * 2}, "2 in_specs for 1 operands"),
        ({"out_specs": (ALL, ALL)}, "2 out_specs, 1 out_shapes"),
        (
            {"out_specs": (ALL, ALL), "out_shape": (of(4, 256), of(4, 256))},
            "the task returns 1 values for 2 out_specs",
        ),
        ({"out_shape": None}, "a Spec needs an out_shape"),
        (
            {"out_shape": mk.Shape((4, 256), F32)},
            "the task returns bfloat16[4, 256] for a block float32[4, 256]",
        ),
        (
            {"out_specs": mk.Spec((4, 128), lambda: (0, 0))},
            "the task returns bfloat16[4, 256] for a block bfloat16[4, 128]",
        ),
    ],
)
def test_specs_and_results_disagree(how: dict[str, Any], words: str) -> None:
    text = refused(lambda x: call(double, x, **how), X)
    assert "call 'double'" in text
    assert words in text


def test_operand_that_is_no_array_of_the_program() -> None:
    text = refused(lambda x: call(double, np.ones((4, 256))), X)
    assert "operand 0 is a ndarray, not an array of the program" in text


def test_call_of_a_function_that_is_no_task() -> None:
    text = refused(lambda x: call(lambda y: y, x), X)
    assert "which is not a task" in text
    assert "@mk.task" in text


def test_positional_constants_of_a_task() -> None:
    text = refused(lambda x: call(functools.partial(double, x), x), X)
    assert "with positional arguments" in text
    assert "by keyword" in text


def test_operand_that_no_result_needs() -> None:
    text = refused(lambda x, w: call(mk.task(lambda x, w: x * 2), x, w), X, W)
    assert "no result needs operand 1, w: bfloat16[512, 256]" in text


def test_call_outside_of_a_program() -> None:
    with pytest.raises(mk.TraceError) as error:
        call(double, X)
    text = checked(error.value)
    assert "mk.call outside a program" in text
    assert "mk.megakernel" in text


def test_scan_outside_of_a_program() -> None:
    with pytest.raises(mk.TraceError) as error:
        mk.scan(lambda c, _: c, X, length=2)  # wrong
    assert "mk.scan outside a program" in checked(error.value)


# Bodies.


def matmul(x: Array, w: Array) -> Array:
    return x @ w.T  # wrong


def cumulative(x: Array) -> Array:
    return jnp.cumsum(x, -1)  # wrong


def sort(x: Array) -> Array:
    return jnp.sort(x)  # wrong


def top_k(x: Array) -> Array:
    return lax.top_k(x, 2)[0]  # wrong


def loop(x: Array) -> Array:
    return lax.fori_loop(0, 3, lambda i, y: y * 2, x)  # wrong


def while_loop(x: Array) -> Array:
    return lax.while_loop(lambda y: jnp.sum(y) < 3, lambda y: y * 2, x)  # wrong


def cond(x: Array) -> Array:
    return lax.cond(jnp.sum(x) > 0, lambda y: y, lambda y: y * 2, x)  # wrong


def take(x: Array, i: Array) -> Array:
    return x[i[:, 0]]  # wrong


def update(x: Array) -> Array:
    return x.at[0, 0].set(1)  # wrong


def window(x: Array, i: Array) -> Array:
    return lax.dynamic_slice(x, (0, i[0, 0]), (4, 256))  # wrong


def pad(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, 64)))  # wrong


def reverse(x: Array) -> Array:
    return x[:, ::-1]  # wrong


def noise(x: Array) -> Array:
    return x + jax.random.normal(jax.random.key(0), x.shape)  # wrong


def tangent(x: Array) -> Array:
    return jnp.tan(x)  # wrong


def any_of(x: Array) -> Array:
    return jnp.where(jnp.any(x > 0, -1, keepdims=True), x, 0)  # wrong


INT = leaf(4, 1, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("task", "args", "primitive", "remedy"),
    [
        (matmul, (X, W), "dot_general(bfloat16[4,256], bfloat16[256,512])", "mk.dot"),
        (cumulative, (X,), "cumsum(bfloat16[4,256])", "mk.fold"),
        (sort, (X,), "sort(bfloat16[4,256])", "argmax"),
        (top_k, (X,), "top_k(bfloat16[4,256])", "argmax"),
        (loop, (X,), "scan(", "mk.fold"),
        (while_loop, (X,), "while(", "mk.fold"),
        (cond, (X,), "cond(", "jnp.where"),
        (take, (X, INT), "gather(", "index map"),
        (update, (X,), "scatter(bfloat16[4,256]", "mk.Into"),
        (window, (X, INT), "dynamic_slice(bfloat16[4,256]", "index map"),
        (pad, (X,), "pad(bfloat16[4,256]", "specs"),
        (reverse, (X,), "rev(bfloat16[4,256])", "mk.roll"),
        (noise, (X,), "random_", "operand"),
        (tangent, (X,), "tan(bfloat16[4,256])", "jnp.sin"),
        (any_of, (X,), "reduce_or(bool[4,256])", "jnp.max"),
    ],
)
def test_unsupported_primitive(
    task: Callable[..., Any], args: Any, primitive: str, remedy: str
) -> None:
    text = body(task, *args)
    assert f"task '{task.__name__}': {primitive}" in text
    assert "this primitive is not supported in a task" in text
    assert remedy in text.split("hint: ")[1]


def over_columns(x: Array) -> Array:
    return x * jnp.sum(x, 0)  # wrong


def merged(x: Array) -> Array:
    return (x.reshape(1024) * 2).reshape(4, 256)  # wrong


def turned(x: Array) -> Array:
    return (x.T * 2).T  # wrong


def unaligned(x: Array) -> Array:
    return jnp.concatenate([x[:, 3:], x[:, :3]], -1)  # wrong


def too_wide(x: Array) -> Array:
    return jnp.concatenate([x, x], -1)  # wrong


def positions(x: Array) -> Array:
    return x + lax.broadcasted_iota(BF16, (4, 256), 0)  # wrong


def remainder(x: Array) -> Array:
    return x % 2.0  # wrong


def choice(x: Array) -> Array:
    return lax.select_n(jnp.zeros(x.shape, jnp.int32), x, x, x)  # wrong


def rolled(x: Array) -> Array:
    return mk.roll(x.astype(jnp.int32), 1)  # wrong


def rolled_wide(x: Array) -> Array:
    wide = jnp.broadcast_to(jnp.sum(x, -1, keepdims=True), (4, 320))
    return mk.roll(wide, 1)  # wrong


def rolled_columns(x: Array) -> Array:
    return x + mk.roll(jnp.sum(x, -1), 1)[:, None]  # wrong


def computed_valid(x: Array) -> Array:
    return jnp.where(mk.valid(x * 2), x, 0)  # wrong


def streamed_twice(x: Array, w: Array) -> Array:
    return mk.dot(x, w) + jnp.sum(w.astype(F32))  # wrong


def streamed_left(x: Array) -> Array:
    return mk.dot(x, x)  # wrong


def dtypes(x: Array, w: Array) -> Array:
    return mk.dot(x.astype(F32), w)  # wrong


def depths(x: Array, w: Array) -> Array:
    return mk.dot(x[:, :128], w)  # wrong


def broken(x: Array, w: Array) -> Array:
    return x * w  # wrong


@pytest.mark.parametrize(
    ("task", "args", "what", "remedy"),
    [
        (over_columns, (X,), "axes (0,) of (4, 256) are not the features", "last axis"),
        (merged, (X,), "(4, 256) -> (1024,) changes the role of an axis", "index map"),
        (turned, (X,), "an axis changes its role", "streamed operand"),
        (
            unaligned,
            (X,),
            "slice(bfloat16[4,256]): [0:4, 3:256] of [4, 256]",
            "mk.roll",
        ),
        (too_wide, (X,), "to [4, 512]", "256 at most"),
        (positions, (X,), "columns have no position", "[columns, 1] operand"),
        (remainder, (X,), "the remainder of floating-point numbers", "jnp.floor"),
        (choice, (X,), "selects one of 3 values", "jnp.where"),
        (rolled, (X,), "mk.roll rotates floating-point numbers", "cast"),
        (rolled_wide, (X,), "rotates the features of a tile, 256 at most", "index map"),
        (rolled_columns, (X,), "rotates the features of a tile", "index map"),
        (
            computed_valid,
            (X,),
            "mk.valid of a value that is no operand",
            "valid(operand",
        ),
        (streamed_twice, (X, W), "a streamed operand passes through pages", "mk.dot"),
        (streamed_left, (X,), "the first operand is a stream", "[columns, depth]"),
        (
            dtypes,
            (X, W),
            "float32[4, 256] and bfloat16[512, 256]: the dtypes",
            "astype",
        ),
        (depths, (X, W), "bfloat16[4, 128] and bfloat16[512, 256]", "[rows, depth]"),
        (
            broken,
            (X, leaf(3, 256)),
            "task 'broken' fails on blocks (bfloat16[4, 256], bfloat16[3, 256])",
            "in_specs",
        ),
    ],
)
def test_body_without_meaning_on_tiles(
    task: Callable[..., Any], args: Any, what: str, remedy: str
) -> None:
    text = body(task, *args)
    assert what in text
    assert remedy in text.split("hint: ")[1]
    if "mk.dot of" not in text:
        assert f"task '{task.__name__}'" in text


def test_reduction_over_padding() -> None:
    def program(x: Array) -> Array:
        block = mk.Spec((4, 100), lambda i: (0, i))
        out = mk.Spec((4, 1), lambda i: (0, i))
        shape = mk.Shape((4, 3), F32)
        return call(total, x, grid=(3,), in_specs=block, out_specs=out, out_shape=shape)

    text = refused(program, X)
    assert "task 'total': reduce_sum(float32[4,100])" in text
    assert "features past the edge of an array" in text
    assert "mk.valid(operand, axis)" in text


@pytest.mark.parametrize("spoil", [jnp.logical_not, lambda m: m | (m ^ m)])
def test_mask_that_does_not_remove_padding(spoil: Callable[..., Any]) -> None:
    @mk.task
    def task(x: Array) -> Array:
        y = jnp.where(spoil(mk.valid(x)), x, 0).astype(F32)
        return jnp.sum(y, -1, keepdims=True)  # wrong

    def program(x: Array) -> Array:
        block = mk.Spec((4, 100), lambda i: (0, i))
        out = mk.Spec((4, 1), lambda i: (0, i))
        shape = mk.Shape((4, 3), F32)
        return call(task, x, grid=(3,), in_specs=block, out_specs=out, out_shape=shape)

    assert "features past the edge of an array" in refused(program, X)


def test_captured_array() -> None:
    table = jnp.arange(256.0)

    @mk.task  # wrong
    def task(x: Array) -> Array:
        return x + table

    text = refused(lambda x: call(task, x), X)
    assert "task 'task' captures arrays of shapes (256,)" in text
    assert "operands of the call" in text


def test_columns_of_tiles_disagree() -> None:
    @mk.task
    def task(x: Array, y: Array) -> tuple[Array, Array]:
        return x * 2, y * 2

    text = refused(lambda x, y: call(task, x, y), X, leaf(3, 256))
    assert "task 'task': blocks [4, 256], [3, 256]" in text
    assert "different numbers of columns" in text


def test_mask_as_a_result() -> None:
    text = refused(lambda x: call(mk.task(lambda x: x > 0), x), X)
    assert "result 0 is bool[4, 256]" in text
    assert "astype" in text


def test_number_as_a_result() -> None:
    text = refused(lambda x: call(mk.task(lambda x: jnp.sum(x[0])), x), leaf(1, 256))
    assert "result 0 is a scalar bfloat16[]" in text
    assert "[columns, features]" in text


def test_computed_second_operand_of_dot() -> None:
    text = body(lambda x, w: mk.dot(x, w * 2), X, W)
    assert "the second operand of mk.dot is computed" in text


def test_computed_stream_of_a_fold() -> None:
    def step(c: Array, blocks: Any, valid: Array) -> Array:
        return c + mk.dot(jnp.ones((4, 64), BF16), blocks[0])

    def task(q: Array) -> Array:
        return mk.fold(step, jnp.zeros((4, 64)), (q * 2,), block=64)

    text = refused(lambda q: call(mk.task(task), q), leaf(128, 64))
    assert "task 'task': a stream of mk.fold is computed" in text


def test_program_id_of_an_axis_that_is_not_there() -> None:
    task = mk.task(lambda x: x + mk.program_id(1).astype(x.dtype))
    text = refused(lambda x: call(task, x, grid=(1,)), X)
    assert "mk.program_id(1) for a grid of 1 axes" in text


@pytest.mark.parametrize(
    "f", [lambda: mk.program_id(0) + 1, jax.jit(lambda: mk.program_id(0))]
)
def test_program_id_outside_of_a_program(f: Callable[[], Any]) -> None:
    with pytest.raises(mk.TraceError, match=r"mk.program_id\(0\) outside a program"):
        f()


# Folds.


def fold(step: Callable[..., Any], **how: Any) -> str:
    given = how.pop("init", None)
    streams = how.pop("streams", lambda k: (k,))

    @mk.task
    def task(q: Array, k: Array) -> Array:
        init = jnp.zeros((4, 1)) if given is None else given
        keep = lambda c, b, v: step(c, b, v, q)  # noqa: E731
        return mk.fold(keep, init, streams(k), block=64, **how)  # wrong

    return refused(lambda q, k: call(task, q, k), leaf(4, 64), leaf(128, 64))


def scores(c: Array, blocks: Any, valid: Array, q: Array) -> Array:
    return c + jnp.sum(jnp.where(valid, mk.dot(q, blocks[0]), 0), -1, keepdims=True)


def nested(c: Array, blocks: Any, valid: Array, q: Array) -> Array:
    inner = lambda c, b, v: scores(c, b, v, q)  # noqa: E731
    return c + mk.fold(inner, c, blocks, block=64)  # wrong


def whole_block(c: Array, blocks: Any, valid: Array, q: Array) -> Array:
    scale = jnp.sum(q.astype(F32), -1, keepdims=True)
    return c + jnp.sum(blocks[0].astype(F32)) * scale  # wrong


@pytest.mark.parametrize(
    ("step", "how", "words", "remedy"),
    [
        (
            lambda c, b, v, q: scores(c, b, v, q).astype(BF16),
            {},
            "the body of mk.fold returns (bfloat16[4, 1]), its carry is (float32",
            "astype",
        ),
        (
            lambda c, b, v, q: mk.dot(q, b[0]),
            {},
            "the body of mk.fold returns (float32[4, 64]), its carry is (float32",
            "init",
        ),
        (
            scores,
            {"merge": lambda a, b: jnp.zeros((3, 1))},
            "the merge of mk.fold returns (float32[3, 1])",
            "init",
        ),
        (
            scores,
            {"merge": lambda a, b: a + jnp.arange(4.0)[:, None] * np.ones((4, 1))},
            "the merge of an mk.fold captures values of shapes (4, 1)",
            "carry",
        ),
        (scores, {"init": jnp.float32(0)}, "mk.fold carries (float32[])", "jnp.zeros"),
        (
            scores,
            {"identity": (0.0, 1.0)},
            "identity of 2 arrays for an init of 1",
            "structure",
        ),
        (
            scores,
            {"streams": lambda k: (k[0],)},
            "mk.fold over (bfloat16[64])",
            "[rows, features]",
        ),
        (nested, {}, "mk.fold inside of mk.fold", "a task of its own"),
        (whole_block, {}, "a streamed operand passes through pages", "mk.fold"),
        (scores, {"streams": lambda k: ()}, "mk.fold over ()", "operands of the task"),
    ],
)
def test_fold(step: Any, how: dict[str, Any], words: str, remedy: str) -> None:
    text = fold(step, **how)
    assert words in text
    assert remedy in text.split("hint: ")[1]


# Arrays and programs.


def test_stale_version() -> None:
    def program(x: Array) -> tuple[Array, Array]:
        new = call(
            double, x, out_specs=mk.Into(x, (4, 256), lambda: (0, 0)), out_shape=None
        )
        return new, call(double, x)

    text = refused(program, X)
    assert "operand 0: this version of arg0 was overwritten by mk.Into" in text
    assert "the array that the call returned" in text


def test_stale_version_as_a_result() -> None:
    def program(x: Array) -> Array:  # wrong
        call(double, x, out_specs=mk.Into(x, (4, 256), lambda: (0, 0)), out_shape=None)
        return x

    text = refused(program, X)
    assert "result of program 'program': this version of arg0" in text


def test_new_version_that_is_not_returned() -> None:
    def program(x: Array, y: Array) -> Array:  # wrong
        call(double, x, out_specs=mk.Into(x, (4, 256), lambda: (0, 0)), out_shape=None)
        return call(double, y)

    text = refused(program, X, X)
    assert "program 'program': arg0: written with mk.Into but not returned" in text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x + 1, "arithmetic on arg0[4, 256]"),  # wrong
        (lambda x: 2.0 * x, "arithmetic on arg0[4, 256]"),  # wrong
        (np.asarray, "arg0 is a symbol of a program, not an array"),
        (lambda x: [*x], "iteration over arg0[4, 256]"),  # wrong
        (lambda x: x.reshape(3, 5), "reshape of arg0[4, 256] to [3, 5]"),  # wrong
        (lambda x: x[0:2], "only leading integer or grid indices"),  # wrong
        (lambda x: x[0, 0, 0], "arg0[4, 256][0, 0, 0]"),  # wrong
        (lambda x: 3, "program 'program' returns a int"),  # wrong
        (lambda x: x[0, 0], "returns arg0[4, 256][0, 0]"),  # wrong
        (lambda x: x.reshape(8, 128)[1], "returns arg0[8, 128][1]"),  # wrong
    ],
)
def test_arrays_of_a_program(wrong: Callable[..., Any], words: str) -> None:
    assert words in refused(lambda x: wrong(x), X)  # wrong


def test_argument_of_another_dtype() -> None:
    def program(x: Array) -> Array:  # wrong
        return call(double, x)

    text = refused(program, leaf(4, 256, dtype=jnp.int8))
    assert "argument arg0 is int8[4, 256]" in text


def test_argument_that_is_no_array() -> None:
    def program(x: Array, n: int) -> Array:  # wrong
        return call(double, x)

    text = refused(program, X, 3)
    assert "argument arg1 is a int, not an array" in text
    assert "functools.partial" in text


# Scans.


def test_nested_scan() -> None:
    def inner(c: Array, x: Array, i: Array) -> Array:
        return mk.scan(lambda c, *_: c, c, length=2)  # wrong

    text = refused(lambda x, xs: mk.scan(inner, x, xs), X, LAYERS)
    assert "mk.scan inside mk.scan" in text


def test_static_of_the_wrong_length() -> None:
    def program(x: Array, xs: Array) -> Array:
        return mk.scan(lambda c, *_: call(double, c), x, xs, static=[1, 2])  # wrong

    text = refused(program, X, LAYERS)
    assert "static of shape [2] has not one entry for each of 3 layers" in text


def test_carry_changes_its_shape() -> None:
    def layer(c: Array, x: Array, i: Array) -> Array:
        out = mk.Spec((4, 256), lambda i: (0, i))
        return call(double, c, grid=(2,), out_specs=out, out_shape=of(4, 512))

    def program(x: Array, xs: Array) -> Array:
        return mk.scan(layer, x, xs)  # wrong

    text = refused(program, X, LAYERS)
    assert "bfloat16[4, 256] before a layer and bfloat16[4, 512] after it" in text


def test_carry_changes_its_structure() -> None:
    def program(x: Array, xs: Array) -> Array:
        return mk.scan(lambda c, *_: (call(double, c), c), x, xs)  # wrong

    text = refused(program, X, LAYERS)
    assert "the layer of mk.scan returns PyTreeDef((*, *))" in text


def test_carry_in_place_and_not() -> None:
    def layer(c: Array, i: Array, replace: int) -> Array:
        if replace:
            return call(double, c)
        return call(
            double, c, out_specs=mk.Into(c, (4, 256), lambda: (0, 0)), out_shape=None
        )

    def program(x: Array) -> Array:
        step = lambda c, _, i, s: layer(c, i, s)  # noqa: E731
        return mk.scan(step, x, length=2, static=[0, 1])  # wrong

    text = refused(program, X)
    assert "written in place by one kind of layer and replaced by another" in text


@pytest.mark.parametrize(
    ("xs", "words"),
    [
        ((LAYERS, leaf(2, 4)), "stacked arrays of lengths [2, 3]"),
        ((), "stacked arrays of lengths []"),
        ((leaf(),), "over a scalar"),
    ],
)
def test_stacks_of_a_scan(xs: tuple[Any, ...], words: str) -> None:
    def program(x: Array, *xs: Array) -> Array:
        return mk.scan(lambda c, *_: call(double, c), x, xs)  # wrong

    assert words in refused(program, X, *xs)


# Plans.


def test_working_set_too_large() -> None:
    shape = (16, 2560)

    @mk.task
    def task(x: Array, y: Array) -> Array:
        return x * y

    def program(x: Array, y: Array) -> Array:
        whole = mk.Spec(shape, lambda: (0, 0))
        return call(task, x, y, out_specs=whole, out_shape=mk.Shape(shape, F32))

    wide = leaf(*shape, dtype=F32)
    traced = trace_program(program, (wide, wide), "program", ["x", "y"])[0]
    with pytest.raises(mk.PlanError) as error:
        compile_program(traced, simulated(1))
    text = checked(error.value)
    assert "program 'program' does not fit" in text
    assert re.search(r"shared memory of one SM +232448  simulated1", text)
    assert re.search(r"resident operands, 1 x +327680  task \(full\) 327680", text)
    assert "smaller tiles" in text
