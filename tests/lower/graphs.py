"""Small graphs of tasks, and what comes before what, found by brute force."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from mkdsl.errors import SrcInfo
from mkdsl.lower.ir import (
    FETCH_GATES,
    GATES,
    MOST_BLOCKS,
    DepSet,
    EventGraph,
    Gate,
    Kind,
    Need,
    Schedule,
    Task,
    TaskGraph,
)
from mkdsl.lower.machine import simulated
from tests.lower import programs

Role = tuple[int, str]  # (task, "resident" | "stream" | "store")


def graph_of(tasks: list[list[tuple[tuple[int, ...], Gate]]]) -> TaskGraph:
    """A graph whose task t needs the given (members, gate)s; all one kind."""
    program = programs.mlp()
    # Its left side may come in blocks, so all gates are there.
    _, call = program.calls()
    kind = Kind(
        call.name,
        "full",
        1,
        call.task,
        (len(tasks),),
        tuple(range(len(call.ins))),
        call.ins,
        call.outs,
        SrcInfo(__file__, 1),
        blocks=MOST_BLOCKS,
    )
    ids: dict[tuple[int, ...], int] = {}
    needs = tuple(
        tuple(
            Need(ids.setdefault(members, len(ids)), gate, "RAW")
            for members, gate in needs
        )
        for needs in tasks
    )
    return TaskGraph(
        program,
        program.buffers,
        (kind,),
        tuple(Task(0, 0, (i,)) for i in range(len(tasks))),
        tuple(DepSet(members) for members in ids),
        needs,
    )


@st.composite
def graphs(draw: st.DrawFn, most: int = 14) -> TaskGraph:
    """Any graph; members are often drawn from few sets, as in real programs."""
    count = draw(st.integers(1, most))
    pool: list[tuple[int, ...]] = []
    tasks: list[list[tuple[tuple[int, ...], Gate]]] = []
    for task in range(count):
        needs: list[tuple[tuple[int, ...], Gate]] = []
        for _ in range(draw(st.integers(0, 3 if task else 0))):
            old = [members for members in pool if members[-1] < task]
            if old and draw(st.booleans()):
                members = draw(st.sampled_from(old))
            else:
                ids = st.sets(st.integers(0, task - 1), min_size=1, max_size=4)
                members = tuple(sorted(draw(ids)))
                pool.append(members)
            needs.append((members, draw(st.sampled_from(GATES))))
        tasks.append(needs)
    return graph_of(tasks)


def by_needs(graph: TaskGraph) -> dict[Role, frozenset[int]]:
    """Tasks that must be done before each gate of each task, from its needs."""
    edges = {
        (task, gate): {
            (m, "store")
            for need in needs
            if need.gate == gate
            for m in graph.dep_sets[need.deps].members
        }
        for task, needs in enumerate(graph.needs)
        for gate in GATES
    }
    return _closure(len(graph.tasks), edges)


def by_waits(
    events: EventGraph,
    queues: tuple[tuple[int, ...], ...] = (),
    roles: tuple[str, ...] = (*GATES, "store"),
) -> dict[Role, frozenset[int]]:
    """Tasks that are done before each gate of each task, from waits and queues.

    Args:
        roles: those that take the tasks of a queue in order.
    """
    edges: dict[Role, set[Role]] = {
        (task, gate): {
            (m, "store")
            for wait in waits
            if wait.gate == gate
            for m in events.events[wait.event].members
        }
        for task, waits in enumerate(events.waits)
        for gate in GATES
    }
    for queue in queues:
        for task, then in pairwise(queue):
            for role in roles:
                if role not in FETCH_GATES:
                    edges.setdefault((then, role), set()).add((task, role))
            if FETCH_GATES[0] in roles:
                edges[then, FETCH_GATES[0]].add((task, FETCH_GATES[-1]))
    return _closure(len(events.graph.tasks), edges)


def _closure(tasks: int, edges: dict[Role, set[Role]]) -> dict[Role, frozenset[int]]:
    before: dict[Role, set[Role]] = {}

    def visit(node: Role) -> set[Role]:
        if node not in before:
            direct = set(edges.get(node, ()))
            if node[1] == "store":
                direct |= {(node[0], gate) for gate in GATES}
            if node[1] in FETCH_GATES[1:]:
                # One loader passes them in order.
                earlier = FETCH_GATES[: FETCH_GATES.index(node[1])]
                direct |= {(node[0], gate) for gate in earlier}
            before[node] = direct.union(*(visit(other) for other in direct))
        return before[node]

    return {
        (task, gate): frozenset(t for t, role in visit((task, gate)) if role == "store")
        for task in range(tasks)
        for gate in GATES
    }


@st.composite
def queues(draw: st.DrawFn, tasks: int) -> tuple[tuple[int, ...], ...]:
    """Any distribution over a few SMs, each queue ascending."""
    sms = draw(st.integers(1, 4))
    at = draw(st.lists(st.integers(0, sms - 1), min_size=tasks, max_size=tasks))
    return tuple(tuple(t for t in range(tasks) if at[t] == sm) for sm in range(sms))


def covered(events: EventGraph, before: dict[Role, frozenset[int]]) -> bool:
    """True if every need of every task is in `before`."""
    graph = events.graph
    return all(
        before[task, need.gate].issuperset(graph.dep_sets[need.deps].members)
        for task, needs in enumerate(graph.needs)
        for need in needs
    )


def without_wait(events: EventGraph, task: int, index: int) -> EventGraph:
    """The graph with one wait less."""
    waits = list(events.waits)
    waits[task] = waits[task][:index] + waits[task][index + 1 :]
    return replace(events, waits=tuple(waits))


def all_waits(events: EventGraph) -> list[tuple[int, int]]:
    """(task, index) of every wait."""
    return [(t, i) for t, waits in enumerate(events.waits) for i in range(len(waits))]


def on_machine(events: EventGraph, queues: tuple[tuple[int, ...], ...]) -> Schedule:
    """A schedule with these queues."""
    return Schedule(events, queues)


MACHINE = simulated(4)
