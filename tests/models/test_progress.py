"""The bar of a long load: late, on a terminal, and gone in the end."""

import builtins
import io
from typing import Any

import pytest

from models.progress import DELAY_S, progress

rich_console = pytest.importorskip("rich.console")


def console(terminal: bool) -> Any:
    return rich_console.Console(file=io.StringIO(), force_terminal=terminal, width=60)


def shown(console: Any, times: list[float]) -> str:
    clock = iter([0.0, *times])
    with progress("loading x", 10, console=console, clock=lambda: next(clock)) as done:
        for _ in times:
            done(5)
    return console.file.getvalue()


def test_a_long_load_on_a_terminal_has_a_bar() -> None:
    text = shown(console(True), [DELAY_S, DELAY_S + 1])
    assert "loading x" in text
    assert "50%" in text


def test_a_short_one_has_none() -> None:
    assert "loading" not in shown(console(True), [0.5 * DELAY_S, 0.9 * DELAY_S])


def test_nor_a_file_that_is_no_terminal() -> None:
    assert shown(console(False), [DELAY_S, 9.0]) == ""


def test_the_bar_goes_also_when_a_load_fails() -> None:
    terminal = console(True)
    times = iter([0.0, 9.0])

    def fail() -> None:
        with progress("x", 2, console=terminal, clock=lambda: next(times)) as done:
            done(1)
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        fail()
    # The cursor is shown again.
    assert "\x1b[?25h" in terminal.file.getvalue()


def test_without_rich_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_rich)
    # Whatever is asked of this console is an error.
    with progress("x", 2, console=object()) as done:
        done(2)
