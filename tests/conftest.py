"""Settings of the process, and how many examples a property is tried on.

pytest                      about 2,000 examples of random programs, the same ones
                            every time
pytest --examples=20000     ten times as many of every property, new ones each time
"""

import importlib.util
import os

import pytest

# Pallas' GPU interpreter runs every warpgroup of a kernel in a thread that blocks in a
# callback. XLA's CPU backend has as many threads as cores, so that on two cores three
# waiting roles stop the fourth for ever; this is how many it is to have instead.
# (xla/pjrt/utils.cc, DefaultThreadPoolSize; seen with jax 0.11.2, 2026-11-29.)
os.environ.setdefault("NPROC", "16")

# Examples of tests/lower/test_random_programs.py in all, unless asked otherwise.
EXAMPLES = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        default=EXAMPLES,
        help="examples of random programs in all; other properties in proportion",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The machine with the GPU has no hypothesis, and needs none.
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import settings

    count = config.getoption("--examples")
    settings.register_profile(
        "mkdsl",
        max_examples=max(1, 100 * count // EXAMPLES),
        # A time limit of a single example says more about the machine than about it.
        deadline=None,
        derandomize=count == EXAMPLES,
    )
    settings.load_profile("mkdsl")
