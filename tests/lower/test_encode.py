"""Instruction words: round trip, layout, ranges, and wrong words found."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.errors import PlanError, VerifyError
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.encode import BLOCK_WORDS, HEADER, decode, encode, instructions
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import Event, Schedule
from mkdsl.lower.machine import simulated
from mkdsl.lower.normalize import normalize
from mkdsl.lower.pipeline import Options, compile_program, prove_program
from mkdsl.lower.plan_pages import plan_pages
from mkdsl.lower.verify_plan import verify_encoded
from tests.lower import programs
from tests.lower.graphs import MACHINE, graphs, queues

PLAN = compile_program(
    programs.two_layers(),
    simulated(3),
    Options(DecomposeOptions(splits=(("down", 2),))),
)


@given(st.data(), graphs())
def test_round_trip(data, graph):
    events = normalize(fuse_events(graph))
    schedule = Schedule(events, data.draw(queues(len(graph.tasks))))
    plan = plan_pages(schedule, MACHINE)
    encoded = encode(plan)
    assert decode(encoded) == instructions(plan)
    verify_encoded(plan, encoded)


@pytest.mark.parametrize(
    "make", [programs.mlp, programs.attention, programs.two_layers]
)
def test_programs_round_trip(make):
    proof = prove_program(make(), simulated(3))
    assert decode(proof.encoded) == instructions(proof.plan)


def test_layout():
    encoded = encode(PLAN)
    assert encoded.stride == HEADER + 1
    assert {len(words) % BLOCK_WORDS for words in encoded.words} == {0}
    assert encoded.events == len(PLAN.schedule.events.events)
    for words, queue in zip(encoded.words, PLAN.schedule.queues, strict=True):
        assert set(words[len(queue) * encoded.stride : encoded.waits_at]) == {-1}
        for at in range(0, len(queue) * encoded.stride, encoded.stride):
            for first in (4, 6):
                offset, count = words[at + first : at + first + 2]
                assert encoded.waits_at <= offset <= len(words) - 2 * count


def test_tasks_with_the_same_waits_share_their_list():
    encoded = encode(PLAN)
    lists = {
        w for queue in instructions(PLAN) for i in queue for w in (i.stream, i.resident)
    }
    most = 2 * sum(map(len, lists))
    for words in encoded.words:
        assert set(words[encoded.waits_at + most :]) <= {-1}


def test_a_number_beyond_32_bits_is_refused():
    events = PLAN.schedule.events
    tasks = (replace(events.graph.tasks[0], layer=2**31), *events.graph.tasks[1:])
    graph = replace(events.graph, tasks=tasks)
    schedule = replace(PLAN.schedule, events=replace(events, graph=graph))
    with pytest.raises(PlanError, match="2147483648, which needs more than 32 bits"):
        encode(replace(PLAN, schedule=schedule))


def test_an_empty_queue_is_an_end():
    proof = prove_program(programs.mlp(d=64, i=64), simulated(4))
    assert () in decode(proof.encoded)


@pytest.mark.parametrize(
    ("word", "value", "words"),
    [
        (0, 1, "kind 1, not 0"),
        (0, -1, r"0 instructions|kind"),
        (1, 3, "layer 3, not 0"),
        (2, 9, "part 9, not 0"),
        (3, 77, "signal 77"),
        (8, 5, "grid"),
        (8, 2**31, "more than 32 bits"),
    ],
)
def test_a_wrong_word_is_found(word, value, words):
    encoded = encode(PLAN)
    first = list(encoded.words[0])
    first[word] = value
    bad = replace(encoded, words=(tuple(first), *encoded.words[1:]))
    with pytest.raises(VerifyError, match=words):
        verify_encoded(PLAN, bad)


def test_a_wrong_wait_is_found():
    encoded = encode(PLAN)
    first = list(encoded.words[0])
    first[encoded.waits_at + 1] += 1
    bad = replace(encoded, words=(tuple(first), *encoded.words[1:]))
    with pytest.raises(VerifyError, match="waits"):
        verify_encoded(PLAN, bad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"events": 1}, "1 counters for"),
        ({"waits_at": 9}, "lie on"),
        ({"words": ()}, "0 arrays"),
    ],
)
def test_a_wrong_header_is_found(change, words):
    with pytest.raises(VerifyError, match=words):
        verify_encoded(PLAN, replace(encode(PLAN), **change))


def test_a_counter_for_every_event():
    events = replace(PLAN.schedule.events, events=(Event((0,)),))
    plan = replace(PLAN, schedule=replace(PLAN.schedule, events=events))
    assert encode(plan).events == 1
