"""A timeline as a Chrome trace, which Perfetto and chrome://tracing show.

    trace ::= {"traceEvents": [metadata or complete event, ..], "displayTimeUnit": "ns"}

One process per SM, one thread per role, one complete event ("X") per span, times in us.
The critical path is a process of its own behind the last SM. Events of one thread
never overlap. Source: "Trace Event Format", Google, 2016.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdsl.runtime.agents import ROLES
from mkdsl.runtime.timeline import Span, Timeline

# Names of colours that trace viewers know.
COLOURS = {
    "wait": "terrible",
    "load": "thread_state_runnable",
    "compute": "good",
    "store": "thread_state_iowait",
}


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """The trace as a value that json can write."""
    return {
        "traceEvents": [*_names(timeline), *_spans(timeline), *_path(timeline)],
        "displayTimeUnit": "ns",
        "otherData": {"program": timeline.name, "source": timeline.source},
    }


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace to a file."""
    path.write_text(json.dumps(trace_of(timeline)), encoding="utf-8")


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for sm in range(timeline.sms):
        yield _name("process_name", sm, 0, f"SM {sm}")
        for tid, role in enumerate(ROLES):
            yield _name("thread_name", sm, tid, role)
    yield _name("process_name", timeline.sms, 0, "critical path")
    yield _name("thread_name", timeline.sms, 0, "tasks")


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for span in timeline.spans:
        run = timeline.runs[span.task]
        args: dict[str, Any] = {"task": span.task, "cause": span.cause}
        if span.event is not None:
            args["event"] = f"e{span.event}"
        if (
            span.event is not None
            and span.event == run.event
            and run.producer is not None
        ):
            args["held by"] = timeline.runs[run.producer].name
        yield {
            "ph": "X",
            "name": _title(span, run.name),
            "cat": span.cause,
            "cname": COLOURS[span.cause],
            "pid": span.sm,
            "tid": ROLES.index(span.role),
            "ts": span.start_ns / 1e3,
            "dur": span.ns / 1e3,
            "args": args,
        }


def _title(span: Span, name: str) -> str:
    return f"wait e{span.event}: {name}" if span.event is not None else name


def _path(timeline: Timeline) -> Iterator[dict[str, Any]]:
    begin = 0
    for run in timeline.critical_path():
        if run.signalled_ns <= begin:
            continue
        yield {
            "ph": "X",
            "name": run.name,
            "cat": "critical path",
            "pid": timeline.sms,
            "tid": 0,
            "ts": begin / 1e3,
            "dur": (run.signalled_ns - begin) / 1e3,
            "args": {"task": run.task, "SM": run.sm},
        }
        begin = run.signalled_ns
