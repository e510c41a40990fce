"""mk.call: record all instances of a task over a grid, as pallas_call.

The call's accesses are index expressions over grid axes; what can be checked for all
of them now is: ranks, block sizes, bounds, results, and that no two instances write
one block.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from mkdsl.errors import SrcInfo, TraceError, caller, raised_at
from mkdsl.lang.arrays import (
    Array,
    BlockDim,
    BoundedSlice,
    Element,
    Into,
    Shape,
    Slice,
    Spec,
    Squeezed,
    Whole,
    is_index,
    is_int,
    whole,
)
from mkdsl.lang.expr import Expr, expr, var
from mkdsl.lang.primitives import fold_p, program_id_p
from mkdsl.lang.program import Access, Axis, Buffer, Call
from mkdsl.lang.recorder import Recorder, current
from mkdsl.lang.task import Block, define, unwrap

# Up to so many instances are looked at one by one.
MANY = 4096


def _axes(
    array: Array, spec: Spec | Into | Whole, grid: Sequence[int], what: str
) -> tuple[Axis, ...]:
    """The axes of an access: the array's chosen prefix, then one per block dim."""
    axes = [Axis(i, 1, squeezed=True) for i in array.prefix]
    if isinstance(spec, Whole):
        return (*axes, *(Axis(expr(0), n) for n in array.shape))
    src = caller()
    names = tuple(var(f"g{i}") for i in range(len(grid)))
    index = _mapped(spec.index_map, names, what, src)
    index = index if isinstance(index, tuple) else (index,)
    if len(spec.block) != array.ndim or len(index) != array.ndim:
        raise TraceError(
            f"{what}: block {spec.block} and index map of {len(index)} indices for an "
            f"array {array.dtype}{list(array.shape)}",
            src,
            "give one block size and one index per dimension",
        )
    for dim, at, size in zip(spec.block, index, array.shape, strict=True):
        axes.append(_axis(dim, at, size, what, src))
    return tuple(axes)


def _mapped(
    index_map: Callable[..., Any], names: tuple[Expr, ...], what: str, src: SrcInfo
) -> Any:
    try:
        return index_map(*names)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"{what}: the index map fails on ({', '.join(map(str, names))}): {error}",
            raised_at(error, src),
            "it is a formula of one index per grid axis, scalars of int32 inputs, "
            "integers, + - * // %, mk.minimum and mk.maximum",
        ) from error


def _axis(dim: BlockDim, at: Any, size: int, what: str, src: SrcInfo) -> Axis:
    if isinstance(dim, BoundedSlice):
        if not isinstance(at, Slice):
            raise TraceError(
                f"{what}: the index of a BoundedSlice is {at}",
                src,
                "let the index map return mk.ds(start, size) there",
            )
        return Axis(at.start, dim.max_size, extent=at.size)
    if not is_index(at):
        raise TraceError(
            f"{what}: the index {at!r} is not an index expression",
            src,
            "use grid indices, integers and scalars such as lengths[i] of int32 inputs",
        )
    if dim is None or isinstance(dim, Squeezed):
        return Axis(expr(at), 1, squeezed=True)
    if isinstance(dim, Element):
        return Axis(expr(at), dim.size)
    if not is_int(dim) or not 0 < dim:
        raise TraceError(
            f"{what}: {dim!r} is not a block size",
            src,
            "give a positive number of elements, or None for a single one",
        )
    return Axis(expr(at) * int(dim), int(dim))


def _ragged(axis: Axis, size: int, grid: Sequence[int]) -> bool:
    """True if some instance's block may reach past the array on this axis."""
    if axis.extent is not None or axis.start.reads or "layer" in axis.start.variables:
        return axis.extent is not None
    starts = [axis.start.evaluate(env) for env in _corners(axis.start, grid)]
    return max(starts) + axis.size > size


def _corners(value: Expr, grid: Sequence[int]) -> Iterator[dict[str, int]]:
    """Grid points that decide the range of an expression (all, if few)."""
    used = sorted(value.variables - {"layer", "part"})
    sizes = [grid[int(name[1:])] for name in used]
    many = math.prod(sizes) > MANY
    ranges = [(0, n - 1) if many else range(n) for n in sizes]
    for point in itertools.product(*ranges):
        yield dict(zip(used, point, strict=True))


def _check_bounds(access: Access, grid: Sequence[int], what: str) -> None:
    for d, (axis, size) in enumerate(zip(access.axes, access.view, strict=True)):
        if axis.start.reads or "layer" in axis.start.variables:
            continue
        for env in _corners(axis.start, grid):
            start = axis.start.evaluate(env)
            if not 0 <= start < size:
                at = ", ".join(f"{k}={v}" for k, v in sorted(env.items()))
                raise TraceError(
                    f"{what}: index out of bounds: dimension {d} of "
                    f"{access.buffer}{list(access.view)} starts at {start} for {at}",
                    access.src,
                    "check the grid and the index map against the array's shape",
                )


def call(
    fn: Any,
    *,
    grid: Sequence[int] = (),
    in_specs: Sequence[Any] | Any = whole,
    out_specs: Any,
    out_shape: Any = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """All instances of a task over a grid, as pallas_call.

    Args:
        fn: a task, or functools.partial of one with keyword constants.
        grid: sizes of the grid axes.
        in_specs: one Spec or mk.whole per operand (or one for all).
        out_specs: one Spec or Into per result, or a single one.
        out_shape: a Shape per Spec of out_specs, None for an Into.
        name: name of the call in every printed form; the task's by default.

    Returns:
        A function of the operand Arrays that records the call and returns the result
        Arrays (one, or a tuple as out_specs).
    """
    recorder = current("mk.call")
    single = not isinstance(out_specs, tuple | list)
    outs = [out_specs] if single else list(out_specs)
    shapes: list[Any] = [out_shape]
    if not single and isinstance(out_shape, tuple | list):
        shapes = list(cast(Sequence[Any], out_shape))
    if len(shapes) == 1 and len(outs) > 1 and shapes[0] is None:
        shapes = [None] * len(outs)
    task_name = name or unwrap(fn)[0].name

    def record(*arrays: Array) -> Any:
        src = caller()
        specs = list(in_specs) if isinstance(in_specs, tuple | list) else None
        specs = specs if specs is not None else [in_specs] * len(arrays)
        label = recorder.unique(task_name)
        if len(specs) != len(arrays):
            raise TraceError(
                f"call '{label}': {len(specs)} in_specs for {len(arrays)} operands",
                src,
                "give one spec per operand, or one for all of them outside of a tuple",
            )
        if len(shapes) != len(outs):
            raise TraceError(
                f"call '{label}': {len(outs)} out_specs, {len(shapes)} out_shapes",
                src,
                "give one mk.Shape per out_spec, None for an mk.Into",
            )
        ins = [
            _access(recorder, a, s, grid, f"call '{label}', operand {i}", src)
            for i, (a, s) in enumerate(zip(arrays, specs, strict=True))
        ]
        blocks = [_block(recorder, a, grid, s) for a, s in zip(ins, specs, strict=True)]
        task = define(fn, blocks, src)
        _check_program_ids(label, task.body.equations, len(grid), src)
        if len(task.results) != len(outs):
            raise TraceError(
                f"call '{label}': the task returns {len(task.results)} values for "
                f"{len(outs)} out_specs",
                src,
                "give one out_spec per value that the task returns",
            )
        written = [
            _output(recorder, label, o, s, grid, src)
            for o, s in zip(outs, shapes, strict=True)
        ]
        accesses = tuple(a for _, a in written)
        for i, (access, result) in enumerate(zip(accesses, task.results, strict=True)):
            _check_result(recorder, label, i, access, result, src)
            _check_writers(label, access, grid, src)
        recorder.add(Call(label, task, tuple(grid), tuple(ins), accesses, src))
        results = tuple(array for array, _ in written)
        return results[0] if single else results

    return record


def _access(
    recorder: Recorder,
    array: Any,
    spec: Any,
    grid: Sequence[int],
    what: str,
    src: SrcInfo,
) -> Access:
    if not isinstance(array, Array):
        raise TraceError(
            f"{what} is a {type(array).__name__}, not an array of the program",
            src,
            "arrays reach a program as arguments of the function",
        )
    recorder.check_version(array, what, src)
    access = Access(array.buffer, array.view, _axes(array, spec, grid, what), src)
    _check_bounds(access, grid, what)
    return access


def _block(recorder: Recorder, access: Access, grid: Sequence[int], spec: Any) -> Block:
    kept = [
        (a.size, _ragged(a, n, grid))
        for a, n in zip(access.axes, access.view, strict=True)
        if not a.squeezed
    ]
    shape, ragged = tuple(s for s, _ in kept), tuple(r for _, r in kept)
    dtype = recorder.buffers[access.buffer].dtype
    if isinstance(spec, Spec) and spec.column and len(shape) == 1:
        return Block((*shape, 1), dtype, (*ragged, False))
    return Block(shape, dtype, ragged)


def _output(
    recorder: Recorder,
    label: str,
    spec: Spec | Into,
    shape: Shape | None,
    grid: Sequence[int],
    src: SrcInfo,
) -> tuple[Array, Access]:
    what = f"call '{label}', result"
    if isinstance(spec, Into):
        old = spec.array
        recorder.check_version(old, what, src)
        buffer = recorder.buffers[old.buffer]
        if buffer.role == "input":
            recorder.buffers[old.buffer] = replace(buffer, role="state")
        access = Access(old.buffer, old.view, _axes(old, spec, grid, what), src)
        _check_bounds(access, grid, what)
        recorder.versions[old.buffer] = old.version + 1
        return replace(old, version=old.version + 1), access
    if shape is None:
        raise TraceError(
            f"{what}: a Spec needs an out_shape",
            src,
            "pass out_shape=mk.Shape(shape, dtype); None is for mk.Into",
        )
    array = _temp(recorder, label, shape, src)
    access = Access(array.buffer, array.view, _axes(array, spec, grid, what), src)
    _check_bounds(access, grid, what)
    return array, access


def _temp(recorder: Recorder, label: str, shape: Shape, src: SrcInfo) -> Array:
    """A fresh array; in a scan one per layer, in a buffer with a layer dimension."""
    dtype = str(np.dtype(shape.dtype).name)
    sizes = tuple(int(n) for n in shape.shape)
    prefix: tuple[Expr, ...] = ()
    if recorder.layers is not None:
        sizes, prefix = (recorder.layers, *sizes), (var("layer"),)
    made = Buffer(label, sizes, dtype, "temp", src=src)
    while made.name in recorder.made or recorder.buffers.get(made.name, made) != made:
        made = replace(made, name=made.name + "'")
    recorder.made.add(made.name)
    recorder.buffers[made.name] = made
    return Array(made.name, sizes, dtype, prefix)


def _check_program_ids(
    label: str, equations: Sequence[Any], rank: int, src: SrcInfo
) -> None:
    for e in equations:
        if e.primitive is program_id_p and not 0 <= e.params["axis"] < rank:
            raise TraceError(
                f"call '{label}': mk.program_id({e.params['axis']}) for a grid of "
                f"{rank} axes",
                src,
                "count the axes of the grid from 0",
            )
        if e.primitive is fold_p:
            _check_program_ids(label, e.params["jaxpr"].eqns, rank, src)


def _check_result(
    recorder: Recorder, label: str, i: int, access: Access, result: Any, src: SrcInfo
) -> None:
    dtype = recorder.buffers[access.buffer].dtype
    block = access.shape
    same = [block, (1, *block), (*block, 1)]
    if result.shape not in same or result.dtype != dtype:
        raise TraceError(
            f"call '{label}', result {i}: the task returns "
            f"{result.dtype}{list(result.shape)} for a block {dtype}{list(block)} of "
            f"{access.buffer}",
            src,
            "make the block of the out_spec and the task's result agree",
        )


def _check_writers(
    label: str, access: Access, grid: Sequence[int], src: SrcInfo
) -> None:
    """Two instances must not write one block."""
    used: set[str] = set()
    for axis in access.axes:
        used |= axis.start.variables
    for i, n in enumerate(grid):
        if n > 1 and f"g{i}" not in used:
            raise TraceError(
                f"call '{label}': two writers: grid axis {i} of size {n} does not "
                f"select a block of {access.buffer}{list(access.view)}",
                src,
                "use every grid axis in the index map of every output",
            )
    starts = [axis.start for axis in access.axes]
    if math.prod(grid) > MANY or any(s.reads for s in starts):
        return
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for point in itertools.product(*map(range, grid)):
        env = {"layer": 0, **{f"g{i}": at for i, at in enumerate(point)}}
        block = tuple(s.evaluate(env) for s in starts)
        other = seen.setdefault(block, point)
        if other != point:
            raise TraceError(
                f"call '{label}': two writers: instances {list(other)} and "
                f"{list(point)} both write the block of "
                f"{access.buffer}{list(access.view)} at {list(block)}",
                src,
                "let the index map of the output give every instance its own block",
            )
