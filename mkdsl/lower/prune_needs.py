"""Which needs of a task follow from its other needs.

What it does: returns graph.needs without the needs that the remaining ones imply.
Needs: a TaskGraph with dependences; members of a DepSet have lower ids than its users.
Guarantees: for every task and gate, what happens before the gate opens is the same
set of tasks as before; the result is minimal under dropping one need at a time.
Why it is correct: let done(D) be the members of D and everything before them (through
either gate: a member is done only after both of its gates). A gate with needs
D1, .., Dk opens after done(D1) | .. | done(Dk). D1 is dropped only if its members are
in the union of what remains, and done sets are closed under predecessors, so the union
does not shrink. Needs of the other gate do not count: the other loader made them.
Why before fusing: a residual connection reads one tile of x and an earlier norm all of
it. Unpruned, every tile is in a set of its own, and every reader of x waits for every
tile: 1.2 million waits for a step of Llama-3.1-8B instead of 41,000. normalize would
find the same graph in the end, after all pairs have been made.
Cost: one union of bitsets per distinct set of needs, tasks / 8 bytes each.
Source: Aho, Garey, Ullman, The transitive reduction of a directed graph (1972), on
sets of predecessors instead of single edges.
"""

from mkdsl.lower.bits import bitset, union
from mkdsl.lower.ir import GATES, Need, TaskGraph


def prune_needs(graph: TaskGraph) -> tuple[tuple[Need, ...], ...]:
    """The needs of each task that the others of the same gate do not imply."""
    closure = _Closure(graph)
    pruned: list[tuple[Need, ...]] = []
    for needs in graph.needs:
        kept: tuple[Need, ...] = ()
        given: frozenset[int] = frozenset()
        for gate in GATES:
            # A loader passes its gates in order: a later one has what came before.
            if gate == "stream":
                given = frozenset()
            mine = tuple(n for n in needs if n.gate == gate)
            kept += closure.reduced(mine, given)
            given |= {n.deps for n in mine}
        pruned.append(kept)
        closure.add_task(frozenset(need.deps for need in kept))
    return tuple(pruned)


class _Closure:
    """done(D) of every DepSet, computed when first asked and kept."""

    def __init__(self, graph: TaskGraph) -> None:
        self._members = tuple(d.members for d in graph.dep_sets)
        self._bits: dict[int, int] = {}
        self._done: dict[int, int] = {}
        # Few tasks differ in what they wait for: keep one bitset for each such set.
        self._groups: dict[frozenset[int], int] = {}
        self._group_of: list[int] = []
        self._before: list[int] = []
        self._memo: dict[tuple[frozenset[int], tuple[Need, ...]], tuple[Need, ...]] = {}

    def add_task(self, deps: frozenset[int]) -> None:
        """Record what comes before the next task."""
        group = self._groups.setdefault(deps, len(self._groups))
        if group == len(self._before):
            self._before.append(union(map(self._done_of, sorted(deps))))
        self._group_of.append(group)

    def reduced(
        self, needs: tuple[Need, ...], given: frozenset[int]
    ) -> tuple[Need, ...]:
        """The needs of one gate without those that the others imply.

        Args:
            given: DepSets that the same loader has waited for at earlier gates.
        """
        needs = _one_per_set(needs)
        if not needs or (len(needs) == 1 and not given):
            return needs
        if (given, needs) not in self._memo:
            self._memo[given, needs] = self._reduced(needs, given)
        return self._memo[given, needs]

    def _reduced(
        self, needs: tuple[Need, ...], given: frozenset[int]
    ) -> tuple[Need, ...]:
        kept = list(needs)
        # Earliest first, larger first: these are what later, smaller sets imply.
        order = sorted(
            needs,
            key=lambda n: (
                self._members[n.deps][-1],
                -len(self._members[n.deps]),
                n.deps,
            ),
        )
        for need in order:
            others = [*given, *(n.deps for n in kept if n is not need)]
            last = max((self._members[d][-1] for d in others), default=-1)
            if self._members[need.deps][-1] > last:
                continue
            implied = union(map(self._done_of, others))
            if not self._bits_of(need.deps) & ~implied:
                kept.remove(need)
        return tuple(kept)

    def _bits_of(self, deps: int) -> int:
        if deps not in self._bits:
            self._bits[deps] = bitset(self._members[deps])
        return self._bits[deps]

    def _done_of(self, deps: int) -> int:
        if deps not in self._done:
            groups = sorted({self._group_of[m] for m in self._members[deps]})
            before = (self._before[g] for g in groups)
            self._done[deps] = union(before, self._bits_of(deps))
        return self._done[deps]


def _one_per_set(needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """One need per DepSet, whatever the reasons for it."""
    return tuple({need.deps: need for need in reversed(needs)}.values())[::-1]
