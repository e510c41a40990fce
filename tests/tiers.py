"""Which cases of a test belong to `make quick`."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def first_quick(values: Iterable[Any], quick: int = 1) -> Sequence[Any]:
    """Parameters of which the first ones are quick, and the others `slow`."""
    return [
        value if at < quick else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]
