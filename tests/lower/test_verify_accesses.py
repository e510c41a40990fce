"""The last proof looks at accesses: needs that lie do not deceive it."""

import time
from dataclasses import replace

import pytest

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import read, var
from mkdsl.lang.program import Access, Call, Program
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.elide_waits import elide_waits
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import Need, Schedule, TaskGraph
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.normalize import normalize
from mkdsl.lower.pipeline import compile_program
from mkdsl.lower.schedule import schedule
from mkdsl.lower.verify_accesses import verify_accesses
from mkdsl.lower.verify_kinds import verify_kinds
from mkdsl.lower.verify_schedule import verify_schedule
from tests.lower.programs import (
    array,
    attention,
    block,
    call,
    llama,
    on,
    task,
    tile,
)

MACHINE = simulated(2)
G0 = var("g0")
S, T = array("s", (4, 64), role="state"), array("t", (4, 64))
N = array("n", (2,), "int32", "input")
OWN, ALL = (block(G0, 1), block(0, 64)), (block(0, 4), block(0, 64))


def update(name: str, ins: list[Access], outs: list[Access], grid: int = 4) -> Call:
    """A call of a task with these operands and results."""
    params = [tile(f"x{i}", *a.shape) for i, a in enumerate(ins)]
    results = [tile(f"y{i}", *a.shape) for i, a in enumerate(outs)]
    return call(name, task(name, params, results, 1), (grid,), ins, outs)


def program_of(*calls: Call) -> Program:
    """Calls on a state and a temp."""
    return Program("p", (S, T, N), ("s", "n"), calls, ())


def graph_of(program: Program, **splits: int) -> TaskGraph:
    """The graph with dependences."""
    options = DecomposeOptions(split=False, splits=tuple(splits.items()))
    return find_dependences(decompose(program, MACHINE, options))


def schedule_of(graph: TaskGraph) -> Schedule:
    """Events, queues and waits of the needs of a graph."""
    return elide_waits(schedule(normalize(fuse_events(graph)), MACHINE))


READER = update("reader", [on(S, *ALL)], [on(T, *OWN)])
WRITER = update("writer", [], [on(S, *OWN)])
PAIRS = {
    "RAW": (
        program_of(WRITER, READER),
        "reads s[0:4, 0:64], of which task t0 'writer'",
    ),
    "WAR": (
        program_of(READER, WRITER),
        "writes s[0:1, 0:64], of which task t0 'reader'",
    ),
    "WAW": (
        program_of(WRITER, replace(WRITER, name="again")),
        "writes s[0:1, 0:64], of which task t0 'writer' layer 0 pid (0) writes an",
    ),
}


@pytest.mark.parametrize("why", PAIRS)
def test_a_need_that_no_pass_found_is_a_race(why: str) -> None:
    program, words = PAIRS[why]
    graph = graph_of(program)
    verify_accesses(schedule_of(graph))
    forgot = schedule_of(replace(graph, needs=((),) * len(graph.tasks)))
    verify_schedule(forgot, MACHINE)
    with pytest.raises(VerifyError, match=r"^accesses: race: task") as error:
        verify_accesses(forgot)
    assert words in str(error.value)
    assert "programs.py" in str(error.value)
    assert "report it" in str(error.value)


def test_a_need_at_the_wrong_gate_is_a_race() -> None:
    graph = graph_of(PAIRS["RAW"][0])
    lied = [tuple(Need(n.deps, "stream", n.why) for n in ns) for ns in graph.needs]
    moved = schedule_of(replace(graph, needs=tuple(lied)))
    verify_schedule(moved, MACHINE)
    with pytest.raises(VerifyError, match="the loader of its resident operands does n"):
        verify_accesses(moved)


def test_a_store_may_wait_at_either_gate() -> None:
    graph = graph_of(PAIRS["WAR"][0])
    lied = [tuple(Need(n.deps, "stream", n.why) for n in ns) for ns in graph.needs]
    verify_accesses(schedule_of(replace(graph, needs=tuple(lied))))


def test_needs_of_other_regions_do_not_help() -> None:
    """Every task of the second call reads the row after its own."""
    next_row = (block((G0 + 1) % 4, 1), block(0, 64))
    reader = update("reader", [on(S, *OWN)], [on(T, *OWN)])
    graph = graph_of(program_of(WRITER, reader))
    made = schedule_of(graph)
    verify_accesses(made)
    kinds = (graph.kinds[0], replace(graph.kinds[1], ins=(on(S, *next_row),)))
    events = replace(made.events, graph=replace(graph, kinds=kinds))
    with pytest.raises(VerifyError, match=r"reads s\[1:2, 0:64\], of which task t1"):
        verify_accesses(replace(made, events=events))


def test_views_meet_by_their_elements() -> None:
    """Half a row of [4, 64] is a row of [8, 32]; the other half is another one."""
    half = on(S, block(G0 * 2, 1), block(0, 32), view=(8, 32))
    other = on(S, block(G0 * 2 + 1, 1), block(0, 32), view=(8, 32))
    left = update("left", [on(S, block(G0, 1), block(0, 32))], [on(T, *OWN)])
    for out, races in ((half, True), (other, False)):
        graph = graph_of(program_of(left, update("writer", [], [out])))
        forgot = schedule_of(replace(graph, needs=((),) * len(graph.tasks)))
        if races:
            with pytest.raises(VerifyError, match="race"):
                verify_accesses(forgot)
        else:
            verify_accesses(forgot)


def test_rows_that_only_a_proof_tells_apart() -> None:
    """Rows [0, n) and row n are disjoint at every n; [0, n + 1) and n are not."""
    n = read("n", 0)
    row = update("append", [], [on(S, block(n, 1), block(0, 64))], 1)
    for more, races in ((0, False), (1, True)):
        past = on(S, block(0, 4, n + more), block(0, 64))
        graph = graph_of(program_of(row, update("reader", [past], [on(T, *OWN)])))
        forgot = schedule_of(replace(graph, needs=((),) * len(graph.tasks)))
        if races:
            with pytest.raises(VerifyError, match=r"reads s\[0:n\[0\] \+ 1, 0:64\]"):
                verify_accesses(forgot)
        else:
            verify_accesses(forgot)


def test_two_tasks_of_a_call_that_write_one_element_are_refused() -> None:
    """In views without a common refinement the dependences only cover the blocks."""
    s = array("s", (3, 8), role="state")
    rows = update("rows", [], [on(s, block(G0 * 4, 12), view=(24,))], 2)
    program = replace(program_of(rows), buffers=(s, T, N))
    with pytest.raises(
        VerifyError, match=r"writes s\[4:16\], of which task t0 .* of th"
    ):
        compile_program(program, MACHINE)


def test_a_task_that_reads_what_its_call_has_written_is_refused() -> None:
    graph = graph_of(program_of(update("step", [on(S, *OWN)], [on(S, *OWN)])))
    verify_accesses(schedule_of(graph))
    kinds = (replace(graph.kinds[0], ins=(on(S, *ALL),)),)
    made = schedule_of(replace(graph, kinds=kinds))
    with pytest.raises(VerifyError, match=r"reads s\[0:4, 0:64\], of which task t0 .*"):
        verify_accesses(made)


def test_a_task_may_read_what_a_later_one_of_its_call_overwrites() -> None:
    own_and_next = on(S, block(G0, 2), block(0, 64))
    step = update("step", [own_and_next], [on(S, *OWN)])
    graph = graph_of(program_of(step))
    assert {n.why for ns in graph.needs for n in ns} == {"WAR"}
    verify_accesses(schedule_of(graph))
    with pytest.raises(VerifyError, match="race: task t1"):
        verify_accesses(schedule_of(replace(graph, needs=((),) * 4)))


def test_a_temp_that_is_read_before_it_is_written_is_refused() -> None:
    writer = update("writer", [], [on(T, *OWN)])
    reader = update("reader", [on(T, *ALL)], [on(S, *OWN)])
    graph = graph_of(program_of(writer, reader))
    swapped = replace(graph, tasks=(*graph.tasks[4:], *graph.tasks[:4]))
    made = schedule_of(replace(swapped, needs=((),) * 8))
    with pytest.raises(VerifyError, match="comes later in the program: it would read"):
        verify_accesses(made)


def test_a_combine_does_not_load_the_stream_that_it_writes_into() -> None:
    program = attention()
    (name,) = (c.name for c in program.calls())
    verify_accesses(schedule_of(graph_of(program, **{name: 4})))


@pytest.mark.slow
def test_a_whole_model_is_proved_in_about_a_second() -> None:
    plan = compile_program(llama(vocab=32064), H200)
    start = time.perf_counter()
    verify_accesses(plan.schedule)
    verify_kinds(plan.schedule.events.graph)
    # 0.6 s on one core of a slow machine; the limit is for a quadratic check.
    assert time.perf_counter() - start < 10
