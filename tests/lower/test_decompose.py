"""Calls become tasks: which are split, how parts cover the work, what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from mkdsl.errors import PlanError
from mkdsl.lang.expr import Expr
from mkdsl.lang.program import Access, Axis, Call, Dot, Fold, Program, Scan
from mkdsl.lower.cost import kind_cost, stage_ns
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.ir import Kind, TaskGraph
from mkdsl.lower.machine import H200, Machine, simulated
from mkdsl.lower.parts import legal_parts
from mkdsl.lower.verify_graph import verify_program, verify_tasks
from tests.lower.programs import attention, llama, mlp, two_layers

PROGRAMS: tuple[Callable[[], Program], ...] = (mlp, attention, two_layers, llama)


def parts_of(graph: TaskGraph) -> dict[str, int]:
    """Call -> parts."""
    return {k.call: k.parts for k in graph.kinds}


def kind(graph: TaskGraph, call: str, mode: str = "partial") -> Kind:
    """The kind of a call in a mode."""
    return next(k for k in graph.kinds if (k.call, k.mode) == (call, mode))


def forced(program: Program, **splits: int) -> TaskGraph:
    """The graph with these splits and no others."""
    options = DecomposeOptions(split=False, splits=tuple(splits.items()))
    return decompose(program, H200, options)


def at(value: Expr, n: int, **env: int) -> int:
    """An index where every scalar is n."""
    return value.evaluate(env, lambda buffer, index: n)


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize("machine", [H200, simulated(4)], ids=lambda m: m.name)
def test_programs_decompose_into_verified_tasks(
    make: Callable[[], Program], machine: Machine
) -> None:
    program = make()
    verify_program(program)
    graph = decompose(program, machine)
    verify_tasks(graph)
    assert decompose(program, machine) == graph


def test_llama_at_batch_8_fills_the_sms() -> None:
    graph = decompose(llama(b=8), H200)
    assert parts_of(graph) == {
        "embed": 1,
        "angles": 1,
        "q": 1,
        "k": 1,
        "v": 1,
        "attend": 2,
        "o": 4,
        "gate_up": 1,
        "down": 4,
        "logits": 1,
        "argmax_some": 1,
        "argmax": 1,
    }
    assert len(graph.tasks) < 15_000


def test_a_fold_over_few_heads_has_more_parts() -> None:
    assert parts_of(decompose(llama(b=1), H200))["attend"] == 2
    assert parts_of(decompose(llama(b=16), H200))["attend"] == 1


def test_no_split_if_it_does_not_pay() -> None:
    assert set(parts_of(decompose(mlp(), simulated(2))).values()) == {1}
    graph = decompose(llama(b=1), H200, DecomposeOptions(split=False))
    assert {k.mode for k in graph.kinds} == {"full"}


def test_partial_tasks_come_part_by_part_before_their_combines() -> None:
    graph = forced(mlp(i=1024), down=4)
    order = [
        (graph.kinds[t.kind].mode, t.part, t.pid)
        for t in graph.tasks
        if graph.kinds[t.kind].call == "down"
    ]
    partial = [("partial", p, (i,)) for p in range(4) for i in range(4)]
    assert order == partial + [("combine", 0, (i,)) for i in range(4)]


def test_part_of_a_dot_reads_its_piece_of_the_depth() -> None:
    graph = forced(mlp(i=1024), down=4)
    partial, combine = kind(graph, "down"), kind(graph, "down", "combine")
    assert [str(a.axes[-1].start) for a in partial.ins] == ["256*part"] * 2
    assert [a.shape for a in partial.ins] == [(8, 256), (64, 256)]
    assert partial.operands == (0, 1)
    (out,) = partial.outs
    assert (out.buffer, out.view) == ("down.acc0", (4, 4, 8, 64))
    assert out.shape == (8, 64)
    assert combine.operands == (2,)
    assert [a.buffer for a in combine.ins] == ["x", "down.acc0"]
    assert combine.ins[1].shape == (4, 8, 64)
    assert combine.outs == mlp(i=1024).steps[1].outs  # type: ignore[union-attr]
    acc = next(b for b in graph.buffers if b.name == "down.acc0")
    assert (acc.dtype, acc.column) == ("float32", 2)


def test_accumulators_inside_a_scan_have_a_layer() -> None:
    graph = forced(two_layers(), down=2)
    (out,) = kind(graph, "down").outs
    assert out.view == (2, 4, 2, 8, 64)
    assert str(out.axes[0].start) == "layer"


def test_both_dots_of_a_task_are_cut_alike() -> None:
    graph = forced(mlp(d=512), gate_up=2)
    partial = kind(graph, "gate_up")
    assert [a.shape for a in partial.ins] == [(8, 512), (512,), (64, 256), (64, 256)]
    assert [a.buffer for a in partial.outs] == ["gate_up.acc0", "gate_up.acc1"]
    assert kind(graph, "gate_up", "combine").operands == ()


@pytest.mark.parametrize("parts", [2, 3, 5, 8])
@pytest.mark.parametrize("window", [None, 1000])
def test_parts_of_a_fold_cover_every_length_once(
    parts: int, window: int | None
) -> None:
    program = attention(window=window)
    name = next(program.calls()).name
    graph = forced(program, **{name: parts})
    axis = rows(kind(graph, name).ins[1])
    assert axis.extent is not None
    for n in (0, 1, 127, 128, 129, 500, 640, 1000, 1024):
        past = 0 if window is None else max(0, n + 1 - window)
        sizes: list[int] = []
        for part in range(parts):
            start = at(axis.start, n, g0=0, part=part)
            extent = at(axis.extent, n, g0=0, part=part)
            sizes.append(extent)
            assert 0 <= extent <= axis.size
            assert start == past or extent == 0
            past += extent
        assert past == n
        assert max(sizes) - min(sizes) <= 256


def rows(access: Access) -> Axis:
    """The streamed axis of a fold's operand."""
    return next(a for a in access.axes if not a.squeezed)


def test_parts_of_a_fold_over_a_constant_extent() -> None:
    program = attention(s=700)
    call = next(program.calls())
    ins = list(call.ins)
    for i in (1, 2):
        fixed = [
            replace(a, extent=None) if a.extent is not None else a for a in ins[i].axes
        ]
        ins[i] = replace(ins[i], axes=tuple(fixed))
    fixed_program = replace(program, steps=(replace(call, ins=tuple(ins)),))
    axis = rows(kind(forced(fixed_program, attend=4), "attend").ins[1])
    assert axis.extent is not None
    starts = [at(axis.start, 0, g0=0, part=p) for p in range(4)]
    extents = [at(axis.extent, 0, g0=0, part=p) for p in range(4)]
    assert starts == [0, 128, 384, 512]
    assert extents == [128, 256, 128, 188]


def test_carries_of_a_fold_are_buffers() -> None:
    graph = forced(attention(), attend=4)
    carries = kind(graph, "attend").outs
    assert [a.buffer for a in carries] == [f"attend.carry{i}" for i in range(3)]
    assert [a.shape for a in carries] == [(4, 64), (4, 1), (4, 1)]
    combine = kind(graph, "attend", "combine")
    assert combine.operands == (0, 3, 4)
    assert [a.shape for a in combine.ins[3:]] == [(4, 4, 64), (4, 4, 1), (4, 4, 1)]


def test_equal_calls_of_two_variants_share_their_kinds() -> None:
    one = decompose(two_layers(length=4), H200)
    two = decompose(two_layers(length=4, variants=2), H200)
    assert len(one.kinds) == len(two.kinds)
    assert [(t.kind, t.layer, t.pid) for t in one.tasks] == [
        (t.kind, t.layer, t.pid) for t in two.tasks
    ]


def test_equal_calls_of_one_variant_do_not() -> None:
    program = two_layers()
    scan = program.steps[1]
    assert isinstance(scan, Scan)
    (calls,) = scan.variants
    again = tuple(replace(c, name=f"{c.name}_again") for c in calls)
    twice = replace(scan, variants=((*calls, *again),))
    graph = decompose(
        replace(program, steps=(program.steps[0], twice, program.steps[2])), H200
    )
    names = [k.call for k in graph.kinds]
    assert "gate_up" in names
    assert "gate_up_again" in names


# -------------------------------------------------------------------------- refusals


def with_dot(program: Program, rows: int) -> Program:
    """The program with other rows per task in its last call."""
    call = program.steps[-1]
    assert isinstance(call, Call)
    dots = tuple(replace(s, rows=rows) for s in call.task.streams if isinstance(s, Dot))
    last = replace(call, task=replace(call.task, streams=dots))
    return replace(program, steps=(*program.steps[:-1], last))


@pytest.mark.parametrize(
    ("rows", "machine"), [(300, H200), (257, H200), (128, simulated(4, 8192))]
)
def test_page_that_fits_no_slot_is_refused(rows: int, machine: Machine) -> None:
    with pytest.raises(
        PlanError, match=r"call down: task down streams w: bfloat16"
    ) as e:
        decompose(with_dot(mlp(), rows), machine)
    assert f"a page has {machine.page_bytes} bytes" in str(e.value)
    assert "programs.py:" in str(e.value)
    assert "hint: give each task at most" in str(e.value)


def test_block_of_a_fold_that_fits_no_slot_is_refused() -> None:
    program = attention()
    call = next(program.calls())
    fold = call.task.streams[0]
    assert isinstance(fold, Fold)
    large = replace(call.task, streams=(replace(fold, block=512),))
    with pytest.raises(PlanError, match=r"512 rows x 64 features = 65536 bytes"):
        decompose(replace(program, steps=(replace(call, task=large),)), H200)


def test_a_page_of_float32_has_half_as_many_elements() -> None:
    program = mlp()
    (call,) = [c for c in program.calls() if c.name == "down"]
    params = tuple(
        replace(p, dtype="float32") if p.use == "stream" else p
        for p in call.task.params
    )
    wide = replace(call, task=replace(call.task, params=params))
    assert legal_parts(wide, H200) == legal_parts(
        call, replace(H200, page_bytes=H200.page_bytes // 2)
    )


def test_split_that_the_task_does_not_allow_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot split task down into 3 parts") as e:
        forced(mlp(i=1024), down=3)
    assert "hint: use one of 1, 2, 4" in str(e.value)
    with pytest.raises(PlanError, match=r"does not have") as e:
        forced(mlp(), up=2)
    assert "its calls are gate_up, down" in str(e.value)


def test_too_many_tasks_are_refused_with_the_largest_call() -> None:
    with pytest.raises(PlanError, match=r"12 tasks, more than 10; call gate_up") as e:
        decompose(mlp(), H200, DecomposeOptions(split=False, most_tasks=10))
    assert "hint: use larger blocks" in str(e.value)


def test_calls_get_fewer_parts_where_tasks_would_be_too_many() -> None:
    free = decompose(llama(b=8), H200)
    most = len(free.tasks) - 1
    fewer = decompose(llama(b=8), H200, DecomposeOptions(most_tasks=most))
    verify_tasks(fewer)
    assert len(fewer.tasks) <= most
    before, after = parts_of(free), parts_of(fewer)
    assert 1 < max(after.values()) < max(before.values())
    assert all(after[name] <= before[name] for name in before)


def test_named_splits_stay_where_tasks_are_too_many() -> None:
    options = DecomposeOptions(splits=(("gate_up", 4),), most_tasks=10)
    with pytest.raises(PlanError, match="call gate_up"):
        decompose(mlp(), H200, options)


def test_ragged_depth_is_not_split() -> None:
    down = mlp(i=1000).steps[1]
    assert isinstance(down, Call)
    assert legal_parts(down, H200) == (1,)


# ------------------------------------------------------------------- machine and cost


def test_bytes_of_a_task() -> None:
    program = mlp()
    graph = decompose(program, H200, DecomposeOptions(split=False))
    cost = kind_cost(
        kind(graph, "gate_up", "full"), {b.name: b for b in graph.buffers}, H200
    )
    assert cost.streamed_bytes == 2 * 64 * 256 * 2
    assert cost.loaded_bytes == (8 * 256 + 256) * 2
    assert cost.written_bytes == 8 * 64 * 2
    assert cost.ns > H200.read_ns(cost.streamed_bytes)


@pytest.mark.parametrize(("tasks", "sms"), [(4, 4), (5, 4), (12, 4), (3, 4)])
def test_stage_of_equal_tasks_takes_whole_rounds(tasks: int, sms: int) -> None:
    assert stage_ns([(tasks, 10.0)], simulated(sms)) == 10 * math.ceil(tasks / sms)


def test_short_tasks_fill_the_gaps_of_long_ones() -> None:
    assert stage_ns([(2, 30.0), (6, 10.0)], simulated(4)) == 30.0
