"""Programs and task graphs with one fault each are refused; the good twins pass."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import expr, read, var
from mkdsl.lang.program import Access, Call, Output, Program, Scan
from mkdsl.lower.decompose import decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.ir import DepSet, Need, Task, TaskGraph
from mkdsl.lower.machine import H200
from mkdsl.lower.verify_graph import verify_needs, verify_program, verify_tasks
from tests.lower.programs import attention, llama, mlp, two_layers


@pytest.mark.parametrize("make", [mlp, attention, two_layers, llama])
def test_good_programs_pass(make: Callable[[], Program]) -> None:
    verify_program(make())


def edited(program: Program, n: int, edit: Callable[[Call], Call]) -> Program:
    """The program with its n-th step, a call, edited."""
    steps = list(program.steps)
    call = steps[n]
    assert isinstance(call, Call)
    steps[n] = edit(call)
    return replace(program, steps=tuple(steps))


def with_axis(access: Access, n: int, **changes: object) -> Access:
    """The access with its n-th axis changed."""
    axes = list(access.axes)
    axes[n] = replace(axes[n], **changes)  # type: ignore[arg-type]
    return replace(access, axes=tuple(axes))


def first_out(**changes: object) -> Callable[[Call], Call]:
    """Change the feature axis of the first result."""
    return lambda c: replace(c, outs=(with_axis(c.outs[0], -1, **changes),))


def first_in(**changes: object) -> Callable[[Call], Call]:
    """Change the last axis of the first operand."""
    return lambda c: replace(c, ins=(with_axis(c.ins[0], -1, **changes), *c.ins[1:]))


def first_access(**changes: object) -> Callable[[Call], Call]:
    """Change the first operand."""
    return lambda c: replace(
        c,
        ins=(replace(c.ins[0], **changes), *c.ins[1:]),  # type: ignore[arg-type]
    )


BAD: dict[str, tuple[Program, str]] = {
    "block outside": (
        edited(mlp(), 0, lambda c: replace(c, grid=(9,))),
        r"gate_up: operand w_gate: blocks of dimension 0 of w_gate start at 0 to 512",
    ),
    "negative start": (
        edited(mlp(), 0, first_out(start=var("g0") * 64 - 64)),
        r"start at -64 to 384",
    ),
    "shape": (
        edited(mlp(), 0, first_in(size=128)),
        r"operand x is bfloat16\[8, 256\], but its block of x is bfloat16\[8, 128\]",
    ),
    "dtype": (
        replace(
            mlp(),
            buffers=tuple(
                replace(b, dtype="float32") if b.name == "x" else b
                for b in mlp().buffers
            ),
        ),
        r"its block of x is float32",
    ),
    "rank": (
        edited(mlp(), 1, first_in(squeezed=True)),
        r"operand h is bfloat16\[8, 512\], but its block of h is bfloat16\[8\]",
    ),
    "view": (
        edited(
            mlp(),
            0,
            lambda c: replace(c, ins=(replace(c.ins[0], view=(8, 255)), *c.ins[1:])),
        ),
        r"has no view \(8, 255\)",
    ),
    "unknown buffer": (
        edited(
            mlp(),
            0,
            lambda c: replace(c, ins=(replace(c.ins[0], buffer="z"), *c.ins[1:])),
        ),
        r"no buffer 'z'",
    ),
    "unknown variable": (
        edited(mlp(), 0, first_in(start=var("layer"))),
        r"'layer' in `layer` is not one of g0",
    ),
    "scalar of a temp": (
        edited(mlp(), 1, first_in(start=read("h", 0, 0))),
        r"`h\[0, 0\]` is not an element of an int32 argument",
    ),
    "scalar of wrong rank": (
        edited(
            attention(),
            0,
            lambda c: replace(
                c,
                ins=(
                    c.ins[0],
                    with_axis(c.ins[1], 2, start=read("lengths", 0, 0)),
                    *c.ins[2:],
                ),
            ),
        ),
        r"indexes lengths of shape \(2,\)",
    ),
    "argument written": (
        edited(mlp(), 1, lambda c: replace(c, outs=(replace(c.outs[0], buffer="x"),))),
        r"call down writes x, an argument that is not donated",
    ),
    "read before write": (
        replace(mlp(), steps=mlp().steps[::-1]),
        r"call down in layer 0 reads h before any call writes it",
    ),
    "operands": (
        edited(mlp(), 1, lambda c: replace(c, ins=c.ins[:2])),
        r"2 operands for the 3 of task down",
    ),
    "empty grid": (
        edited(mlp(), 0, lambda c: replace(c, grid=(0,))),
        r"has no tasks",
    ),
    "two calls of one name": (
        edited(mlp(), 1, lambda c: replace(c, name="gate_up")),
        r"two calls have the name 'gate_up'",
    ),
    "two buffers of one name": (
        replace(mlp(), buffers=(*mlp().buffers, mlp().buffers[0])),
        r"two buffers have the name 'x'",
    ),
    "inputs": (replace(mlp(), inputs=("x",)), r"the inputs of mlp are x, but"),
    "output": (
        replace(mlp(), outputs=(Output("nothing"),)),
        r"output 'nothing' is no buffer",
    ),
    "layer of an output": (
        replace(two_layers(), outputs=(Output("x", 3),)),
        r"no layer 3",
    ),
    "no stream": (
        edited(
            mlp(),
            1,
            lambda c: replace(
                c,
                task=replace(
                    c.task,
                    params=tuple(replace(p, use="tile") for p in c.task.params),
                ),
            ),
        ),
        r"operand 1 is no stream",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_programs_are_refused(name: str) -> None:
    program, message = BAD[name]
    with pytest.raises(VerifyError, match=message):
        verify_program(program)


def test_layers_of_a_variant_bound_its_blocks() -> None:
    program = two_layers(length=4)
    scan = program.steps[1]
    assert isinstance(scan, Scan)
    (calls,) = scan.variants
    ahead = [with_axis(a, 0, start=var("layer") + 1) for a in calls[0].ins[1:]]
    ahead_call = replace(calls[0], ins=(calls[0].ins[0], *ahead))
    bad = replace(scan, variants=((ahead_call, calls[1]),))
    with pytest.raises(VerifyError, match=r"scale start at 1 to 4 \(layer \+ 1\)"):
        verify_program(replace(program, steps=(program.steps[0], bad)))


# ---------------------------------------------------------------------------- tasks


def graph() -> TaskGraph:
    return decompose(mlp(), H200)


def test_missing_tile_of_a_temp_is_refused() -> None:
    g = graph()
    with pytest.raises(
        VerifyError,
        match=r"reads the 4096 elements h\[0:8, 0:512\], of which only 3584",
    ) as e:
        verify_tasks(replace(g, tasks=g.tasks[1:]))
    assert "call down (0,)" in str(e.value)


def test_tile_of_a_temp_that_is_written_twice_is_refused() -> None:
    g = graph()
    with pytest.raises(VerifyError, match=r"h\[0:8, 0:64\] of h is written by"):
        verify_tasks(replace(g, tasks=(g.tasks[0], *g.tasks)))


def test_tiles_that_meet_are_refused() -> None:
    meet = edited(mlp(), 0, first_out(start=var("g0") * 32))
    with pytest.raises(VerifyError, match=r"is written by call gate_up \(0,\)"):
        verify_tasks(decompose(meet, H200))


@pytest.mark.parametrize(
    "task", [Task(0, 0, (8,)), Task(0, 0, (0,), 1), Task(9, 0, ())]
)
def test_task_out_of_range_is_refused(task: Task) -> None:
    g = graph()
    with pytest.raises(VerifyError, match=r"no kind 9|outside grid \(8,\) x 1"):
        verify_tasks(replace(g, tasks=(*g.tasks, task)))


def test_a_run_that_is_interrupted_is_refused() -> None:
    g = graph()
    tasks = (g.tasks[0], g.tasks[-1], *g.tasks[1:-1])
    with pytest.raises(VerifyError, match=r"gate_up \(full\), layer 0, are interrup"):
        verify_tasks(replace(g, tasks=tasks))


def test_needs_point_to_lower_ids() -> None:
    g = find_dependences(graph())
    verify_needs(g)
    own = (Need(0, "resident", "RAW"),)
    with pytest.raises(VerifyError, match=r"no set of lower ids"):
        verify_needs(replace(g, needs=(own, *g.needs[1:])))
    with pytest.raises(VerifyError, match=r"not ascending"):
        verify_needs(replace(g, dep_sets=(DepSet((2, 1)),)))
    with pytest.raises(VerifyError, match=r"len\(graph.needs\)=1"):
        verify_needs(replace(g, needs=g.needs[:1]))


def test_argument_that_a_task_writes_is_refused() -> None:
    g = graph()
    kinds = [
        replace(k, outs=(replace(k.outs[0], buffer="x"),)) if k.call == "down" else k
        for k in g.kinds
    ]
    with pytest.raises(VerifyError, match=r"x is an argument"):
        verify_tasks(replace(g, kinds=tuple(kinds)))


def test_constant_start_is_checked() -> None:
    with pytest.raises(VerifyError, match=r"start at 300 to 300"):
        verify_program(edited(mlp(), 0, first_in(start=expr(300))))
