"""The kernel that writes stamps lowers, with stamps of the shape that is read."""

from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import stamps
from mkdsl.errors import LaunchError
from mkdsl.lower.stamps import SIGNALLED
from mkdsl.runtime.timeline import from_stamps
from models.decode import argument_shapes
from models.registry import SHAPES, read_config

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llama_rope3_tied"
BATCH, SLOTS = 2, 128


def test_arguments_have_the_shapes_that_were_traced() -> None:
    config = read_config(FIXTURE)
    made = stamps.arguments(config, BATCH, SLOTS, 100)
    want = argument_shapes(config, BATCH, SLOTS)
    assert jax.tree.structure(made) == jax.tree.structure(want)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(made)]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(want)]
    assert np.asarray(made[1].lengths).tolist() == [100, 100]


@pytest.mark.slow
def test_the_kernel_has_stamps() -> None:
    config = read_config(FIXTURE)
    launcher = stamps.launcher_of(config, BATCH, SLOTS)
    leaves = jax.tree.leaves(argument_shapes(config, BATCH, SLOTS))
    traced = jax.jit(launcher.run).trace(*leaves)
    lowered = traced.lower(lowering_platforms=("cuda",))
    shape = lowered.out_info.stamps.shape
    queues = launcher.plan.schedule.queues
    assert shape[:2] == (len(queues), max(map(len, queues)))
    assert shape[2] > SIGNALLED
    # What such an array would say is refused only because nothing was noted.
    with pytest.raises(LaunchError, match="all zeros"):
        from_stamps(launcher.plan, np.zeros(shape, np.int32))


def test_models_are_named() -> None:
    assert "llama-3.2-1b" in SHAPES
    with pytest.raises(SystemExit):
        stamps.main(["--out", "x.npy", "--model", "none"])
