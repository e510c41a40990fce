"""The smallest equivalent EventGraph.

What it does: drops waits that another wait of the same gate implies, joins events that
always appear together, removes events that nobody waits for, numbers the rest.
Needs: an EventGraph whose waits point to events with lower task ids, at full
thresholds.
Guarantees: what happens before each gate of each task is unchanged; event ids are
dense, in the order of their first members; running it again changes nothing.
Why it is correct: known(e) is every event that is complete when e is. A member of e
signals after its stores, hence after both its loaders' waits, so known(e) is the union
over members of the events that they wait for through EITHER gate, and of what those
know. A gate that waits for e need not wait for known(e). It must keep a wait that only
the other gate implies, because the two gates are held by different loaders. Joining two
events with the same waiters keeps what every waiter waits for, as each waited for both.
One round is enough: an event implied after a join was implied before it.
Cost: one union of bitsets (a bit per event) per distinct list of waits.
Source: Aho, Garey, Ullman (1972) for the unique reduction of an acyclic relation.
"""

from collections.abc import Iterable

from mkdsl.lower.bits import union
from mkdsl.lower.ir import GATES, Event, EventGraph, Wait

Waits = tuple[Wait, ...]


def normalize(graph: EventGraph) -> EventGraph:
    """The reduced graph with canonical event ids."""
    known = known_events(graph)
    reduced = {waits: _reduce(waits, known) for waits in dict.fromkeys(graph.waits)}
    waits = [reduced[w] for w in graph.waits]
    new_id, events = _join(graph, waits)
    renamed = {w: _rename(w, new_id, events) for w in dict.fromkeys(waits)}
    return EventGraph(
        graph.graph,
        events,
        tuple(new_id.get(event, -1) for event in graph.signals),
        tuple(renamed[w] for w in waits),
    )


def known_events(graph: EventGraph) -> list[int]:
    """Per event, the bitset of events that are complete whenever it is."""
    known = [0] * len(graph.events)
    # Whatever a member waits for has lower ids than the member.
    for e in sorted(range(len(known)), key=lambda e: graph.events[e].members[-1]):
        waits = dict.fromkeys(graph.waits[m] for m in graph.events[e].members)
        before = {w.event for waits_of_one in waits for w in waits_of_one}
        known[e] = union(known[b] | 1 << b for b in before)
    return known


def _reduce(waits: Waits, known: list[int]) -> Waits:
    kept: list[Wait] = []
    given = 0
    for gate in GATES:
        # A loader passes its gates in order: a later one has what came before.
        if gate == "stream":
            given = 0
        mine = [w for w in waits if w.gate == gate]
        implied = union((known[w.event] for w in mine), given)
        given = union((1 << w.event for w in mine), implied)
        kept += [w for w in mine if not implied >> w.event & 1]
    return tuple(kept)


def _join(
    graph: EventGraph, waits: list[Waits]
) -> tuple[dict[int, int], tuple[Event, ...]]:
    """New id of each event that is waited for, and the new events."""
    waiters: dict[int, list[tuple[int, str]]] = {}
    for group, distinct in enumerate(dict.fromkeys(waits)):
        for w in distinct:
            waiters.setdefault(w.event, []).append((group, w.gate))
    joined: dict[tuple[tuple[int, str], ...], list[int]] = {}
    for event, who in waiters.items():
        joined.setdefault(tuple(who), []).append(event)
    groups = [
        (sorted(m for e in group for m in graph.events[e].members), group)
        for group in joined.values()
    ]
    groups.sort(key=lambda g: g[0][0])
    new_id = {event: i for i, (_, group) in enumerate(groups) for event in group}
    return new_id, tuple(Event(tuple(members)) for members, _ in groups)


def _rename(waits: Waits, new_id: dict[int, int], events: tuple[Event, ...]) -> Waits:
    renamed = (Wait(new_id[w.event], 0, w.gate) for w in waits)
    return tuple(
        Wait(w.event, events[w.event].threshold, w.gate) for w in _sorted(renamed)
    )


def _sorted(waits: Iterable[Wait]) -> list[Wait]:
    return sorted(set(waits), key=lambda w: (GATES.index(w.gate), w.event))
