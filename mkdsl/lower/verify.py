"""The synchronisation model, and the proof that a schedule obeys it.

The machine. One persistent CTA runs on each SM. It has a queue of tasks and four roles,
each a warpgroup that handles the tasks of the queue in order and never goes back:
the weight loader makes the `stream` waits of a task, then fills pages with its streamed
operands; the activation loader makes the `resident` waits, then loads the other
operands; the consumer starts a task when both loaders have handed it over (also a
task for which a loader had nothing to do) and runs its body; the storer writes the
results and then signals. Roles of one SM pass on pages, arena slots and staging slots
through barriers in shared memory; a loader runs ahead of the consumer as far as free
slots allow. SMs see each other only through counters in global memory, zero when the
kernel starts, one per event. A signal raises a counter by one, with release order,
after every store that this storer has made so far is complete; a wait spins until its
counter is at least its threshold, with acquire order.

What is known. Write a -> b if a is visible wherever b runs. There are three sources:
  (1) queue order inside one role: its actions on earlier tasks come before those on
      later ones;
  (2) hand-over inside one task: loads -> body -> stores -> signal;
  (3) counters: all signals of an event -> a wait for it at full threshold.
Happens-before is their transitive closure. Two things do NOT follow. A wait of one
loader says nothing to the other loader of the same task, so every need names its gate.
And a task that comes later in a queue may load before an earlier one has stored: the
order of two tasks in one queue orders each role with itself, not the earlier store with
the later load, so an edge inside one SM needs its counter too. A wait below the full
threshold (the first k of n) says nothing about any single member.

Blocks. The activation loader passes the gates of a task in order (the operands that
are whole, then block after block of one that comes in blocks), so a later gate knows
what an earlier one waited for; the consumer has passed all of them when a task stores.

Deadlock-freedom. (a) Every awaited event is signalled exactly as often as its threshold
says: members are distinct, each signals once, no wait asks for more. (b) Queue order
and waits together have no cycle, so there is a linear extension. (c) All CTAs are
co-resident: there are at most as many queues as SMs. Then take the first unfinished
task of the extension: everything before it in its queue is finished, so no slot of the
ring, arena or staging is held by another task for good (loaders serve tasks in
order, and the ring holds at least the pages of one step), and every event that it waits
for is complete, so it finishes.

Race-freedom. Every need (this task after those tasks, before it loads that gate; found
by overlap of regions) is in happens-before at that gate. Stores come after both gates
of their task, so overwriting after readers is covered by the same rule.

How it is checked. Before scheduling there are no queues: rules (2) and (3) alone, with
a set of tasks per event. After scheduling, along a linear extension: a set of tasks for
every role of every SM, those whose stores it sees; a storer's set grows by its own
task at each step, an event's by the sets of the storers that signal it, a loader's by
the events that it waits for. Neither shares code with a pass, and both check the needs
that `dependences` found, not what a pass made of them. Whether those needs are all is
not taken for granted: verify_accesses.py checks the final schedule once more against
what its tasks read and write, verify_kinds.py that they do what the program says.

Cost: a few unions of bitsets (tasks / 8 bytes) per wait, signal and need.
Source: Lamport (1978); Fidge (1988) and Mattern (1989) for what a process knows; PTX
ISA, memory consistency model, for release and acquire at gpu scope; the hand-offs
measured in gpu_facts.md, where a relaxed signal after a completed store was a race.
"""

from collections.abc import Iterable
from typing import NoReturn

from mkdsl.errors import VerifyError
from mkdsl.lower.ir import GATES, DepSet, EventGraph, Gate, Need, TaskGraph, Wait

_BROKEN = {
    "RAW": "reads what it writes",
    "WAR": "overwrites what it reads",
    "WAW": "overwrites what it writes",
}
INTERNAL = "a fault of mkdsl: please report it with the text of this stage"


def task_name(graph: TaskGraph, task: int) -> str:
    """A task for a message: id, call, mode, layer, grid point, part."""
    t = graph.tasks[task]
    kind = graph.kinds[t.kind]
    mode = "" if kind.mode == "full" else f" {kind.mode} {t.part} of {kind.parts}"
    pid = ", ".join(map(str, t.pid))
    return f"task t{task} '{kind.call}'{mode} layer {t.layer} pid ({pid})"


def verify_events(events: EventGraph) -> None:
    """Check counters, thresholds, order and every need of an EventGraph.

    Raises:
        VerifyError: it may hang or race.
    """
    check_counters("events", events)
    graph = events.graph
    done = [0] * len(events.events)
    required = MemberBits(graph.dep_sets)
    proved: set[tuple[tuple[Wait, ...], Need]] = set()
    memo: dict[tuple[Wait, ...], dict[str, int]] = {}
    for task, waits in enumerate(events.waits):
        for wait in waits:
            last = events.events[wait.event].members[-1]
            if last >= task:
                fail(
                    events,
                    task,
                    f"deadlock: {task_name(graph, task)} waits for e{wait.event}, "
                    f"which {task_name(graph, last)} signals, not before it",
                    remedy="a task waits for tasks of lower ids alone",
                )
        if waits not in memo:
            memo[waits] = _at_gates(waits, done)
        before = memo[waits]
        for need in graph.needs[task] if graph.needs else ():
            if (waits, need) in proved:
                continue
            missing = required[need.deps] & ~before[need.gate]
            if missing:
                first = (missing & -missing).bit_length() - 1
                fail_race("events", events, task, need, first)
            proved.add((waits, need))
        if events.signals[task] >= 0:
            done[events.signals[task]] |= _union(before.values()) | 1 << task


def _at_gates(waits: tuple[Wait, ...], done: list[int]) -> dict[str, int]:
    """Per gate the tasks that are done before it opens; a loader's gates in order."""
    before: dict[str, int] = {}
    known = 0
    for gate in GATES:
        known = 0 if gate == "stream" else known
        known |= _union(done[w.event] for w in waits if w.gate == gate)
        before[gate] = known
    return before


def check_counters(stage: str, events: EventGraph) -> None:
    tasks = len(events.graph.tasks)
    if not tasks == len(events.signals) == len(events.waits):
        raise VerifyError(
            stage,
            f"{tasks} tasks, {len(events.signals)} signals, {len(events.waits)} waits",
            hint=INTERNAL,
        )
    signals = [-1] * tasks
    for number, event in enumerate(events.events):
        members = event.members
        if not members or list(members) != sorted(set(members)):
            raise VerifyError(
                stage,
                f"event e{number}: members {members} are not distinct and ascending",
                hint=hint_of("list each task that signals it once"),
            )
        for member in members:
            if not 0 <= member < tasks or signals[member] >= 0:
                raise VerifyError(
                    stage,
                    f"event e{number}: member t{member} "
                    "does not exist or signals another event as well",
                    hint=hint_of("a task signals one event: let its waiters share it"),
                )
            signals[member] = number
    for task, (said, meant) in enumerate(zip(events.signals, signals, strict=True)):
        if said != meant:
            fail(
                events,
                task,
                f"{task_name(events.graph, task)} signals e{said} "
                f"but is a member of e{meant} (-1: of none)",
                stage,
                "an event counts the signals of its members, each once: let the line "
                "of the task and the list of the event agree",
            )
    for waits in dict.fromkeys(events.waits):
        _check_thresholds(stage, events, waits)


def _check_thresholds(stage: str, events: EventGraph, waits: tuple[Wait, ...]) -> None:
    for wait in waits:
        known = 0 <= wait.event < len(events.events)
        members = len(events.events[wait.event].members) if known else 0
        if wait.threshold == members and wait.gate in GATES:
            continue
        task = events.waits.index(waits)
        whole = f"let t{task} wait for e{wait.event}>={members}"
        if not known:
            text = f"{task_name(events.graph, task)} waits for e{wait.event}: no event"
            whole = f"events are e0 to e{len(events.events) - 1}"
        elif wait.threshold > members:
            text = (
                f"event e{wait.event}: {task_name(events.graph, task)} waits for "
                f"{wait.threshold} signals but only {members} tasks signal it: "
                "deadlock"
            )
        else:
            text = (
                f"event e{wait.event}: {task_name(events.graph, task)} waits for "
                f"{wait.threshold} of {members} signals: any of them may come first, "
                "so no one of them is known to have come: race"
            )
            whole += ", or give the tasks that it needs an event of their own"
        fail(events, task, text, stage, whole)


def fail_race(
    stage: str, events: EventGraph, task: int, need: Need, missing: int
) -> NoReturn:
    graph = events.graph
    sure = "" if graph.dep_sets[need.deps].exact else " (or may: not decided)"
    fail(
        events,
        task,
        f"race: {task_name(graph, task)} {_BROKEN[need.why]}{sure}, "
        f"{task_name(graph, missing)}, but the loader of its {need.gate} operands "
        "does not wait for that task",
        stage,
        remedy_of(events, task, need.gate, missing),
    )


def remedy_of(events: EventGraph, task: int, gate: Gate, missing: int) -> str:
    """What to change so that a gate of a task waits for another task."""
    event = events.signals[missing]
    if event < 0:
        return f"let t{missing} signal an event, and t{task} wait for it at {gate}"
    wait = f"e{event}>={events.events[event].threshold} {gate}"
    if any(w.event == event for w in events.waits[task]):
        return f"let t{task} 'wait {wait}': each gate needs a wait of its own"
    return (
        f"let t{task} 'wait {wait}': neither the order of a queue nor a wait of the "
        "other loader of its SM orders this load"
    )


def fail(
    events: EventGraph, task: int, what: str, stage: str = "events", remedy: str = ""
) -> NoReturn:
    """Raise a VerifyError about a task; the remedy is for plans made by hand."""
    src = events.graph.kinds[events.graph.tasks[task].kind].src
    raise VerifyError(stage, what, src, hint_of(remedy))


def hint_of(remedy: str) -> str:
    """What to do about a stage that is refused."""
    return f"{remedy}. If mkdsl made it, it is {INTERNAL}" if remedy else INTERNAL


class MemberBits:
    """The members of each DepSet as a bitset, made when asked."""

    def __init__(self, dep_sets: tuple[DepSet, ...]) -> None:
        self._dep_sets = dep_sets
        self._bits: dict[int, int] = {}

    def __getitem__(self, deps: int) -> int:
        if deps not in self._bits:
            self._bits[deps] = sum(1 << m for m in self._dep_sets[deps].members)
        return self._bits[deps]


def _union(sets: Iterable[int]) -> int:
    total = 0
    for bits in sets:
        total |= bits
    return total
