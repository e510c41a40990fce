"""A picture of every stage of the compiler.

    program                        calls, and the arrays between them
    tasks, dependences             kinds of tasks with their regions, and dependences
    events, widened, normalized    dependences, and the events that they become
    schedule, elided               the queue of every SM
    pages, words                   shared memory, and the ring of an SM
    kernel, stablehlo              the roles of an SM and what is between them

Large graphs are folded by call and layer. Needs matplotlib and networkx
(`pip install mkdsl[pictures]`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mkdsl.errors import LaunchError
from mkdsl.lower.fold import fold_events, fold_program, fold_tasks
from mkdsl.runtime.graph_picture import draw_fusion, draw_tasks
from mkdsl.runtime.kernel_picture import draw_kernel
from mkdsl.runtime.plan_picture import draw_pages, draw_queues

SUFFIXES = (".svg", ".png")
Stages = Mapping[str, Any]


def check_suffix(path: Path) -> None:
    """Refuse a file that is no picture.

    Raises:
        LaunchError: its suffix is none of SUFFIXES.
    """
    if path.suffix not in SUFFIXES:
        raise LaunchError(
            f"{path} is no picture that can be written",
            hint=f"name a file that ends in {' or '.join(SUFFIXES)}",
        )


def draw_stage(stage: str, stages: Stages, path: Path) -> None:
    """Draw a stage.

    Args:
        stage: its name, see the module.
        stages: every stage of the program by name, as `run_passes` makes them.
        path: to write, .svg or .png.

    Raises:
        LaunchError: the file is no picture, or a library is missing.
    """
    check_suffix(path)
    name = stages["program"].name
    for names, draw in _DRAWERS.items():
        if stage in names:
            draw(stage, stages, path, f"{name}, stage {stage}")
            return
    raise LaunchError(f"there is no picture of stage {stage!r}")


def _draw_program(stage: str, stages: Stages, path: Path, title: str) -> None:
    draw_tasks(fold_program(stages[stage]), path, title, "calls")


def _draw_tasks(stage: str, stages: Stages, path: Path, title: str) -> None:
    draw_tasks(fold_tasks(stages["dependences"]), path, title)


def _draw_events(stage: str, stages: Stages, path: Path, title: str) -> None:
    before, after = fold_tasks(stages["dependences"]), fold_events(stages[stage])
    draw_fusion(before, after, path, title)


def _draw_queues(stage: str, stages: Stages, path: Path, title: str) -> None:
    draw_queues(stages[stage], path, title)


def _draw_pages(stage: str, stages: Stages, path: Path, title: str) -> None:
    draw_pages(stages["pages"], path, title)


def _draw_kernel(stage: str, stages: Stages, path: Path, title: str) -> None:
    draw_kernel(stages["pages"], path, title)


_DRAWERS: dict[tuple[str, ...], Callable[[str, Stages, Path, str], None]] = {
    ("program",): _draw_program,
    ("tasks", "dependences"): _draw_tasks,
    ("events", "widened", "normalized"): _draw_events,
    ("schedule", "elided"): _draw_queues,
    ("pages", "words"): _draw_pages,
    ("kernel", "stablehlo"): _draw_kernel,
}
