"""Shared memory: formulas, budgets, refusals."""

from dataclasses import replace

import pytest

from mkdsl.errors import PlanError, VerifyError
from mkdsl.lang.program import Param
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.machine import H200, simulated
from mkdsl.lower.pages import dot_page, tile_bytes, vector_bytes
from mkdsl.lower.pipeline import Options, compile_program
from mkdsl.lower.plan_pages import (
    RESERVED_BYTES,
    PageOptions,
    param_bytes,
    plan_pages,
)
from mkdsl.lower.verify_plan import verify_plan
from tests.lower import programs

MACHINE = simulated(4)


def plan_of(program, machine=MACHINE, split=False, **pages):
    options = Options(DecomposeOptions(split=split), pages=PageOptions(**pages))
    return compile_program(program, machine, options)


@pytest.mark.parametrize(
    ("rows", "depth", "page"),
    [
        (64, 2048, (64, 256)),
        (64, 64, (64, 64)),
        (64, 65, (64, 128)),
        (1, 4096, (16, 1024)),
        (17, 4096, (32, 512)),
        (33, 4096, (64, 256)),
        # Pages of stacked pieces are full, or there are none.
        (16, 4096 + 64, (64, 256)),
        (16, 512, (32, 512)),
        (65, 4096, (128, 128)),
        (256, 4096, (256, 64)),
        (257, 4096, (320, 0)),
    ],
)
def test_page_of_a_dot(rows, depth, page):
    assert dot_page(rows, depth, 32768) == page


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (tile_bytes(8, 2048, "bfloat16"), 32768),
        (tile_bytes(1, 2048, "bfloat16"), 32768),
        (tile_bytes(9, 100, "bfloat16"), 16 * 128 * 2),
        (tile_bytes(8, 64, "float32"), 2048),
        (tile_bytes(8, 1, "float32"), 1024),
        (tile_bytes(512, 1, "float32"), 2048),
        (vector_bytes(2048, "bfloat16"), 4096),
        (vector_bytes(65, "float32"), 1024),
        (param_bytes(Param("n", (), "int32", "scalar")), 0),
        (param_bytes(Param("w", (64, 2048), "bfloat16", "stream")), 0),
        (param_bytes(Param("s", (1, 64), "float32", "vector")), 1024),
    ],
)
def test_bytes(size, expected):
    assert size == expected


def test_a_whole_task():
    plan = plan_of(programs.mlp(b=8, d=2048, i=256))
    gate_up, down = plan.kinds
    assert gate_up.pages == ((64, 256), (64, 256))
    assert gate_up.arena_bytes == 32768 + 4096  # x, scale
    assert gate_up.scratch_bytes == 32768  # norm(x)
    assert gate_up.staging_bytes == 1024
    assert down.arena_bytes == 4096 + 1024  # h, a tile of x
    assert down.scratch_bytes == 0
    assert plan.columns == 8
    assert (plan.arena_slots, plan.staging_slots) == (1, 1)
    assert plan.reserved_bytes == RESERVED_BYTES
    assert plan.smem_bytes == (
        RESERVED_BYTES
        + plan.instruction_bytes
        + 36864
        + 32768
        + 1024
        + plan.ring * 32768
    )
    assert plan.ring == 4
    assert plan.in_flight == 2


def test_a_split_task_and_its_combine():
    options = Options(DecomposeOptions(splits=(("down", 2), ("gate_up", 1))))
    plan = compile_program(programs.mlp(b=8, d=256, i=512), MACHINE, options)
    _, partial, combine = plan.kinds
    assert partial.pages == ((64, 256),)
    assert partial.arena_bytes == 4096  # half of h
    assert partial.staging_bytes == 2048  # a [64, 8] accumulator
    assert combine.pages == ()
    assert combine.arena_bytes == 1024 + 2 * 2048  # a tile of x, both accumulators
    assert combine.staging_bytes == 1024


def test_a_fold_and_its_combine():
    options = Options(DecomposeOptions(splits=(("attend", 2),)))
    plan = compile_program(programs.attention(d=64, s=512), MACHINE, options)
    partial, combine = plan.kinds
    assert partial.pages == ((128, 64),)
    assert partial.arena_bytes == 1024  # q
    assert partial.staging_bytes == 2048 + 1024 + 1024
    # Carries of both parts: [2, 64, 8], and [2, 32] twice, in whole KiB.
    assert combine.arena_bytes == 1024 + 2 * 1024 + 2 * 2048 + 1024 + 1024


def test_one_task_at_a_time_is_resident_and_pages_take_the_rest():
    plan = plan_of(programs.mlp())
    assert (plan.arena_slots, plan.staging_slots, plan.ring) == (1, 1, 6)
    assert plan_of(programs.mlp(), max_ring=3).ring == 3


def test_a_program_that_does_not_fit_prints_its_budget():
    program = programs.mlp(b=16, d=4096, i=256)
    with pytest.raises(PlanError) as error:
        plan_of(program)
    text = str(error.value)
    for words in (
        "program 'mlp' does not fit: 0 pages of shared memory are left",
        "at least 2 are needed",
        "shared memory of one SM          232448",
        "resident operands, 1 x           139264  gate_up (full) 139264, down",
        "computed operands                131072  gate_up (full) 131072",
        "left for pages",
        "programs.py:",
        "hint: smaller tiles",
    ):
        assert words in text, text


def test_its_good_twin_fits():
    assert plan_of(programs.mlp(b=8, d=2048, i=256)).ring >= 2


def test_a_fold_needs_a_page_for_each_operand():
    plan = plan_of(programs.attention())
    with pytest.raises(VerifyError, match=r"2 pages at once in a ring of 1|ring needs"):
        verify_plan(replace(plan, ring=1, in_flight=1), MACHINE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"smem_bytes": 1000}, "the parts have"),
        ({"ring": 100}, "the parts have"),
        ({"ring": 1}, "2 pages"),
        ({"in_flight": 9}, "loads in flight"),
        ({"arena_slots": 0}, "no slot for resident"),
        ({"staging_slots": 0}, "no slot for results"),
        ({"columns": 12}, "multiples of 8"),
        ({"columns": 0}, "8 columns, the plan has 0"),
        ({"arena_bytes": 4096}, r"'gate_up' \(full\): arena of 4096 bytes"),
        ({"scratch_bytes": 0}, "scratch of 0 bytes"),
        ({"staging_bytes": 8}, "staging of 8 bytes"),
        ({"page_bytes": 4096}, "slots of 4096"),
    ],
)
def test_a_wrong_plan_is_found(change, words):
    plan = plan_of(programs.mlp())
    verify_plan(plan, MACHINE)
    with pytest.raises(VerifyError, match=words):
        verify_plan(replace(plan, **change), MACHINE)


def test_a_page_that_is_too_narrow_is_found():
    plan = plan_of(programs.mlp())
    first = replace(plan.kinds[0], pages=((32, 256), (64, 256)))
    with pytest.raises(VerifyError, match="pages of 32 x 256 for 64 rows"):
        verify_plan(replace(plan, kinds=(first, plan.kinds[1])), MACHINE)


def test_a_smaller_machine_is_refused():
    plan = plan_of(programs.mlp())
    with pytest.raises(VerifyError, match=r"machine.smem_bytes=100000"):
        verify_plan(plan, replace(H200, smem_bytes=100_000))


@pytest.mark.parametrize("max_ring", [1, 33])
def test_ring_option_is_checked(max_ring):
    with pytest.raises(ValueError, match=f"max_ring={max_ring}"):
        PageOptions(max_ring=max_ring)


def test_plan_pages_alone_gives_the_same():
    plan = plan_of(programs.mlp())
    assert plan_pages(plan.schedule, MACHINE) == plan
