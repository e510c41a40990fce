"""The emitter is a compiler of bodies: whatever the published table allows, lowers.

Random bodies are lowered for CUDA, which needs no GPU, and a sample of those that are
exact in every dtype runs in Pallas' GPU interpreter against plain jnp, bit by bit.
"""

import os
from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdsl.errors import PlanError
from tests.lower.emit import bodies as b

QUICK = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=(hypothesis.Phase.generate,),
    suppress_health_check=list(hypothesis.HealthCheck),
)
# The same bodies every time, so that a change is what makes them fail; others with
# MKDSL_SEARCH=1, which is how new faults are found.
LONG = hypothesis.settings(
    QUICK,
    max_examples=60,
    derandomize=not os.environ.get("MKDSL_SEARCH"),
    phases=tuple(hypothesis.Phase),
)


def case(body: b.Body) -> b.Case:
    return b.Case(body, tuple(body.operands))


def planned(bodies: Sequence[b.Body]) -> b.KernelPlan:
    """The plan of all of them; big tiles of many dtypes may not fit together."""
    program = b.program_of([case(body) for body in bodies])
    try:
        return b.plan_of(program)
    except PlanError as error:
        if "does not fit" not in str(error):
            raise
        hypothesis.reject()


def check_lowers(bodies: Sequence[b.Body]) -> None:
    plan = planned(bodies)
    assert b.lower(plan) <= plan.smem_bytes


def check_agrees(bodies: Sequence[b.Body]) -> None:
    plan = planned(bodies)
    values = b.arguments(plan.schedule.events.graph.program)
    got = b.interpret(plan, values)
    want = b.expected([case(body) for body in bodies], values)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@given(st.lists(b.bodies(), min_size=1, max_size=4))
@QUICK
def test_random_bodies_lower(bodies: list[b.Body]) -> None:
    check_lowers(bodies)


@pytest.mark.slow
@given(st.lists(b.bodies(steps=12), min_size=1, max_size=4))
@LONG
def test_many_random_bodies_lower(bodies: list[b.Body]) -> None:
    check_lowers(bodies)


@pytest.mark.interpret
@given(st.lists(b.bodies(exact=True), min_size=1, max_size=3))
@QUICK
def test_random_bodies_agree_with_jnp(bodies: list[b.Body]) -> None:
    check_agrees(bodies)


@pytest.mark.slow
@pytest.mark.interpret
@given(st.lists(b.bodies(exact=True, steps=12), min_size=1, max_size=2))
@LONG
def test_many_random_bodies_agree_with_jnp(bodies: list[b.Body]) -> None:
    check_agrees(bodies)
