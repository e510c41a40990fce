"""A task graph whose tasks or accesses are not those of its program is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import expr
from mkdsl.lang.program import Access
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.ir import TaskGraph
from mkdsl.lower.machine import simulated
from mkdsl.lower.verify_kinds import verify_kinds
from tests.lower.programs import attention, mlp, two_layers

MACHINE = simulated(2)


def shifted(access: Access, at: int, by: int) -> Access:
    """The access with one axis moved."""
    axes = list(access.axes)
    axes[at] = replace(axes[at], start=axes[at].start + by)
    return replace(access, axes=tuple(axes))


def with_kind(graph: TaskGraph, n: int, **changes: object) -> TaskGraph:
    """The graph with one kind changed."""
    kinds = list(graph.kinds)
    kinds[n] = replace(kinds[n], **changes)  # type: ignore[arg-type]
    return replace(graph, kinds=tuple(kinds))


def split_attention() -> TaskGraph:
    program = attention()
    (name,) = (c.name for c in program.calls())
    return decompose(
        program, MACHINE, DecomposeOptions(split=False, splits=((name, 4),))
    )


def split_mlp() -> TaskGraph:
    options = DecomposeOptions(split=False, splits=(("down", 2),))
    return decompose(mlp(), MACHINE, options)


@pytest.mark.parametrize("parts", [2, 3, 5, 7, 8])
def test_parts_of_a_fold_are_found_to_cover_it(parts: int) -> None:
    program = attention(s=1024)
    (name,) = (c.name for c in program.calls())
    splits = DecomposeOptions(split=False, splits=((name, parts),))
    verify_kinds(decompose(program, MACHINE, splits))


def edit_in(graph: TaskGraph, kind: int, n: int, at: int, by: int) -> TaskGraph:
    """The graph with one operand of a kind moved."""
    ins = list(graph.kinds[kind].ins)
    ins[n] = shifted(ins[n], at, by)
    return with_kind(graph, kind, ins=tuple(ins))


def less_of_the_fold() -> TaskGraph:
    """The parts leave out the last row of a cache that is not empty."""
    graph = split_attention()
    ins = list(graph.kinds[0].ins)
    axes = list(ins[1].axes)
    assert axes[2].extent is not None
    axes[2] = replace(axes[2], extent=axes[2].extent - 1)
    ins[1] = replace(ins[1], axes=tuple(axes))
    return with_kind(graph, 0, ins=tuple(ins))


def first_result_moved() -> TaskGraph:
    graph = decompose(two_layers(), MACHINE, DecomposeOptions(split=False))
    return with_kind(graph, 0, outs=(shifted(graph.kinds[0].outs[0], 0, 1),))


def carry_of_a_neighbour() -> TaskGraph:
    graph = split_attention()
    n = len(graph.kinds[1].operands)
    return edit_in(graph, 1, n, 0, 1)


BAD: dict[str, tuple[Callable[[], TaskGraph], str]] = {
    "weight moved": (
        lambda: edit_in(decompose(mlp(), MACHINE), 0, 2, 1, 64),
        r"call gate_up \(full\): operand 2 is .*w_gate.*64.*, the call has .*w_gate",
    ),
    "result moved": (first_result_moved, r"call enter \(full\): result is x\["),
    "part of the depth": (
        lambda: edit_in(split_mlp(), 1, 0, 1, 64),
        r"call down \(partial\): operand 0 is h.*, whose 2 parts are not h",
    ),
    "part of the rows": (
        lambda: edit_in(split_attention(), 0, 1, 2, 1),
        r"call attend \(partial\): operand 1 is k.*, whose 4 parts are not k",
    ),
    "row left out": (less_of_the_fold, r"operand 1 is k.*, whose 4 parts are not k"),
    "carry of a neighbour": (
        carry_of_a_neighbour,
        r"value 0 for the combine is written to attend.carry0.* and read from",
    ),
    "operands": (
        lambda: with_kind(split_mlp(), 1, operands=(1, 0)),
        r"call down \(partial\): operands \(1, 0\), not \(0, 1\)",
    ),
    "parts": (
        lambda: with_kind(split_mlp(), 2, parts=4),
        r"2 parts, combine of 4",
    ),
    "task": (
        lambda: with_kind(
            decompose(mlp(), MACHINE), 0, task=decompose(mlp(), MACHINE).kinds[1].task
        ),
        r"call gate_up \(full\): task down over \(8,\)",
    ),
    "task missing": (
        lambda: replace(split_mlp(), tasks=split_mlp().tasks[:-1]),
        r"call down \(combine\) has 3 different tasks in layer 0 at t16, where grid",
    ),
    "task of another layer": (
        lambda: replace(
            split_mlp(),
            tasks=(replace(split_mlp().tasks[0], layer=1), *split_mlp().tasks[1:]),
        ),
        r"call gate_up \(full\) has 7 different tasks in layer 0",
    ),
    "task too many": (
        lambda: replace(split_mlp(), tasks=(*split_mlp().tasks, split_mlp().tasks[0])),
        r"21 tasks, but the program has 20",
    ),
    "no value between": (
        lambda: with_kind(split_mlp(), 2, ins=split_mlp().kinds[2].ins[:1]),
        r"call down \(combine\): 1 values between the parts",
    ),
    "an operand more": (
        lambda: with_kind(split_mlp(), 0, ins=(split_mlp().kinds[0].ins * 2)),
        r"4 operands more than its call",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_graph_that_is_not_its_program_is_refused(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises(VerifyError, match=words) as error:
        verify_kinds(make())
    assert "report it" in str(error.value)


def test_constant_starts_compare() -> None:
    """Two ways to write one position are one."""
    graph = decompose(mlp(), MACHINE)
    verify_kinds(graph)
    same = edit_in(graph, 0, 2, 1, 0)
    assert same.kinds[0].ins[2].axes[1].start == expr(0)
    verify_kinds(same)
