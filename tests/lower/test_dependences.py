"""Dependences: the cases that the design names. All pairs: test_random_programs.py."""

from dataclasses import replace

import pytest

from mkdsl.errors import InternalError, VerifyError
from mkdsl.lang.expr import read, var
from mkdsl.lang.program import Access, Call, Program
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.ir import TaskGraph
from mkdsl.lower.machine import H200
from mkdsl.lower.verify_graph import verify_program, verify_tasks
from tests.lower.programs import (
    array,
    attention,
    block,
    call,
    llama,
    mlp,
    on,
    task,
    tile,
    two_layers,
)

G0, LAYER = var("g0"), var("layer")


def graph_of(program: Program, **splits: int) -> TaskGraph:
    """The graph with dependences and only these splits."""
    options = DecomposeOptions(split=False, splits=tuple(splits.items()))
    graph = decompose(program, H200, options)
    verify_tasks(graph)
    found = find_dependences(graph)
    verify_tasks(found)
    return found


def named(graph: TaskGraph, t: int) -> tuple[str, str, int, tuple[int, ...], int]:
    """A task as (call, mode, layer, pid, part)."""
    one = graph.tasks[t]
    kind = graph.kinds[one.kind]
    return kind.call, kind.mode, one.layer, one.pid, one.part


def needs_of(graph: TaskGraph, t: int) -> dict[tuple[str, str], set[int]]:
    """(why, gate) -> tasks."""
    out: dict[tuple[str, str], set[int]] = {}
    for need in graph.needs[t]:
        out.setdefault((need.why, need.gate), set()).update(
            graph.dep_sets[need.deps].members
        )
    return out


def tasks_of(graph: TaskGraph, name: str, mode: str = "full") -> list[int]:
    """Ids of the tasks of a call."""
    return [t for t in range(len(graph.tasks)) if named(graph, t)[:2] == (name, mode)]


# ------------------------------------------------------------ the cases of the design


@pytest.mark.parametrize("window", [None, 512])
def test_cache_streams_ahead_of_everything(window: int | None) -> None:
    program = attention(window=window)
    name = next(program.calls()).name
    whole = graph_of(program)
    assert not any(whole.needs)
    split = graph_of(program, **{name: 4})
    for t in tasks_of(split, name, "partial"):
        assert split.needs[t] == ()
    for t in tasks_of(split, name, "combine"):
        (members,) = needs_of(split, t).values()
        pid = split.tasks[t].pid
        assert {named(split, m)[3:] for m in members} == {(pid, p) for p in range(4)}
    assert all(d.exact for d in split.dep_sets)


def test_reader_of_the_next_step_waits_for_the_append() -> None:
    program = attention()
    first = next(program.calls())
    (n,) = {a for axis in first.outs[1].axes for a in axis.start.reads}
    one_more = [
        replace(x, extent=x.extent + 1) if x.extent is not None else x
        for x in first.ins[1].axes
    ]
    second = replace(
        first,
        name="again",
        ins=(first.ins[0], replace(first.ins[1], axes=tuple(one_more)), *first.ins[2:]),
        outs=(replace(first.outs[0], buffer="out2"),),
        task=replace(first.task, results=first.task.results[:1]),
    )
    out2 = replace(program.buffer("out"), name="out2")
    both = replace(program, buffers=(*program.buffers, out2), steps=(first, second))
    graph = graph_of(both)
    assert n == "lengths"
    for t in tasks_of(graph, "again"):
        (deps,) = graph.needs[t]
        assert (deps.why, deps.gate) == ("RAW", "stream")
        (producer,) = graph.dep_sets[deps.deps].members
        assert named(graph, producer)[0] == "attend"
        assert graph.tasks[producer].pid == graph.tasks[t].pid
        assert graph.dep_sets[deps.deps].exact


def test_down_projection_starts_on_its_quarter() -> None:
    graph = graph_of(mlp(i=1024), down=4)
    ups = tasks_of(graph, "gate_up")
    for t in tasks_of(graph, "down", "partial"):
        part = graph.tasks[t].part
        assert needs_of(graph, t) == {
            ("RAW", "resident"): set(ups[4 * part : 4 * part + 4])
        }
    shared = {graph.needs[t] for t in tasks_of(graph, "down", "partial")}
    assert len(shared) == 4


def test_weights_and_arguments_are_free() -> None:
    graph = graph_of(mlp())
    assert all(graph.needs[t] == () for t in tasks_of(graph, "gate_up"))


def test_layers_follow_each_other_without_write_after_read() -> None:
    graph = graph_of(two_layers(length=3))
    whys = {need.why for needs in graph.needs for need in needs}
    assert whys == {"RAW"}
    for t in tasks_of(graph, "gate_up"):
        layer = graph.tasks[t].layer
        producers = {
            named(graph, m)[:3:2] for m in needs_of(graph, t)["RAW", "resident"]
        }
        assert producers == {("down", layer - 1) if layer else ("enter", 0)}


def test_heads_of_a_flat_projection_feed_only_their_task() -> None:
    graph = graph_of(
        llama(b=2, layers=1, d=256, i=256, heads=8, kv=2, vocab=100, s=128)
    )
    for t in tasks_of(graph, "attend"):
        _, kv = graph.tasks[t].pid
        producers = {
            named(graph, m)[::3] for m in needs_of(graph, t)["RAW", "resident"]
        }
        heads = {("q", (h,)) for h in range(4 * kv, 4 * kv + 4)}
        assert producers == heads | {("k", (kv,)), ("v", (kv,))}


def test_streamed_activation_gates_its_stream() -> None:
    program = mlp()
    down = program.steps[1]
    assert isinstance(down, Call)
    params = (replace(down.task.params[0], use="stream"), *down.task.params[1:])
    streamed = replace(down, task=replace(down.task, params=params))
    graph = graph_of(replace(program, steps=(program.steps[0], streamed)))
    for t in tasks_of(graph, "down"):
        assert set(needs_of(graph, t)) == {("RAW", "stream")}


# ------------------------------------------------------------------------- in place


def in_place(*calls: Call, shape: tuple[int, int] = (4, 64)) -> Program:
    """Calls on one state array."""
    s = array("s", shape, role="state")
    t = array("t", shape)
    return Program("in_place", (s, t), ("s",), calls, ())


S, T = array("s", (4, 64), role="state"), array("t", (4, 64))
OWN = (block(G0, 1), block(0, 64))
ALL = (block(0, 4), block(0, 64))


def update(name: str, ins: list[Access], outs: list[Access], grid: int = 4) -> Call:
    """A call of a task with these operands and results."""
    definition = task(
        name,
        [tile(f"x{i}", *a.shape) for i, a in enumerate(ins)],
        [tile(f"y{i}", *a.shape) for i, a in enumerate(outs)],
        1,
    )
    return call(name, definition, (grid,), ins, outs)


def test_recurrent_state_may_read_the_block_that_it_overwrites() -> None:
    step = update("step", [on(S, *OWN)], [on(S, *OWN)])
    graph = find_dependences(
        decompose(in_place(step, replace(step, name="next")), H200)
    )
    for t in tasks_of(graph, "step"):
        assert graph.needs[t] == ()
    for t in tasks_of(graph, "next"):
        assert needs_of(graph, t)["RAW", "resident"] == {t - 4}


def test_writer_waits_for_readers_of_the_old_version() -> None:
    reader = update("reader", [on(S, *ALL)], [on(T, *OWN)])
    writer = update("writer", [], [on(S, *OWN)])
    graph = find_dependences(decompose(in_place(reader, writer), H200))
    for t in tasks_of(graph, "writer"):
        assert needs_of(graph, t) == {("WAR", "resident"): {0, 1, 2, 3}}


def test_only_the_last_writer_counts() -> None:
    write = update("write", [], [on(S, *OWN)])
    again = replace(write, name="again")
    reader = update("reader", [on(S, *OWN)], [on(T, *OWN)])
    graph = find_dependences(decompose(in_place(write, again, reader), H200))
    for t in tasks_of(graph, "reader"):
        assert needs_of(graph, t) == {("RAW", "resident"): {t - 4}}


def test_run_time_rows_are_ordered_and_said_to_be_assumed() -> None:
    n = array("n", (2,), "int32", "input")
    rows = [
        update(f"w{i}", [], [on(S, block(read("n", i), 1), block(0, 64))], 1)
        for i in range(2)
    ]
    program = in_place(*rows)
    program = replace(program, buffers=(*program.buffers, n), inputs=("s", "n"))
    graph = find_dependences(decompose(program, H200))
    assert needs_of(graph, 1) == {("WAW", "resident"): {0}}
    assert [d.exact for d in graph.dep_sets] == [False]


# --------------------------------------------------------------------------- errors


def test_two_tasks_that_write_one_block_are_refused() -> None:
    both = update("both", [], [on(S, block(G0 // 2, 1), block(0, 64))])
    with pytest.raises(VerifyError, match=r"call both: tasks \(0,\) and \(1,\)") as e:
        find_dependences(decompose(in_place(both), H200))
    assert "both write" in str(e.value)
    assert "of s" in str(e.value)
    assert "test_dependences.py" in str(e.value) or "programs.py" in str(e.value)


def test_task_that_reads_what_its_call_overwrites_is_refused() -> None:
    jacobi = update("jacobi", [on(S, *ALL)], [on(S, *OWN)])
    with pytest.raises(VerifyError, match=r"which task \(0,\) of the same call overwr"):
        find_dependences(decompose(in_place(jacobi), H200))


def test_temp_that_nothing_wrote_is_refused() -> None:
    reader = update("reader", [on(T, *OWN)], [on(S, *OWN)])
    writer = update("writer", [], [on(T, *OWN)])
    program = in_place(reader, writer)
    with pytest.raises(VerifyError, match=r"no earlier task writes") as e:
        find_dependences(decompose(program, H200))
    assert "t[0:1, 0:64]" in str(e.value)
    with pytest.raises(VerifyError, match=r"reads t before any call writes it"):
        verify_program(program)


def test_interrupted_run_is_an_internal_error() -> None:
    graph = decompose(mlp(), H200)
    tasks = (graph.tasks[0], graph.tasks[-1], *graph.tasks[1:-1])
    with pytest.raises(InternalError, match=r"interrupted"):
        find_dependences(replace(graph, tasks=tasks))


def test_llama_has_only_proved_dependences() -> None:
    graph = find_dependences(decompose(llama(layers=2, vocab=1000), H200))
    assert all(d.exact for d in graph.dep_sets)
    assert {n.why for needs in graph.needs for n in needs} == {"RAW"}
    edges: dict[str, int] = {}
    for t, needs in enumerate(graph.needs):
        name = named(graph, t)[0]
        edges[name] = max(edges.get(name, 0), len(needs))
    assert edges["attend"] <= 4
