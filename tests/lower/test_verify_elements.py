"""Elements that are written twice, or read and never written, against masks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import expr
from mkdsl.lang.program import Access, Axis
from mkdsl.lower.decompose import decompose
from mkdsl.lower.ir import TaskGraph
from mkdsl.lower.machine import simulated
from mkdsl.lower.verify_elements import verify_elements
from tests.lower.programs import mlp

GRAPH = decompose(mlp(), simulated(3))
# h is bf16[8, 512]; the same elements in other views.
VIEWS = ((8, 512), (4096,), (2, 4, 512), (8, 8, 64))


@st.composite
def boxes(draw: st.DrawFn) -> Access:
    view = draw(st.sampled_from(VIEWS))
    axes: list[Axis] = []
    for n in view:
        start = draw(st.sampled_from((0, n // 2, n // 4)))
        size = draw(st.sampled_from((n // 4, n // 2, n)))
        axes.append(Axis(expr(start), max(size, 1)))
    return Access("h", view, tuple(axes))


def mask(access: Access) -> np.ndarray:
    """int [4096], 1 for the elements of a box, as far as they exist."""
    whole = np.zeros(access.view, int)
    whole[
        tuple(
            slice(int(a.start.constant), int(a.start.constant) + a.size)
            for a in access.axes
        )
    ] = 1
    return whole.reshape(-1)


def graph_of(writes: list[Access], reads: list[Access]) -> TaskGraph:
    """One task for each access; it touches h in that box alone."""
    writer, reader = GRAPH.kinds[0], GRAPH.kinds[-1]
    at = next(n for n, a in enumerate(reader.ins) if a.buffer == "h")
    kinds = [replace(writer, ins=writer.ins, outs=(box,)) for box in writes]
    kinds += [
        replace(reader, ins=(*reader.ins[:at], box, *reader.ins[at + 1 :]), outs=())
        for box in reads
    ]
    one = replace(GRAPH.tasks[0], pid=(0,))
    tasks = tuple(replace(one, kind=k) for k in range(len(kinds)))
    return replace(GRAPH, kinds=tuple(kinds), tasks=tasks)


@given(st.lists(boxes(), min_size=1, max_size=4), st.lists(boxes(), max_size=2))
def test_it_finds_what_masks_find(writes: list[Access], reads: list[Access]) -> None:
    written = sum(map(mask, writes), start=np.zeros(4096, int))
    twice = (written > 1).any()
    missing = any((mask(box) > written).any() for box in reads)
    graph = graph_of(writes, reads)
    if not twice and not missing:
        verify_elements(graph)
        return
    words = "is written by" if twice else "are written"
    with pytest.raises(VerifyError, match=words):
        verify_elements(graph)
