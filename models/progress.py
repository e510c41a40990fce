"""A progress bar for what takes long, where somebody sees it."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

# What ends before that needs no bar.
DELAY_S = 1.5


@contextmanager
def progress(
    title: str,
    total: int,
    *,
    console: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal and the package `rich` is installed.

    The bar appears with the first step after `DELAY_S`, and is wiped in the end.

    Args:
        title: Left of the bar.
        total: Steps in all.
        console: A `rich.console.Console`; that of stderr where None.
        clock: Seconds.

    Yields:
        What says that so many more steps are done.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda count: None
        return
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield lambda count: None
        return
    bar = Progress(console=console, transient=True)
    task = bar.add_task(title, total=total)
    begin = clock()

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and clock() - begin >= DELAY_S:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
