"""The text of a Program: canonical, one fact a line, to be read, diffed and parsed.

    program llama(tokens, ..) -> token, logits, k_cache
    buffer x: bf16[17, 8, 2048] temp
    task gate_up #digest columns 8 cut dot
      param 0 x: bf16[8, 2048] tile
      result 0 h: bf16[8, 64] tile
      dot lhs - rhs 2 rows 64 depth 2048
      fold operands 1, 2 block 128 carries f32[4, 64], f32[4, 1]
      scratch operand 2048
      before 0, 1, 2
    call down = down#digest over (32)
      in h[layer, 0 :+ 8, 0 :+ 2048]
      out x[layer + 1, 0 :+ 8, 64*g0 :+ 64]
    scan 16: 0 * 16
      variant 0
        call ..

An axis is `start :+ size`, or `start` alone where one index is taken and the dimension
dropped, `start :+ size dropped` if a dropped axis is wider, and `upto extent` where the
valid extent is known only at run time. `as [shape]` follows a buffer that is seen in
another shape.
"""

from collections.abc import Iterable, Iterator, Sequence

from mkdsl.lang.program import (
    Access,
    Axis,
    Buffer,
    Call,
    Dot,
    Fold,
    Output,
    Param,
    Program,
    Scan,
    Stream,
    TaskDef,
)

DTYPE_TEXT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int32": "i32",
    "bool": "bool",
}


def print_program(program: Program) -> str:
    """The text of a program."""
    return "\n".join(_program_lines(program)) + "\n"


def list_text(values: Iterable[object]) -> str:
    """Values with commas."""
    return ", ".join(map(str, values))


def array_text(shape: Sequence[int], dtype: str) -> str:
    """A dtype and a shape: bf16[8, 64]."""
    return f"{DTYPE_TEXT[dtype]}[{list_text(shape)}]"


def buffer_text(buffer: Buffer) -> str:
    """One buffer: x: bf16[8, 2048] temp."""
    column = "" if buffer.column is None else f" column {buffer.column}"
    return (
        f"{buffer.name}: {array_text(buffer.shape, buffer.dtype)} {buffer.role}{column}"
    )


def access_text(access: Access, shape: Sequence[int]) -> str:
    """A block of a buffer of that shape: x[layer, 0 :+ 8, 64*g0 :+ 64]."""
    view = "" if access.view == tuple(shape) else f" as [{list_text(access.view)}]"
    return f"{access.buffer}{view}[{list_text(map(_axis_text, access.axes))}]"


def task_lines(task: TaskDef) -> Iterator[str]:
    """A task definition."""
    yield f"task {task.name} #{task.digest} columns {task.columns} cut {task.cut}"
    for word, params in (("param", task.params), ("result", task.results)):
        for i, param in enumerate(params):
            yield f"  {word} {i} {_param_text(param)}"
    for stream in task.streams:
        yield f"  {_stream_text(stream)}"
    for scratch in task.scratch:
        yield f"  scratch {scratch.use} {scratch.features}"
    for word, operands in (("before", task.before), ("after", task.after)):
        if operands:
            yield f"  {word} {list_text(operands)}"


def _program_lines(program: Program) -> Iterator[str]:
    outputs = list_text(map(_output_text, program.outputs))
    yield f"program {program.name}({list_text(program.inputs)}) -> {outputs}"
    for buffer in program.buffers:
        yield f"buffer {buffer_text(buffer)}"
    tasks = {call.task: None for call in program.calls()}
    for task in tasks:
        yield from task_lines(task)
    shapes = {b.name: b.shape for b in program.buffers}
    for step in program.steps:
        if isinstance(step, Scan):
            yield from _scan_lines(step, shapes)
        else:
            yield from _call_lines(step, shapes, "")


def _scan_lines(scan: Scan, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    yield f"scan {scan.length}: {_runs(scan.choice)}"
    for i, variant in enumerate(scan.variants):
        yield f"  variant {i}"
        for call in variant:
            yield from _call_lines(call, shapes, "    ")


def _call_lines(
    call: Call, shapes: dict[str, tuple[int, ...]], indent: str
) -> Iterator[str]:
    task = f"{call.task.name}#{call.task.digest}"
    yield f"{indent}call {call.name} = {task} over ({list_text(call.grid)})"
    for word, accesses in (("in", call.ins), ("out", call.outs)):
        for access in accesses:
            yield f"{indent}  {word} {access_text(access, shapes[access.buffer])}"


def _runs(values: Sequence[int]) -> str:
    """0, 0, 0, 1 as `0 * 3, 1`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return list_text(f"{v} * {n}" if n > 1 else str(v) for v, n in runs)


def _axis_text(axis: Axis) -> str:
    if axis.squeezed and axis.size == 1 and axis.extent is None:
        return str(axis.start)
    dropped = " dropped" if axis.squeezed else ""
    extent = "" if axis.extent is None else f" upto {axis.extent}"
    return f"{axis.start} :+ {axis.size}{dropped}{extent}"


def _param_text(param: Param) -> str:
    return f"{param.name}: {array_text(param.shape, param.dtype)} {param.use}"


def _stream_text(stream: Stream) -> str:
    if isinstance(stream, Dot):
        lhs = "-" if stream.lhs is None else stream.lhs
        return f"dot lhs {lhs} rhs {stream.rhs} rows {stream.rows} depth {stream.depth}"
    return _fold_text(stream)


def _fold_text(fold: Fold) -> str:
    carries = list_text(array_text(shape, dtype) for shape, dtype in fold.carries)
    return (
        f"fold operands {list_text(fold.operands)} block {fold.block} carries {carries}"
    )


def _output_text(output: Output) -> str:
    layer = "" if output.layer is None else f"[{output.layer}]"
    shape = f" as [{list_text(output.shape)}]" if output.shape else ""
    return f"{output.buffer}{layer}{shape}"
