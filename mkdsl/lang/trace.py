"""Run the user's program function once on symbols: the Program.

Arrays that flow through the carry of a scan live in one stacked buffer
[length + 1, ...]: layer i reads entry i and writes entry i + 1, so no activation is
ever overwritten. Arrays written in place go through the carry as they are.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mkdsl.errors import SrcInfo, TraceError, caller, defined_at
from mkdsl.lang.arrays import Array, Shape, Spec
from mkdsl.lang.call import call
from mkdsl.lang.expr import expr, var
from mkdsl.lang.program import (
    ITEM_BYTES,
    Access,
    Axis,
    Buffer,
    Call,
    Output,
    Program,
    Scan,
)
from mkdsl.lang.recorder import Moved, Recorder, current, recording
from mkdsl.lang.task import task

Tree = Any


@task
def copy(x: Any) -> Any:
    """The block itself."""
    return x


def _copied(array: Array) -> Array:
    """A fresh array with the same elements, made by a call."""
    *lead, features = array.shape
    rows = lead.pop() if lead else None
    grid = (*lead, -(-features // 256))
    block = (*(None for _ in lead), *(() if rows is None else (rows,)), 256)

    def index(*g: Any) -> tuple[Any, ...]:
        return (*g[:-1], *(() if rows is None else (0,)), g[-1])

    spec = Spec(block, index)
    shape = Shape(array.shape, array.dtype)
    return call(copy, grid=grid, in_specs=(spec,), out_specs=spec, out_shape=shape)(
        array
    )


def scan(
    layer: Callable[..., Tree],
    init: Tree,
    xs: Tree = None,
    *,
    length: int | None = None,
    static: Tree = None,
) -> Tree:
    """carry = layer(carry, xs[i], i[, static[i]]) for i in range(length).

    Args:
        layer: records the calls of one layer; `i` is the layer as an index expression,
            for the index maps of arrays written in place (`cache[i]`).
        init: pytree of arrays. Activations are fresh in every layer; arrays that some
            layer writes with mk.Into are the same arrays throughout.
        xs: pytree of arrays stacked over layers; layers see one entry each.
        length: number of layers, if xs is empty.
        static: pytree of per-layer constants of the plan (numpy values or lists):
            layers may branch on them in Python.

    Returns:
        The carry after the last layer.
    """
    recorder, src = current("mk.scan"), caller()
    if recorder.calls is not None:
        raise TraceError("mk.scan inside mk.scan", src, "flatten the two into one")
    leaves: list[Array] = jax.tree.leaves(xs)
    if any(not a.shape for a in leaves):
        raise TraceError(
            "mk.scan over a scalar: xs are stacked over layers",
            src,
            "bind what all layers share in the layer function",
        )
    lengths = {a.shape[0] for a in leaves} | ({length} if length is not None else set())
    if len(lengths) != 1:
        raise TraceError(
            f"mk.scan over stacked arrays of lengths {sorted(lengths)}",
            src,
            "stack all xs over the same layers, or give length= without xs",
        )
    (count,) = lengths
    choice, values = _variants(static, count, src)
    carry, tree = jax.tree.flatten(init)
    index = var("layer")

    def run(which: int, arrays: Sequence[Array]) -> list[Array]:
        recorder.names, recorder.made, recorder.calls = set(outer[0]), set(), []
        x = jax.tree.map(lambda a: a[index], xs)
        extra = () if static is None else (values[which],)
        out = layer(jax.tree.unflatten(tree, arrays), x, index, *extra)
        got, after = jax.tree.flatten(out)
        if after != tree:
            raise TraceError(
                f"the layer of mk.scan returns {after}, its carry is {tree}",
                src,
                "return the next carry alone, in the structure of the first",
            )
        return got

    saved = replace(recorder, buffers=dict(recorder.buffers))
    outer, versions = (recorder.names, recorder.made), dict(recorder.versions)

    def enter() -> None:
        recorder.layers, recorder.versions = count, dict(versions)

    def leave() -> None:
        recorder.calls = recorder.layers = None
        recorder.names, recorder.made = outer

    enter()
    fresh = [a.buffer != b.buffer for a, b in zip(run(0, carry), carry, strict=True)]
    leave()
    recorder.buffers, recorder.versions = dict(saved.buffers), dict(versions)
    stacks = [
        _stack(recorder, a, count, src) if new else None
        for a, new in zip(carry, fresh, strict=True)
    ]
    starts = [
        a if s is None else Array(s.name, s.shape, s.dtype, (index,))
        for a, s in zip(carry, stacks, strict=True)
    ]
    variants: list[tuple[Call, ...]] = []
    ends: list[Array] = []
    for which in range(len(values)):
        enter()
        ends = run(which, starts)
        moved = _moves(recorder, starts, ends, stacks, src)
        calls = [_move_layer(c, moved, count) for c in recorder.calls or []]
        for name in moved:
            recorder.buffers.pop(name, None)
        variants.append(_named(calls, variants, which))
        leave()
    recorder.names |= {c.name for variant in variants for c in variant}
    recorder.steps.append(Scan(count, tuple(variants), choice, src))
    results = [
        replace(start, version=end.version)
        if s is None
        else Array(s.name, s.shape, s.dtype, (expr(count),))
        for start, end, s in zip(carry, ends, stacks, strict=True)
    ]
    return jax.tree.unflatten(tree, results)


def _variants(
    static: Tree, count: int, src: SrcInfo
) -> tuple[tuple[int, ...], list[Tree]]:
    """Which layers share their constants, and the distinct constants."""
    if static is None:
        return (0,) * count, [None]
    leaves, tree = jax.tree.flatten(static, is_leaf=lambda x: isinstance(x, list))
    arrays = [np.asarray(leaf) for leaf in leaves]
    wrong = [list(a.shape) for a in arrays if a.shape[:1] != (count,)]
    if wrong:
        raise TraceError(
            f"mk.scan: static of shape {wrong[0]} has not one entry for each of "
            f"{count} layers",
            src,
            "give numpy arrays or lists with one entry per layer",
        )
    keys = [tuple(a[i].tobytes() for a in arrays) for i in range(count)]
    order = list(dict.fromkeys(keys))
    first = [keys.index(k) for k in order]

    def entry(a: Any, i: int) -> Any:
        return a[i].item() if a[i].ndim == 0 else a[i]

    values = [jax.tree.unflatten(tree, [entry(a, i) for a in arrays]) for i in first]
    return tuple(order.index(k) for k in keys), values


def _stack(recorder: Recorder, array: Array, count: int, src: SrcInfo) -> Buffer:
    """The stacked buffer of a carry that starts from `array`."""
    buffer = recorder.buffers[array.buffer]
    whole = array.view == buffer.shape and not array.prefix
    if buffer.role != "temp" or not whole or array.buffer in recorder.moved:
        array = _copied(array)
    name = f"{array.buffer}.carry"
    shape = (count + 1, *array.shape)
    stack = Buffer(name, shape, array.dtype, "temp", src=src)
    recorder.buffers[name] = stack
    recorder.moved[array.buffer] = Moved(name, count + 1, 0)
    return stack


def _moves(
    recorder: Recorder,
    starts: Sequence[Array],
    ends: Sequence[Array],
    stacks: Sequence[Buffer | None],
    src: SrcInfo,
) -> dict[str, str]:
    """Temps of the layer that are really the next entry of a carry's stack."""
    moved: dict[str, str] = {}
    for start, end, stack in zip(starts, ends, stacks, strict=True):
        if stack is None:
            if end.buffer != start.buffer:
                raise TraceError(
                    f"the carry {start.buffer} is written in place by one kind of "
                    "layer and replaced by another",
                    src,
                    "let every layer write it with mk.Into, or none",
                )
            continue
        if end.shape != stack.shape[1:] or end.dtype != stack.dtype:
            raise TraceError(
                f"the carry {start.buffer} is {start.dtype}{list(start.shape)} before "
                f"a layer and {end.dtype}{list(end.shape)} after it",
                src,
                "let the layer return its carry in the shape and dtype that it got",
            )
        buffer = recorder.buffers[end.buffer]
        # What the layer did not make is a carry, its own or (in a swap) another one.
        taken = end.buffer in moved or end.buffer not in recorder.made
        if taken or end.view != buffer.shape or end.prefix != (var("layer"),):
            end = _copied(end)
        moved[end.buffer] = stack.name
    return moved


def _move_layer(c: Call, moved: dict[str, str], count: int) -> Call:
    def move(a: Access) -> Access:
        if a.buffer not in moved:
            return a
        first = replace(a.axes[0], start=a.axes[0].start + 1)
        view = (count + 1, *a.view[1:])
        axes = (first, *a.axes[1:])
        return replace(a, buffer=moved[a.buffer], view=view, axes=axes)

    return replace(c, ins=tuple(map(move, c.ins)), outs=tuple(map(move, c.outs)))


def _named(
    calls: Sequence[Call], variants: Sequence[Sequence[Call]], which: int
) -> tuple[Call, ...]:
    """Calls that differ from those of earlier variants get names of their own."""
    earlier = {c.name: c for v in variants for c in v}
    return tuple(
        c if earlier.get(c.name, c) == c else replace(c, name=f"{c.name}@{which}")
        for c in calls
    )


def _move_entry(c: Call, moved: dict[str, Moved]) -> Call:
    def move(a: Access) -> Access:
        to = moved.get(a.buffer)
        if to is None:
            return a
        axes = (Axis(expr(to.at), 1, squeezed=True), *a.axes)
        return replace(a, buffer=to.stack, view=(to.length, *a.view), axes=axes)

    return replace(c, ins=tuple(map(move, c.ins)), outs=tuple(map(move, c.outs)))


def trace_program(
    f: Callable[..., Tree],
    args: Sequence[Tree],
    name: str,
    argument_names: Sequence[str],
) -> tuple[Program, Any]:
    """Trace a program function.

    Args:
        f: the program.
        args: pytrees of anything with shape and dtype.
        argument_names: one per argument, for the names of buffers.

    Returns:
        The Program and the pytree structure of the results.
    """
    recorder = Recorder(name)
    inputs: list[str] = []
    symbols: list[Tree] = []
    for arg, label in zip(args, argument_names, strict=True):
        paths, tree = jax.tree_util.tree_flatten_with_path(arg)
        arrays: list[Array] = []
        for path, leaf in paths:
            buffer = _input(label, path, leaf, defined_at(f))
            if buffer.name in recorder.buffers:
                buffer = replace(buffer, name=f"{buffer.name}.{len(inputs)}")
            recorder.buffers[buffer.name] = buffer
            inputs.append(buffer.name)
            arrays.append(Array(buffer.name, buffer.shape, buffer.dtype))
        symbols.append(jax.tree.unflatten(tree, arrays))
    with recording(recorder):
        result = f(*symbols)
    leaves, tree = jax.tree.flatten(result)
    outputs = tuple(_result(recorder, leaf, defined_at(f)) for leaf in leaves)
    written = {b.name for b in recorder.buffers.values() if b.role == "state"}
    lost = written - {o.buffer for o in outputs}
    if lost:
        raise TraceError(
            f"program '{name}': {', '.join(sorted(lost))}: written with mk.Into but "
            "not returned",
            defined_at(f),
            "return the array that the call gave: it is the new version",
        )
    steps = tuple(
        _move_entry(s, recorder.moved)
        if isinstance(s, Call)
        else replace(
            s,
            variants=tuple(
                tuple(_move_entry(c, recorder.moved) for c in v) for v in s.variants
            ),
        )
        for s in recorder.steps
    )
    kept = tuple(b for n, b in recorder.buffers.items() if n not in recorder.moved)
    return Program(name, kept, tuple(inputs), steps, outputs), tree


def _input(label: str, path: Any, leaf: Any, src: SrcInfo) -> Buffer:
    text = label + jax.tree_util.keystr(path, simple=True, separator=".").join(
        (".", "") if path else ("", "")
    )
    clean = re.sub(r"[^\w.]", "_", text)
    if not hasattr(leaf, "shape"):
        raise TraceError(
            f"argument {clean} is a {type(leaf).__name__}, not an array",
            src,
            "bind constants with functools.partial before mk.megakernel",
        )
    dtype = str(leaf.dtype)
    if dtype not in ITEM_BYTES:
        raise TraceError(
            f"argument {clean} is {dtype}{list(leaf.shape)}",
            src,
            f"arrays of a program are {', '.join(ITEM_BYTES)}",
        )
    return Buffer(clean, tuple(int(n) for n in leaf.shape), dtype, "input")


def _result(recorder: Recorder, leaf: Any, src: SrcInfo) -> Output:
    what = f"program '{recorder.name}'"
    if not isinstance(leaf, Array):
        raise TraceError(
            f"{what} returns a {type(leaf).__name__}, not an array of it",
            src,
            "return what mk.call and mk.scan gave, or arguments of the program",
        )
    recorder.check_version(leaf, f"result of {what}", src)
    whole = recorder.buffers[leaf.buffer].shape
    one = len(leaf.prefix) == 1 and leaf.prefix[0].is_constant
    if leaf.prefix and not (one and leaf.view == whole):
        index = ", ".join(map(str, leaf.prefix))
        raise TraceError(
            f"{what} returns {leaf.buffer}{list(leaf.view)}[{index}]",
            src,
            "return a whole array, or one entry of its first dimension",
        )
    layer = int(leaf.prefix[0]) if leaf.prefix else None
    buffer = leaf.buffer
    if buffer in recorder.moved:
        to = recorder.moved[buffer]
        buffer, layer = to.stack, to.at
    return Output(buffer, layer, leaf.shape)
