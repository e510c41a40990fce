"""Positions for a graph of a few dozen nodes: ranks from top to bottom.

Nodes get the rank of their longest path; edges over several ranks go through a dummy
in each rank between, so that no edge crosses a node; inside a rank nodes are ordered by
the mean position of their neighbours, sweeping down and up.
Source: Sugiyama, Tagawa and Toda, Methods for visual understanding of hierarchical
system structures (1981). networkx ranks the nodes; it has no such layout itself.
"""

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

SWEEPS = 12
Node = Hashable


@dataclass(frozen=True, slots=True)
class Layout:
    """Where nodes are.

    Attributes:
        at: node -> (x, rank); x of the nodes of a rank are spread around 0.
        bends: edge -> the points between its ends.
        ranks: how many.
        width: nodes and dummies of the widest rank.
    """

    at: dict[Node, tuple[float, int]]
    bends: dict[tuple[Node, Node], list[tuple[float, int]]]
    ranks: int
    width: int


def layered(graph: Any, dummy: float = 0.35) -> Layout:
    """Lay a directed acyclic networkx graph out.

    Args:
        dummy: width of a dummy, where a node has 1.
    """
    import networkx as nx

    rank: dict[Any, int] = {}
    for level, nodes in enumerate(nx.topological_generations(graph)):
        rank |= dict.fromkeys(nodes, level)
    rows: list[list[Any]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for node in graph.nodes:
        rows[rank[node]].append(node)
    links: list[tuple[Any, Any]] = []
    chains: dict[tuple[Any, Any], list[Any]] = {}
    for a, b in graph.edges:
        chain = [(a, b, level) for level in range(rank[a] + 1, rank[b])]
        for one in chain:
            rows[one[2]].append(one)
        chains[a, b] = chain
        points = [a, *chain, b]
        links += itertools.pairwise(points)
    real = set(graph.nodes)
    _order(rows, links)
    at: dict[Any, tuple[float, int]] = {}
    for level, row in enumerate(rows):
        sizes = [1.0 if node in real else dummy for node in row]
        left = -sum(sizes) / 2
        for node, size in zip(row, sizes, strict=True):
            at[node] = left + size / 2, level
            left += size
    bends = {edge: [at[one] for one in chain] for edge, chain in chains.items()}
    width = max((_width(row, real, dummy) for row in rows), default=1)
    return Layout({n: at[n] for n in graph.nodes}, bends, len(rows), width)


def _width(row: list[Any], real: set[Any], dummy: float) -> int:
    return round(sum(1.0 if node in real else dummy for node in row) + 0.49)


def _order(rows: list[list[Any]], links: list[tuple[Any, Any]]) -> None:
    """Sort each row by the mean place of its neighbours, down and up in turn."""
    above: dict[Any, list[Any]] = {}
    below: dict[Any, list[Any]] = {}
    for a, b in links:
        below.setdefault(a, []).append(b)
        above.setdefault(b, []).append(a)
    for sweep in range(SWEEPS):
        near, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        for before, row in itertools.pairwise(order):
            place = {node: i - len(before) / 2 for i, node in enumerate(before)}
            mean: dict[Any, float] = {}
            for i, node in enumerate(row):
                found = [place[n] for n in near.get(node, ()) if n in place]
                mean[node] = sum(found) / len(found) if found else i - len(row) / 2
            row.sort(key=mean.__getitem__)
