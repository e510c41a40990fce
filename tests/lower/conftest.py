"""Golden text: `pytest tests/lower --update-golden` writes what the tests see."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # a conftest above may have it, too
        parser.addoption("--update-golden", action="store_true")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with tests/golden/<file>/<test>.txt."""
    name = request.node.name.removeprefix("test_").replace("[", "-").rstrip("]")
    path = GOLDEN / request.path.stem.removeprefix("test_") / f"{name}.txt"

    def check(text: str) -> None:
        if request.config.getoption("--update-golden", default=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run pytest with --update-golden"
        assert text == path.read_text(), "run pytest with --update-golden if meant"

    return check
