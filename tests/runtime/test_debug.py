"""The debug build among the stages of a megakernel, on a machine without a GPU."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.emit.kernel import Results
from mkdsl.lower.hang import REPORT_WORDS, ROLES, raise_if_hung
from mkdsl.lower.machine import H200
from mkdsl.runtime.stages import Compiled
from tests.gpu.blocked import blocked, dropped_signal, report_of
from tests.gpu.codebook import QUERIES, WIDTH, example, recall

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compiled() -> tuple[Compiled, np.ndarray]:
    """A debug build whose device returns zeros, and the report that it returns."""
    step = mk.megakernel(recall, implementation="mosaic_gpu", machine=H200)
    traced = step.trace(*jax.eval_shape(example))
    lowered = traced.lower(platforms=("cuda",), debug=True)
    launcher = traced.executable.launcher(H200, debug=True)
    report = np.zeros((H200.sms, len(ROLES), REPORT_WORDS), np.int32)
    outputs = tuple(jnp.zeros(o.shape, o.dtype) for o in traced.executable.outputs())

    def device(*_: Any) -> Results:
        return Results(outputs, None, jnp.asarray(report))

    return Compiled(traced, device, lowered.choice, launcher), report


def test_without_a_hang_the_results_are_those_of_the_program(compiled: Any) -> None:
    step, report = compiled
    report[:] = 0
    nearest, r, trace = step(*example())
    assert nearest.shape == (QUERIES,)
    assert r.shape == trace.shape == (QUERIES, WIDTH)


def test_a_hang_is_raised(compiled: Any) -> None:
    step, report = compiled
    report[0, 1, :6] = [1, 0, 1, 13, 12, 200_000_000]
    with pytest.raises(mk.HangError, match="expected 13, seen 12 after 200 ms") as e:
        step(*example())
    (stuck,) = e.value.stuck
    assert (stuck.sm, stuck.role) == (0, "activation loader")


def test_it_is_not_called_inside_of_jit(compiled: Any) -> None:
    step, _ = compiled
    with pytest.raises(mk.LaunchError, match=r"not inside jax.jit(.|\n)*step by step"):
        jax.jit(lambda *args: step(*args))(*example())


@pytest.mark.parametrize(
    ("implementation", "what"),
    [(None, "xla: it needs a CUDA device"), ("simulate", "simulate: asked for")],
)
def test_what_has_no_waits_has_no_debug_build(implementation: Any, what: str) -> None:
    step = mk.megakernel(recall, implementation=implementation)
    with pytest.raises(mk.LaunchError, match=f"what runs is {what}") as error:
        step.lower(*jax.eval_shape(example), debug=True)
    assert "implementation='simulate' finds deadlocks and races" in str(error.value)
    assert __file__.replace("runtime/test_debug", "gpu/codebook") in str(error.value)


def test_the_page_about_hangs_shows_what_is_printed() -> None:
    step = mk.megakernel(recall, implementation="mosaic_gpu", machine=H200)
    lowered = step.lower(*jax.eval_shape(example), platforms=("cuda",))
    hung = dropped_signal(lowered.plan)
    with pytest.raises(mk.HangError) as error:
        raise_if_hung(hung, report_of(hung, blocked(hung)))
    page = " ".join((ROOT / "docs" / "debug_a_hang.md").read_text().split())
    shown = error.value.what.replace("\n", " ").split()
    assert " ".join(shown) in page
    queue = lowered.as_text("elided").split("sm 15\n")[1].splitlines()[0].strip()
    assert queue in page
