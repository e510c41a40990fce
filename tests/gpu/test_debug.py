"""A debug build of a plan that hangs says who waits for what, and the process goes on.

Nothing here can block: if a wait were not bounded, the timeout would end the process.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.emit.kernel import Launcher
from mkdsl.lower.hang import ROLES, TIMEOUT_NS
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import H200
from mkdsl.lower.pipeline import compile_program
from tests.gpu.blocked import HANGS, blocked, without_waits
from tests.gpu.codebook import example, plain_recall, recall

Array = Any
Hang = Callable[[KernelPlan], KernelPlan]

# As in test_other_program.py: bf16 values around 1.
TOLERANCE = 0.02
# Of a launch that hangs, compilation aside; two waits one after the other and a margin.
MOST_SECONDS = 5 * TIMEOUT_NS * 1e-9

pytestmark = pytest.mark.timeout(90, method="thread")


@functools.cache
def good_plan() -> KernelPlan:
    program = mk.megakernel(recall).trace(*jax.eval_shape(example)).program
    return compile_program(program, H200)


def check(results: Any) -> None:
    """The results of the program are right."""
    nearest, r, trace = results
    codes, exact_r, exact_trace = plain_recall(*example())
    assert nearest.tolist() == codes.tolist()
    np.testing.assert_allclose(r.astype(jnp.float32), exact_r, atol=TOLERANCE)
    np.testing.assert_allclose(trace.astype(jnp.float32), exact_trace, atol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_is_reported_and_the_next_launch_is_right(
    hang: Hang, record_property: Any
) -> None:
    plan, leaves = hang(good_plan()), jax.tree.leaves(example())
    launcher = Launcher(plan, debug=True)
    with pytest.raises(mk.HangError) as error:
        launcher(*leaves)
    start = time.perf_counter()
    with pytest.raises(mk.HangError):
        launcher(*leaves)
    seconds = time.perf_counter() - start

    stuck, expected = error.value.stuck, blocked(plan)
    roles = {name: row for row, (_, name) in enumerate(ROLES)}
    found = [(s.sm, roles[s.role], s.position, *_numbers(s)) for s in stuck]
    known = {tuple(b) for b in expected}
    record_property("where expected", f"{len(known & {*found})} of {len(known)}")
    record_property("ms", round(1e3 * seconds))
    assert found[0] in known, f"{error.value}\nexpected one of {expected}"
    assert stuck[0].is_cause == (hang.__name__ != "circle")
    assert f"SM {stuck[0].sm} {stuck[0].role}, instruction" in str(error.value)
    assert stuck[0].task in str(error.value)
    assert 0.9 * TIMEOUT_NS * 1e-9 < seconds < MOST_SECONDS

    check(mk.megakernel(recall, implementation="mosaic_gpu")(*example()))


def _numbers(s: Any) -> tuple[int, int, int]:
    return s.event, s.expected, s.seen


@pytest.mark.gpu
def test_a_good_plan_raises_no_alarm() -> None:
    args = example()
    launcher = Launcher(good_plan(), debug=True, timestamps=True)
    for _ in range(20):
        check(launcher(*jax.tree.leaves(args)))
    results = jax.jit(launcher.run)(*jax.tree.leaves(args))
    assert results.stamps is not None
    assert np.asarray(results.stamps).any()


@pytest.mark.gpu
def test_the_debug_build_of_a_megakernel() -> None:
    args = example()
    step = mk.megakernel(recall, donate_argnums=1, implementation="mosaic_gpu")
    debugged = step.lower(*args, debug=True).compile()
    book, trace, x = args
    check(debugged(book, jnp.copy(trace), x))
    check(step(*args))


@pytest.mark.parametrize("hang", [*HANGS, lambda plan: without_waits(plan, 14)])
def test_the_normal_build_refuses_the_same_plans(hang: Hang) -> None:
    with pytest.raises(mk.VerifyError, match=r"^(schedule|accesses): "):
        Launcher(hang(good_plan()))
