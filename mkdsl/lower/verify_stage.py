"""Check a stage that no pass has made: one from a text.

What it does: everything that the pipeline checks on the way to the stage.
Needs: nothing.
Guarantees: of a Schedule and of a KernelPlan what verify.py proves, for the needs that
the accesses of the kinds have. Needs that a text leaves out are found, so that it does
not prove itself. That the kinds are those of the calls is not checked.
Why it is correct: find_dependences sees accesses and the order of tasks alone, and is
held against brute force by its tests.
Cost: that of find_dependences and of all verifiers.
"""

from collections.abc import Sequence
from dataclasses import replace

from mkdsl.errors import VerifyError
from mkdsl.lang.program import Program
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.encode import encode
from mkdsl.lower.ir import EventGraph, KernelPlan, Schedule, TaskGraph
from mkdsl.lower.machine import Machine
from mkdsl.lower.text_schedule import ranges_text
from mkdsl.lower.verify import task_name, verify_events
from mkdsl.lower.verify_graph import verify_program, verify_tasks
from mkdsl.lower.verify_plan import verify_encoded, verify_plan
from mkdsl.lower.verify_schedule import verify_schedule

# Members, gate, reason of a need.
type _Found = tuple[tuple[int, ...], str, str]
type AnyStage = Program | TaskGraph | EventGraph | Schedule | KernelPlan


def verify_stage(stage: AnyStage, machine: Machine) -> None:
    """Check a stage and all that it stands on.

    Raises:
        VerifyError: it is not well formed, may hang, may race or does not fit.
    """
    match stage:
        case Program():
            verify_program(stage)
        case TaskGraph():
            _verify_graph(stage)
            if stage.needs:
                _verify_needs(stage)
        case EventGraph():
            _verify_needs(_verify_graph(stage.graph))
            verify_events(stage)
        case Schedule():
            _verify_needs(_verify_graph(stage.events.graph))
            verify_schedule(stage, machine)
        case KernelPlan():
            verify_stage(stage.schedule, machine)
            verify_plan(stage, machine)
            verify_encoded(stage, encode(stage))


def _verify_graph(graph: TaskGraph) -> TaskGraph:
    """Check program, tasks and the form of the needs."""
    verify_program(graph.program)
    verify_tasks(replace(graph, dep_sets=(), needs=()))
    verify_tasks(graph)
    return graph


def _verify_needs(graph: TaskGraph) -> None:
    """Check that no need is left out."""
    found = find_dependences(replace(graph, dep_sets=(), needs=()))
    for task, (wanted, said) in enumerate(
        zip(_needs(found), _needs(graph), strict=True)
    ):
        missing = [
            need for need in wanted if need not in said and not _covered(need, said)
        ]
        if missing:
            members, gate, why = missing[0]
            raise VerifyError(
                "dependences",
                f"{task_name(graph, task)} needs {ranges_text(members)} before its "
                f"{gate} operands ({why}), which is not among its needs",
                graph.kinds[graph.tasks[task].kind].src,
                "print the stage again: its needs are those of its accesses",
            )


def _covered(need: _Found, said: Sequence[_Found]) -> bool:
    """True if more than a need was asked for: whole calls instead of tiles, say."""
    members, gate, why = need
    more = (set(m) for m, g, w in said if (g, w) == (gate, why))
    return set[int]().union(*more).issuperset(members)


def _needs(graph: TaskGraph) -> list[list[_Found]]:
    """The needs of each task, with the members instead of the number of a set."""
    every = graph.needs or ((),) * len(graph.tasks)
    return [
        [(graph.dep_sets[n.deps].members, n.gate, n.why) for n in needs]
        for needs in every
    ]
