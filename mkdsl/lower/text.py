"""The text of a Program: canonical, one fact a line, to be read, diffed and parsed.

    program ::= "program" NAME "(" NAME,* ")" "->" output,*
                ("buffer" buffer)* task* (call | scan)*
    output  ::= NAME ["[" INT "]"] ["as" shape]
    buffer  ::= NAME ":" array ("input" | "state" | "temp") ["column" INT]
    array   ::= ("bf16" | "f16" | "f32" | "i32" | "bool") shape
    shape   ::= "[" INT,* "]"
    task    ::= "task" key "columns" INT "cut" ("none" | "dot" | "fold") ["long" INT]
                ("param" INT param)* ("result" INT param)* stream*
                ("scratch" ("operand" | "roll") INT ["after cut"])*
                ["before" INT,*] ["after" INT,*]
    key     ::= NAME "#" DIGEST ["/" INT]        /2, /3 tell equal digests apart
    param   ::= NAME ":" array ("tile" | "vector" | "scalar" | "stream")
    stream  ::= "dot lhs" (INT | "-") "rhs" INT "rows" INT "depth" INT
              | "fold operands" INT,* "block" INT "carries" array,*
    call    ::= "call" NAME "=" key "over (" INT,* ")" ("in" access)* ("out" access)*
    scan    ::= "scan" INT ":" (INT ["*" INT]),* ("variant" INT call*)* "end scan"
    access  ::= NAME ["as" shape] "[" axis,* "]"
    axis    ::= EXPR                             one index, the dimension is dropped
              | EXPR ":+" INT ["dropped"] ["upto" EXPR]

Every keyword that starts a line of this grammar starts a line of the text, and nothing
else does. `as [shape]` follows a buffer that is seen in another shape, `upto` the
elements that are valid where that is known only at run time; EXPR is in lang/expr.py.
A NAME with a space or one of "#:,;=()[] is written as a JSON string. Lines of the
user's source and bodies of tasks are not in the text. parse_program.py is the mirror.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

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


PLAIN_NAME = re.compile(r'[^\s"#:,;=()\[\]]+')


def print_program(program: Program) -> str:
    """The text of a program."""
    return "\n".join(program_lines(program)) + "\n"


def name_text(name: str) -> str:
    """A name as it stands, or as a JSON string where it could be mistaken."""
    return name if PLAIN_NAME.fullmatch(name) else json.dumps(name)


def task_keys(tasks: Iterable[TaskDef]) -> dict[TaskDef, str]:
    """What the text calls each of some tasks: name#digest.

    Tasks of one name and body may still differ, such as in the roles of operands.
    """
    keys: dict[TaskDef, str] = {}
    count: dict[str, int] = {}
    for task in dict.fromkeys(tasks):
        key = f"{name_text(task.name)}#{task.digest}"
        count[key] = count.get(key, 0) + 1
        keys[task] = key if count[key] == 1 else f"{key}/{count[key]}"
    return keys


def list_text(values: Iterable[object]) -> str:
    """Values with commas."""
    return ", ".join(map(str, values))


def array_text(shape: Sequence[int], dtype: str) -> str:
    """A dtype and a shape: bf16[8, 64]."""
    return f"{DTYPE_TEXT[dtype]}[{list_text(shape)}]"


def buffer_text(buffer: Buffer) -> str:
    """One buffer: x: bf16[8, 2048] temp."""
    column = "" if buffer.column is None else f" column {buffer.column}"
    array = array_text(buffer.shape, buffer.dtype)
    return f"{name_text(buffer.name)}: {array} {buffer.role}{column}"


def access_text(access: Access, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A block of one of some buffers: x[layer, 0 :+ 8, 64*g0 :+ 64]."""
    same = access.view == shapes.get(access.buffer)
    view = "" if same else f" as [{list_text(access.view)}]"
    axes = list_text(map(_axis_text, access.axes))
    return f"{name_text(access.buffer)}{view}[{axes}]"


def task_lines(task: TaskDef, key: str) -> Iterator[str]:
    """A task definition."""
    long = f" long {task.long}" if task.long else ""
    yield f"task {key} columns {task.columns} cut {task.cut}{long}"
    for word, params in (("param", task.params), ("result", task.results)):
        for i, param in enumerate(params):
            yield f"  {word} {i} {_param_text(param)}"
    for stream in task.streams:
        yield f"  {_stream_text(stream)}"
    for scratch in task.scratch:
        after = " after cut" if scratch.after_cut else ""
        yield f"  scratch {scratch.use} {scratch.features}{after}"
    for word, operands in (("before", task.before), ("after", task.after)):
        if operands:
            yield f"  {word} {list_text(operands)}"


def program_lines(program: Program) -> Iterator[str]:
    """A program."""
    inputs = list_text(map(name_text, program.inputs))
    outputs = list_text(map(_output_text, program.outputs))
    yield f"program {name_text(program.name)}({inputs}) -> {outputs}"
    for buffer in program.buffers:
        yield f"buffer {buffer_text(buffer)}"
    keys = task_keys(call.task for call in program.calls())
    for task, key in keys.items():
        yield from task_lines(task, key)
    shapes = {b.name: b.shape for b in program.buffers}
    for step in program.steps:
        if isinstance(step, Scan):
            yield from _scan_lines(step, keys, shapes)
        else:
            yield from _call_lines(step, keys, shapes, "")


def _scan_lines(
    scan: Scan, keys: Mapping[TaskDef, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    yield f"scan {scan.length}: {_runs(scan.choice)}"
    for i, variant in enumerate(scan.variants):
        yield f"  variant {i}"
        for call in variant:
            yield from _call_lines(call, keys, shapes, "    ")
    yield "end scan"


def _call_lines(
    call: Call,
    keys: Mapping[TaskDef, str],
    shapes: Mapping[str, tuple[int, ...]],
    indent: str,
) -> Iterator[str]:
    grid = list_text(call.grid)
    yield f"{indent}call {name_text(call.name)} = {keys[call.task]} over ({grid})"
    for word, accesses in (("in", call.ins), ("out", call.outs)):
        for access in accesses:
            yield f"{indent}  {word} {access_text(access, shapes)}"


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
    return (
        f"{name_text(param.name)}: {array_text(param.shape, param.dtype)} {param.use}"
    )


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
    return f"{name_text(output.buffer)}{layer}{shape}"
