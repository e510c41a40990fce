"""parse(text): any stage of the compiler from what it prints."""

from collections.abc import Iterable

from mkdsl.lang.program import Program, TaskDef
from mkdsl.lower.ir import EventGraph, KernelPlan, Schedule, TaskGraph
from mkdsl.lower.parse_program import Tasks, read_program
from mkdsl.lower.parse_schedule import read_stage
from mkdsl.lower.text_lines import Lines

type Parsed = Program | TaskGraph | EventGraph | Schedule | KernelPlan


def parse(
    text: str,
    tasks: Program | Iterable[TaskDef] | None = None,
    *,
    file: str = "<text>",
) -> Parsed:
    """The stage that prints as a text: parse(print(stage)) == stage.

    Args:
        text: what `as_text(stage)` of a lowered megakernel gave. Its first word says of
            which stage it is.
        tasks: where the bodies of its tasks are, which are not in the text: a program
            that has the same tasks, or the tasks. Each task of the text must be among
            them. None gives tasks without bodies, which cannot run.
        file: name of the text in errors.

    Returns:
        A Program, TaskGraph, EventGraph, Schedule or KernelPlan. It has not been
        verified. Its errors name lines of the text.

    Raises:
        ParseError: the text is not that of a stage, or lacks a task.
    """
    lines = Lines(text, file)
    if isinstance(tasks, Program):
        tasks = [call.task for call in tasks.calls()]
    known = Tasks(tasks)
    if lines.peek("program"):
        value: Parsed = read_program(lines, known)
    else:
        word, line = lines.expect("program", "tasks", "events", "schedule", "plan")
        line.done()
        value = read_stage(word, lines, known)
    lines.done()
    return value
