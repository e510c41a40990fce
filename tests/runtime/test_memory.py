"""Blocks against numpy masks, cells, slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.errors import VerifyError
from mkdsl.lang.expr import expr, read, var
from mkdsl.lang.program import Access, Axis, Buffer, Program
from mkdsl.lower.ir import EventGraph, KernelPlan, Schedule, TaskGraph
from mkdsl.runtime.barriers import Counter, Slot
from mkdsl.runtime.memory import Memory, block_of, contiguous_unit

SHAPE = (4, 6)


def memory_of(role: str = "state") -> Memory:
    buffer = Buffer("a", SHAPE, "float32", role)
    program = Program("p", (buffer,), ("a",), (), ())
    graph = TaskGraph(program, program.buffers, (), ())
    schedule = Schedule(EventGraph(graph, (), (), ()), ())
    plan = KernelPlan(schedule, (), 8, 1024, 2, 1, 0, 1, 0, 0, 1, 0)
    return Memory(plan, [np.arange(24, dtype=np.float32).reshape(SHAPE) + 1])


@st.composite
def axes(draw: st.DrawFn) -> tuple[Axis, Axis]:
    def one(dim: int) -> Axis:
        extent = draw(st.none() | st.integers(-2, dim + 2))
        start, size = draw(st.integers(0, dim + 1)), draw(st.integers(1, dim + 2))
        return Axis(expr(start), size, extent=None if extent is None else expr(extent))

    return one(SHAPE[0]), one(SHAPE[1])


def positions(axis: Axis, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the elements of a block, and which of them are real."""
    at = int(axis.start) + np.arange(axis.size)
    size = axis.size if axis.extent is None else int(axis.extent)
    return at, (at < dim) & (np.arange(axis.size) < size)


@given(axes())
def test_load_and_store_follow_the_masks(pair):
    memory = memory_of()
    before = memory.arrays["a"].copy()
    (rows, real_rows), (cols, real_cols) = map(positions, pair, SHAPE)
    real = real_rows[:, None] & real_cols
    padded = np.pad(before, ((0, 8), (0, 10)))
    expected = np.where(real, padded[np.ix_(rows, cols)], 0)
    block = block_of(Access("a", SHAPE, pair), {}, memory.scalar)
    np.testing.assert_array_equal(memory.load(block), expected)
    assert block.extents == (real_rows.sum(), real_cols.sum())
    assert block.is_empty == (not real.any())
    memory.store(block, np.full(block.shape, -1, np.float32))
    padded[np.ix_(rows[real_rows], cols[real_cols])] = -1
    np.testing.assert_array_equal(memory.arrays["a"], padded[:4, :6])


@given(axes(), st.integers(0, 1), st.data())
def test_narrow_is_a_slice_of_the_block(pair, axis, data):
    memory = memory_of()
    block = block_of(Access("a", SHAPE, pair), {}, memory.scalar)
    first = data.draw(st.integers(0, block.shape[axis] - 1))
    size = data.draw(st.integers(1, block.shape[axis] - first))
    index = [slice(None), slice(None)]
    index[axis] = slice(first, first + size)
    part = memory.load(block.narrow(axis, first, size))
    np.testing.assert_array_equal(part, memory.load(block)[tuple(index)])


def test_squeezed_axes_views_and_variables():
    memory = memory_of()
    access = Access(
        "a",
        (4, 2, 3),
        (Axis(var("g0"), 1, True), Axis(expr(0), 2), Axis(var("part") * 2, 2)),
    )
    block = block_of(access, {"g0": 1, "part": 1}, memory.scalar)
    assert str(block) == "a[1:2, 0:2, 2:3]"
    np.testing.assert_array_equal(memory.load(block), [[9, 0], [12, 0]])


def test_cells_are_the_runs_that_all_accesses_respect():
    def unit(*accesses: tuple[Axis, ...]) -> int:
        return contiguous_unit([Access("a", (8, 96), axes) for axes in accesses], 768)

    rows, whole = Axis(var("g0") * 2, 2), Axis(expr(0), 96)
    assert unit((rows, whole)) == 192
    assert unit((rows, whole), (Axis(expr(0), 8), Axis(var("g0") * 32, 32))) == 32
    assert unit((rows, Axis(var("g0") * 64, 64))) == 32
    assert unit((Axis(read("n", 0), 1), whole)) == 96
    assert unit((Axis(expr(0), 8, extent=read("n", 0)), whole)) == 96
    assert unit((rows, Axis(read("n", 0), 4))) == 1


def test_a_slot_in_use_cannot_be_filled_and_a_freed_one_is_poisoned():
    slot = Slot("page slot 3 of SM 1")
    value, number = np.ones(4, np.float32), np.ones(4, np.int32)
    slot.fill(0, value)
    slot.fill(1, number)
    with pytest.raises(VerifyError, match="page slot 3 of SM 1 is filled again"):
        slot.fill(0, value)
    slot.release()
    assert np.isnan(value).all()
    assert (number == 2**31 - 1).all()
    slot.fill(0, value)


def test_a_counter_hands_over_what_the_first_k_knew():
    counter = Counter("e0", lambda agent: None)
    counter.signal(np.array([3, 0]))
    counter.signal(np.array([1, 5]))
    first, both = np.array([0, 1]), np.array([0, 0])
    counter.acquire(1, first)
    counter.acquire(2, both)
    assert first.tolist() == [3, 1]
    assert both.tolist() == [3, 5]
