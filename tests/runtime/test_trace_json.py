"""Traces are what Perfetto reads: the Trace Event Format, checked key by key."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from mkdsl.lower.machine import simulated
from mkdsl.runtime.agents import ROLES
from mkdsl.runtime.timeline import CAUSES, Timeline, from_stamps
from mkdsl.runtime.trace_json import write_trace
from mkdsl.runtime.virtual_time import simulate_stamps
from tests.runtime.small_programs import decode, plan_of

NUMBER = (int, float)
# "Trace Event Format" (Google, 2016), the two phases that are used: keys and types.
COMMON: dict[str, Any] = {"ph": str, "name": str, "pid": int, "tid": int, "args": dict}
KEYS = {"X": COMMON | {"cat": str, "ts": NUMBER, "dur": NUMBER}, "M": COMMON}
OPTIONAL = {"cname"}
METADATA = {"process_name", "thread_name"}


def faults(trace: Any) -> list[str]:
    """What of a trace is against the format."""
    found: list[str] = []
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("displayTimeUnit")
    for event in trace["traceEvents"]:
        keys = KEYS.get(event.get("ph"), {})
        if not keys or set(event) - set(keys) - OPTIONAL or set(keys) - set(event):
            found.append(f"keys of {event}")
        elif not all(isinstance(event[k], t) for k, t in keys.items()):
            found.append(f"types of {event}")
        elif event["ph"] == "M" and event["name"] not in METADATA:
            found.append(f"metadata {event}")
        elif event["ph"] == "X" and (event["ts"] < 0 or event["dur"] < 0):
            found.append(f"times of {event}")
    return found


def complete(trace: Any) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    plan = plan_of(decode(), sms=3)
    stamps = simulate_stamps(plan, simulated(3), {"lengths": 100})
    return from_stamps(plan, stamps, "simulator")


@pytest.fixture(scope="module")
def trace(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("traces") / "trace.json"
    write_trace(timeline, path)
    return json.loads(path.read_text())


def test_the_format(trace: Any) -> None:
    assert faults(trace) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ph": "Q"}, "keys of"),
        ({"dur": -1.0}, "times of"),
        ({"ts": "0"}, "types of"),
        ({"colour": "red"}, "keys of"),
    ],
)
def test_a_trace_against_the_format_is_found(
    trace: Any, change: dict[str, Any], words: str
) -> None:
    event = complete(trace)[0] | change
    (fault,) = faults({"displayTimeUnit": "ns", "traceEvents": [event]})
    assert fault.startswith(words)


def test_every_span_is_in_the_trace(trace: Any, timeline: Timeline) -> None:
    spans = [e for e in complete(trace) if e["pid"] < timeline.sms]
    assert len(spans) == len(timeline.spans)
    for event, span in zip(spans, timeline.spans, strict=True):
        assert (event["pid"], ROLES[event["tid"]]) == (span.sm, span.role)
        assert event["ts"] * 1e3 == pytest.approx(span.start_ns)
        assert event["dur"] * 1e3 == pytest.approx(span.ns)
        assert event["cat"] == span.cause
    assert {e["cat"] for e in spans} == set(CAUSES)
    waits = [e for e in spans if e["cat"] == "wait"]
    assert all(e["args"]["event"].startswith("e") for e in waits)
    assert any("held by" in e["args"] for e in waits)


def test_events_of_one_thread_do_not_overlap(trace: Any) -> None:
    key = lambda e: (e["pid"], e["tid"])  # noqa: E731
    events = sorted(complete(trace), key=lambda e: (*key(e), e["ts"]))
    for _, group in itertools.groupby(events, key):
        for a, b in itertools.pairwise(group):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6


def test_processes_and_threads_have_names(trace: Any, timeline: Timeline) -> None:
    named = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    }
    assert named["process_name", 2, 0] == "SM 2"
    assert named["thread_name", 1, 3] == "storer"
    assert named["process_name", 3, 0] == "critical path"
    used = {(e["pid"], e["tid"]) for e in complete(trace)}
    assert used <= {(pid, tid) for what, pid, tid in named if what == "thread_name"}


def test_the_critical_path_reaches_from_start_to_end(
    trace: Any, timeline: Timeline
) -> None:
    path = [e for e in complete(trace) if e["pid"] == timeline.sms]
    assert path[0]["ts"] == 0
    for a, b in itertools.pairwise(path):
        assert a["ts"] + a["dur"] == pytest.approx(b["ts"])
    assert path[-1]["ts"] + path[-1]["dur"] == pytest.approx(timeline.end_ns / 1e3)
