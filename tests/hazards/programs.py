"""The programs of the texts in this folder: as few tasks as show a hazard.

The bodies of tasks are here and not in the texts, which name them: `double#1` is the
task function `double` of this file. The digest of a body is 1 here, so that texts do
not depend on how JAX prints a body.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mkdsl as mk
from mkdsl.lang.program import Program, Scan, TaskDef
from mkdsl.lang.trace import trace_program

BF16 = jnp.bfloat16
TILE, WIDE = 64, 128
# Rows of the cache, and how many are in use before the step.
ROWS, LENGTH = 64, 5


@mk.task
def double(x: Any) -> Any:
    """2 * x."""
    return x * 2


@mk.task
def project(x: Any, w: Any) -> Any:
    """x @ w.T."""
    return mk.dot(x, w).astype(x.dtype)


@mk.task
def attend(q: Any, k: Any) -> Any:
    """(q @ k.T) @ k, for the rows that are there: attention without a softmax."""

    def step(carry: Any, blocks: Any, valid: Any) -> Any:
        scores = jnp.where(valid, mk.dot(q, blocks[0]), 0.0).astype(q.dtype)
        return carry + mk.dot(scores, blocks[0].T)

    zero = jnp.zeros(q.shape, jnp.float32)
    return mk.fold(step, zero, (k,), block=64).astype(q.dtype)


@mk.task
def attend3(q: Any, a: Any, b: Any, c: Any) -> Any:
    """((q @ a.T) + (q @ b.T)) @ c: three pages at once."""

    def step(carry: Any, blocks: Any, valid: Any) -> Any:
        scores = mk.dot(q, blocks[0]) + mk.dot(q, blocks[1])
        scores = jnp.where(valid, scores, 0.0).astype(q.dtype)
        return carry + mk.dot(scores, blocks[2].T)

    zero = jnp.zeros(q.shape, jnp.float32)
    return mk.fold(step, zero, (a, b, c), block=64).astype(q.dtype)


def _tile(width: int) -> Any:
    return mk.Spec((1, width), lambda *g: (0, g[0] if g else 0))


def _double(x: Any, name: str, width: int = TILE, into: Any = None) -> Any:
    """2 * x, one task for each tile of `width` features."""
    grid = (x.shape[1] // width,) if x.shape[1] > width else ()
    tile = _tile(width)
    return mk.call(
        double,
        grid=grid,
        in_specs=tile,
        out_specs=tile if into is None else mk.Into(into, (1, width), tile.index_map),
        out_shape=mk.Shape(x.shape, x.dtype) if into is None else None,
        name=name,
    )(x)


def gather(x: Any) -> Any:
    """y = 2 x in two tiles; z = 2 y in one."""
    return _double(_double(x, "y"), "z", WIDE)


def pairs(x: Any, u: Any) -> Any:
    """Two chains that have nothing to do with each other: x, a, c and u, b, d."""
    a, b = _double(x, "a"), _double(u, "b")
    return _double(a, "c"), _double(b, "d")


def fan(x: Any) -> Any:
    """Two tasks read what one writes."""
    a = _double(x, "a")
    return _double(a, "c"), _double(a, "d")


def overwrite(s: Any, t: Any) -> Any:
    """y = 2 s, then s = 2 t in place."""
    y = _double(s, "y")
    return y, _double(t, "s2", into=s)


def rewrite(s: Any, t: Any, u: Any) -> Any:
    """s = 2 t, then s = 2 u, in place."""
    return _double(u, "second", into=_double(t, "first", into=s))


def shift(s: Any) -> Any:
    """s = 2 s in place, tile by tile."""
    return _double(s, "shift", into=s)


def weights(x: Any, w: Any) -> Any:
    """v = 2 w; z = 2 v reads v whole, y = x @ v.T streams it."""
    square = mk.Spec((TILE, TILE), lambda: (0, 0))
    shape = mk.Shape(w.shape, w.dtype)
    v, z = w, w
    for name in ("v", "z"):
        made = mk.call(
            double, in_specs=square, out_specs=square, out_shape=shape, name=name
        )(v)
        v, z = (made, z) if name == "v" else (v, made)
    y = mk.call(
        project,
        in_specs=(mk.whole, square),
        out_specs=_tile(TILE),
        out_shape=mk.Shape(x.shape, x.dtype),
        name="y",
    )(x, v)
    return z, y


def append(q: Any, new: Any, cache: Any, length: Any) -> Any:
    """Write row `length` of the cache, then read all rows up to it."""
    row = mk.Into(cache, (1, TILE), lambda: (length[0], 0))
    cache = mk.call(
        double, in_specs=_tile(TILE), out_specs=row, out_shape=None, name="append"
    )(new)
    past = mk.Spec((mk.BoundedSlice(ROWS), TILE), lambda: (mk.ds(0, length[0] + 1), 0))
    y = mk.call(
        attend,
        in_specs=(mk.whole, past),
        out_specs=_tile(TILE),
        out_shape=mk.Shape(q.shape, q.dtype),
        name="attend",
    )(q, cache)
    return y, cache


def three(q: Any, a: Any, b: Any, c: Any) -> Any:
    """A fold over three arrays side by side, then one more task."""
    rows = mk.Spec((ROWS, TILE), lambda: (0, 0))
    y = mk.call(
        attend3,
        in_specs=(mk.whole, rows, rows, rows),
        out_specs=_tile(TILE),
        out_shape=mk.Shape(q.shape, q.dtype),
        name="y",
    )(q, a, b, c)
    return _double(y, "z")


def _leaf(*shape: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


_ROW, _SQUARE = _leaf(1, TILE), _leaf(TILE, TILE)
_ARGUMENTS: dict[Any, dict[str, Any]] = {
    gather: {"x": _leaf(1, WIDE)},
    pairs: {"x": _ROW, "u": _ROW},
    fan: {"x": _ROW},
    overwrite: {"s": _ROW, "t": _ROW},
    rewrite: {"s": _ROW, "t": _ROW, "u": _ROW},
    shift: {"s": _leaf(1, WIDE)},
    weights: {"x": _ROW, "w": _SQUARE},
    append: {"q": _ROW, "new": _ROW, "cache": _SQUARE,
             "length": _leaf(1, dtype=jnp.int32)},
    three: {"q": _ROW, "a": _SQUARE, "b": _SQUARE, "c": _SQUARE},
}  # fmt: skip


def traced(function: Any) -> Program:
    """The program of a function of this file, with digests of 1."""
    arguments = _ARGUMENTS[function]
    program, _ = trace_program(
        function, list(arguments.values()), function.__name__, list(arguments)
    )
    steps = [
        replace(step, task=replace(step.task, digest="1"))
        for step in program.steps
        if not isinstance(step, Scan)
    ]
    return replace(program, steps=tuple(steps))


PROGRAMS: dict[str, Program] = {f.__name__: traced(f) for f in _ARGUMENTS}


def tasks() -> list[TaskDef]:
    """The bodies for all texts."""
    return [call.task for program in PROGRAMS.values() for call in program.calls()]


def inputs(program: Program) -> list[np.ndarray]:
    """Arguments of a program, the same every time; integers are LENGTH."""
    rng = np.random.default_rng(0)
    return [
        np.full(b.shape, LENGTH, np.int32)
        if b.dtype == "int32"
        else rng.standard_normal(b.shape).astype(BF16)
        for b in map(program.buffer, program.inputs)
    ]
