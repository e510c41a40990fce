"""parse(print(stage)) == stage for every stage, and what a wrong text is told."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mkdsl as mk
from mkdsl.lang.program import Access, Axis, Program, Scratch
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import DepSet, EventGraph, Schedule, TaskGraph
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.normalize import normalize
from mkdsl.lower.parse import Parsed, parse
from mkdsl.lower.pipeline import Options, run_passes
from mkdsl.lower.plan_pages import plan_pages
from mkdsl.lower.text import print_program
from mkdsl.lower.text_schedule import (
    print_events,
    print_plan,
    print_schedule,
    print_tasks,
)
from tests.lower import programs
from tests.lower.graphs import MACHINE, graphs, queues
from tests.strategies import expressions

SMALL = programs.mlp(b=4, d=256, i=128)


def check(value: Parsed, text: str, tasks: Any = None) -> None:
    """The text gives the value, and the value the text."""
    found = parse(text, tasks)
    assert found == value
    printers = {
        "Program": print_program,
        "TaskGraph": print_tasks,
        "EventGraph": print_events,
        "Schedule": print_schedule,
        "KernelPlan": print_plan,
    }
    assert printers[type(value).__name__](found) == text


# ---------------------------------------------------------------------- round trip


def split(**splits: int) -> Options:
    return Options(DecomposeOptions(splits=tuple(splits.items())))


CASES = {
    "mlp": (programs.mlp(), Options()),
    "split dot": (programs.mlp(), split(down=2)),
    "attention": (programs.attention(), Options()),
    "window": (programs.attention(window=256), Options()),
    "split fold": (programs.attention(), split(attend=4)),
    "scan": (programs.two_layers(), Options()),
    "variants": (programs.two_layers(length=4, variants=2), Options()),
    "llama": (
        programs.llama(b=2, layers=2, d=256, i=512, heads=4, kv=2, vocab=640, s=256),
        Options(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_stage_of_a_program(case):
    program, options = CASES[case]
    for stage in run_passes(program, simulated(3), options):
        check(stage.value, stage.as_text(), program)


def test_parts_and_variants_are_among_the_cases():
    def text(case: str, stage: int) -> str:
        program, options = CASES[case]
        return list(run_passes(program, simulated(3), options))[stage].as_text()

    assert "\n  in crossing " in text("split dot", -1)
    assert "\nscan 4: 0, 1, 0, 1\n" in text("variants", 0)


@given(st.data(), graphs())
def test_random_graphs(data, graph):
    check(graph, print_tasks(graph))
    events = normalize(fuse_events(graph))
    check(events, print_events(events))
    schedule = Schedule(events, data.draw(queues(len(graph.tasks))))
    check(schedule, print_schedule(schedule))
    plan = plan_pages(schedule, MACHINE)
    check(plan, print_plan(plan))


@given(st.data(), graphs(most=6))
def test_schedules_that_are_wrong(data, graph):
    """A bug report has to say what is there: any queues, waits and signals."""
    tasks, events = len(graph.tasks), fuse_events(graph)
    ids = st.integers(0, tasks + 1)
    changed = replace(
        events,
        signals=tuple(data.draw(st.integers(-1, 3)) for _ in range(tasks)),
        waits=tuple(
            tuple(
                replace(w, threshold=data.draw(st.integers(0, 9)), event=w.event + 1)
                for w in waits
            )
            for waits in events.waits
        ),
    )
    wrong = data.draw(st.lists(st.lists(ids, max_size=4).map(tuple), max_size=3))
    schedule = Schedule(changed, tuple(wrong))
    check(schedule, print_schedule(schedule))


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    extent = draw(st.none() | expressions().map(lambda pair: pair[0]))
    size, dropped = draw(st.integers(1, 99)), draw(st.booleans())
    return Axis(draw(expressions())[0], size, dropped, extent)


@settings(max_examples=50)
@given(st.lists(axes(), min_size=1, max_size=3), st.booleans())
def test_random_accesses(drawn, viewed):
    call = next(SMALL.calls())
    view = (7,) * len(drawn) if viewed or len(drawn) != 2 else (4, 256)
    access = Access("x", view, tuple(drawn))
    step = replace(call, ins=(access, *call.ins[1:]))
    program = replace(SMALL, steps=(step, *SMALL.steps[1:]))
    check(program, print_program(program))


@pytest.mark.parametrize("name", ["<lambda>", "a b", 'say "x"', "q:1", "", "é", "x@1"])
def test_any_name(name):
    def renamed(word: str) -> str:
        return name if word == "gate_up" else word

    steps = tuple(
        replace(c, name=renamed(c.name), task=replace(c.task, name=renamed(c.name)))
        for c in SMALL.calls()
    )
    buffers = tuple(replace(b, name=name if b.name == "x" else b.name)
                    for b in SMALL.buffers)  # fmt: skip
    inputs = (name, *SMALL.inputs[1:])
    steps = tuple(
        replace(
            c,
            ins=tuple(replace(a, buffer=name) if a.buffer == "x" else a for a in c.ins),
        )
        for c in steps
    )
    program = replace(SMALL, name=name, buffers=buffers, inputs=inputs, steps=steps)
    for stage in run_passes(program, simulated(2)):
        check(stage.value, stage.as_text(), program)


def test_tasks_of_one_digest_that_differ():
    first, second = SMALL.calls()
    scratch = (Scratch("operand", 256), Scratch("roll", 64, after_cut=True))
    third = replace(
        first, name="again", task=replace(first.task, scratch=scratch, long=64)
    )
    program = replace(SMALL, steps=(first, third, second))
    text = print_program(program)
    assert "task gate_up#gate_up-digest/2 columns 4 cut dot long 64\n" in text
    assert "call again = gate_up#gate_up-digest/2 over (2)\n" in text
    check(program, text, program)


def test_a_graph_before_and_after_its_needs_are_found():
    stages = {s.name: s for s in run_passes(SMALL, simulated(2))}
    assert "needs not found yet\n" in stages["tasks"].as_text()
    assert "needs not found yet\n" not in stages["dependences"].as_text()
    none = replace(stages["dependences"].value, needs=((),) * 6, dep_sets=())
    check(none, print_tasks(none))


def test_an_assumed_set_stays_assumed():
    graph = list(run_passes(SMALL, simulated(2)))[2].value
    assert isinstance(graph, TaskGraph)
    assumed = replace(
        graph, dep_sets=tuple(DepSet(d.members, False) for d in graph.dep_sets)
    )
    assert "deps d0 about: t0..t1\n" in print_tasks(assumed)
    check(assumed, print_tasks(assumed))


def test_a_kind_of_a_task_that_its_program_has_not():
    events = list(run_passes(SMALL, simulated(2)))[4].value
    assert isinstance(events, EventGraph)
    graph = events.graph
    other = replace(graph.kinds[1].task, columns=9)
    graph = replace(graph, kinds=(graph.kinds[0], replace(graph.kinds[1], task=other)))
    events = replace(events, graph=graph)
    check(events, print_events(events), [*(c.task for c in SMALL.calls()), other])


def test_layout_means_nothing():
    text = print_program(SMALL)
    loose = "\n\n".join(
        f"   {line.replace(', ', ' ,  ')}  " for line in text.split("\n")
    )
    assert parse("# a comment\n" + loose) == SMALL


# ------------------------------------------------------------------ bodies and lines


def with_body(program: Program, body: object) -> Program:
    steps = [replace(c, task=replace(c.task, body=body)) for c in program.calls()]
    return replace(program, steps=tuple(steps))


def test_bodies_come_from_the_given_tasks():
    body = object()
    given_program = with_body(SMALL, body)
    text = list(run_passes(SMALL, simulated(2)))[-1].as_text()
    tasks = [c.task for c in given_program.calls()]
    for given_tasks in (given_program, tasks, iter(tasks)):
        plan = parse(text, given_tasks)
        bodies = {k.task.body for k in plan.schedule.events.graph.kinds}
        bodies |= {c.task.body for c in plan.schedule.events.graph.program.calls()}
        assert bodies == {body}
    assert {c.task.body for c in parse(print_program(given_program)).calls()} == {None}


def test_nodes_know_their_line_of_the_text():
    text = print_program(SMALL)
    program = parse(text, file="report.txt")
    call = list(program.calls())[1]
    assert str(call.src).startswith("report.txt:")
    assert text.splitlines()[call.src.line - 1].startswith("call down")


# --------------------------------------------------------------------------- errors


def stage_text(name: str) -> str:
    wider = programs.mlp(b=4, d=256, i=512)
    stages = run_passes(wider, simulated(2), split(down=2))
    return next(s.as_text() for s in stages if s.name == name)


# stage, what is replaced, by what, the message
ERRORS = [
    ("program", "program mlp", "porgram mlp",
     "line 1: expected 'program' or 'tasks' or 'events' or 'schedule' or 'plan', "
     "found 'porgram mlp(x, "),
    ("program", "mlp(", "mlp[", "expected '(', found '[x, scale"),
    ("program", "bf16[4, 256] input", "bf17[4, 256] input",
     "line 2: expected 'bf16' or 'f16' or 'f32' or 'i32' or 'bool', found 'bf17[4"),
    ("program", "[4, 256] input", "[4 256] input", "expected ',', found '256] input'"),
    ("program", "[4, 256] input", "[4, d] input", "expected a number, found 'd] inp"),
    ("program", "[4, 256] input", "[4, 256] inptu",
     "expected 'input' or 'state' or 'temp', found 'inptu'"),
    ("program", "[4, 256] input", "[4, 256] input 2",
     "expected the end of the line, found '2'"),
    ("program", "buffer x", "buffer :", "expected a name, found '::"),
    ("program", "buffer x", r'buffer "\x"', "is no JSON string: Invalid \\escape"),
    ("program", "cut dot", "cut", "expected 'none' or 'dot' or 'fold', found the end"),
    ("program", "param 1 scale", "param 2 scale",
     "expected param 1: numbers are in order"),
    ("program", "64*g0 :+ 64]", "64*g0*g0 :+ 64]",
     "expected a product with a constant, found ':+ 64"),
    ("program", "64*g0 :+ 64]", "64* :+ 64]",
     "expected a number, a name or '(', found ':+ 64"),
    ("program", "= down#down-digest", "= up#down-digest",
     "no task up#down-digest is defined above: gate_up#gate_up-digest, down#down"),
    ("program", "task down#down-digest", "task gate_up#gate_up-digest",
     "task gate_up#gate_up-digest is defined twice"),
    ("program", "in scale[", "in scales[",
     "no buffer scales, and no shape `as [..]`: known are x, scale, w_gate"),
    ("program", "in scale[", "in scale[0, ", "2 axes for the shape [256] of scale"),
    ("program", "call down", "the end\ncall down",
     "expected the end of the text, found 'the end'"),
    ("scan", "scan 2: 0 * 2", "scan 3: 0 * 2", "2 variants are named for 3 layers"),
    ("scan", "end scan\n", "", "expected 'end scan', found the end"),
    ("tasks", "tasks\n", "tasks now\n", "expected the end of the line, found 'now'"),
    ("tasks", "kind 1 down", "kind 2 down", "expected kind 1: numbers are in order"),
    ("tasks", "kind 2 down combine", "kind 2 down partial",
     "two kinds are down partial"),
    ("tasks", "t0 gate_up", "t0 gate", "no kind is gate full: gate_up full, down part"),
    ("tasks", "t0 gate_up layer 0 pid (0)", "t0 gate_up layer 0 pid (0): needs d0 "
     "resident RAW", "needs, but the text says `needs not found yet` above"),
    ("tasks", "t1 gate_up", "t0 gate_up", "t0 is described twice; later it is `t0`"),
    ("tasks", "t1 gate_up", "t99 gate_up", "20 tasks, but none of them is t1"),
    ("dependences", "deps d1", "deps d2", "expected deps d1: numbers are in order"),
    ("dependences", ": needs d0", ": needs t0", "expected d and a number, found 't0"),
    ("dependences", "resident RAW", "register RAW",
     "'block3' or 'stream', found 'register RAW"),
    ("dependences", "resident RAW", "resident R",
     "expected 'RAW' or 'WAR' or 'WAW', found 'R"),
    ("dependences", "t0 gate_up layer 0 pid (0)", "t0 gate_up layer 0 pid (0): signal "
     "e0", "tasks have no waits and signals before the stage `events`"),
    ("events", "event e0: t0", "event e0: e0", "expected t and a number, found 'e0"),
    ("events", "signal e0", "signal e0; wait e1>=1 resident",
     "expected 'needs', 'wait' or 'signal', in this order, found '; wait e1"),
    ("events", ">=", ">", "expected '>=', found '>"),
    ("schedule", "sm 1\n", "sm 2\n", "expected sm 1: numbers are in order"),
    ("schedule", "  t1 gate_up layer 0 pid (1): signal e0", "  t1",
     "19 tasks, but none of them is t1"),
    ("pages", "columns 8", "columns eight", "expected a number, found 'eight'"),
    ("pages", "  scratch", "  stack", "expected 'scratch', found 'stack 4096'"),
    ("pages", "in flight", "at once", "expected 'in flight', found 'at once'"),
    ("pages", "memory of kind 0", "memory of kind 1", "expected memory of kind 0"),
    ("pages", "schedule\n", "", "expected 'schedule', found 'program mlp"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "old", "new", "message"), ERRORS)
def test_errors_name_the_line_and_what_was_expected(stage, old, new, message):
    if stage == "scan":
        text = print_program(programs.two_layers())
    else:
        text = stage_text(stage)
    assert old in text
    parse(text)
    with pytest.raises(mk.ParseError) as error:
        parse(text.replace(old, new, 1), file="report.txt")
    assert message in str(error.value), str(error.value)
    assert re.match(r"line \d+: ", str(error.value))
    assert error.value.src == mk.errors.SrcInfo("report.txt", error.value.line)
    assert "hint: the grammar is in the docstrings of mkdsl/lower/text" in str(
        error.value
    )


def test_an_error_shows_the_place():
    text = print_program(SMALL).replace("temp", "tmp", 1)
    with pytest.raises(mk.ParseError) as error:
        parse(text)
    assert str(error.value).splitlines()[:3] == [
        "line 7: expected 'input' or 'state' or 'temp', found 'tmp'",
        "    buffer h: bf16[4, 128] tmp",
        "                           ^",
    ]


def test_an_empty_text():
    with pytest.raises(mk.ParseError, match="line 1: expected 'program' or 'tasks'"):
        parse("")


def test_a_task_that_is_not_given():
    text, tasks = print_program(SMALL), [c.task for c in SMALL.calls()]
    with pytest.raises(mk.ParseError, match="no task down is given: gate_up") as error:
        parse(text, tasks[:1])
    assert "task down#down-digest columns" in str(error.value)
    assert "tasks=None for tasks without bodies" in str(error.value)
    with pytest.raises(mk.ParseError, match="no task gate_up is given: none"):
        parse(text, [])


def test_a_task_with_another_body():
    text, (first, second) = print_program(SMALL), [c.task for c in SMALL.calls()]
    with pytest.raises(mk.ParseError) as error:
        parse(text, [first, replace(second, digest="0123")])
    for words in (
        "task down#down-digest was printed from another body than the one that is "
        "given for it, 0123",
        "hint: use the code (and the JAX) that printed the text",
    ):
        assert words in str(error.value)


def test_a_task_of_other_shapes():
    text, (first, second) = print_program(SMALL), [c.task for c in SMALL.calls()]
    with pytest.raises(mk.ParseError) as error:
        parse(text, [first, replace(second, columns=9, long=64)])
    words = (
        "the task down#down-digest that is given differs from the text in columns: 9, "
        "not 4; "
        "long: 64, not 0"
    )
    assert words in str(error.value)


def test_planning_from_a_text_gives_the_same_plan():
    program = parse(print_program(programs.two_layers()))
    texts = [
        [stage.as_text() for stage in run_passes(p, H200)]
        for p in (program, programs.two_layers())
    ]
    assert texts[0] == texts[1]
