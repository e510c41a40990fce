"""One event per call: what the same tiles cost without fine dependences.

What it does: lets every task wait for all tasks of the calls that it needs a task of.
Needs: a TaskGraph with dependences.
Guarantees: every gate waits for what it needs and for whole calls (of one layer).
Why it is correct: more order never races. Tasks of a call are contiguous and need
tasks of earlier calls alone, so dependences still point to lower ids.
Why it is here: to measure and to teach what fine dependences are worth; a plan that is
to be fast has no use for it.
Cost: linear in the members of the DepSets.
Source: stage barriers as a baseline: Event Tensor; MPK.
"""

from dataclasses import replace

from mkdsl.lower.ir import DepSet, Need, TaskGraph


def coarsen(graph: TaskGraph) -> TaskGraph:
    """The graph whose tasks need whole calls."""
    runs: dict[tuple[int, int], list[int]] = {}
    for t, task in enumerate(graph.tasks):
        runs.setdefault((task.kind, task.layer), []).append(t)
    run_of = [(task.kind, task.layer) for task in graph.tasks]
    sets: dict[DepSet, int] = {}
    wide: list[tuple[int, ...]] = []
    for deps in graph.dep_sets:
        calls = sorted({run_of[m] for m in deps.members}, key=lambda r: runs[r][0])
        whole = (DepSet(tuple(runs[run]), deps.exact) for run in calls)
        wide.append(tuple(sets.setdefault(w, len(sets)) for w in whole))
    needs = tuple(
        tuple(
            dict.fromkeys(
                Need(deps, need.gate, need.why)
                for need in mine
                for deps in wide[need.deps]
            )
        )
        for mine in graph.needs
    )
    return replace(graph, dep_sets=tuple(sets), needs=needs)
