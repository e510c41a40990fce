"""Waits that the same loader of the same SM has already made.

What it does: drops them.
Needs: a Schedule whose queues are ascending in task ids.
Guarantees: what happens before each gate of each task is unchanged; events, signals and
queues are untouched.
Why it is correct: a loader handles the tasks of its queue in order, so whatever it has
waited for once is complete for good (counters only rise). It has also seen whatever
those events imply. An event implies more now than before scheduling: its members signal
after everything that the earlier tasks of their queues waited for, because consumer and
storer, too, work in queue order. Waits of the other loader do not count, and neither
does the mere order of two tasks in one queue: the loaders run ahead of the storer.
Cost: a bitset (a bit per event) per event and per loader.
Source: vector clocks (Fidge 1988; Mattern 1989), with one bit per event as the clock.
"""

from dataclasses import replace

from mkdsl.lower.bits import union
from mkdsl.lower.ir import GATES, Loader, Schedule, Wait, loader_of


def elide_waits(schedule: Schedule) -> Schedule:
    """The schedule without repeated waits."""
    events = schedule.events
    sm_of = {t: sm for sm, queue in enumerate(schedule.queues) for t in queue}
    known = [0] * len(events.events)
    seen: dict[tuple[int, Loader], int] = {}
    kept: list[tuple[Wait, ...]] = []
    # Ascending ids: members of an event come before the tasks that wait for it.
    for task, waits in enumerate(events.waits):
        sm, mine = sm_of[task], ()
        for gate in GATES:
            # Gates of one loader follow each other: a block knows what came before it.
            loader = loader_of(gate)
            before = seen.get((sm, loader), 0)
            asked = tuple(w for w in waits if w.gate == gate)
            implied = union((known[w.event] for w in asked), before)
            seen[sm, loader] = union((1 << w.event for w in asked), implied)
            mine += tuple(w for w in asked if not implied >> w.event & 1)
        kept.append(mine)
        if events.signals[task] >= 0:
            both = seen[sm, "resident"] | seen[sm, "stream"]
            known[events.signals[task]] |= both
    return Schedule(replace(events, waits=tuple(kept)), schedule.queues)
