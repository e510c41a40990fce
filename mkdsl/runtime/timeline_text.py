"""A timeline as text: a row for each role of each SM, a letter for each cause.

    SM 0 consumer           lllllccwwwwwwlll
                            0 us        9.3 us

A cell stands for an equal share of the step and has the letter of what the role spent
most of that share on, `.` where it had nothing to do.
"""

from collections.abc import Iterator, Sequence

from mkdsl.runtime.agents import ROLES, Role
from mkdsl.runtime.timeline import CAUSES, Cause, Span, Timeline

LETTERS: dict[Cause, str] = {c: c[0] for c in CAUSES}
IDLE = "."
WIDTH = 64


def chart(
    timeline: Timeline,
    *,
    width: int = WIDTH,
    roles: Sequence[Role] = ROLES,
    end_ns: int | None = None,
) -> str:
    """Draw a timeline with letters.

    Args:
        width: cells of a row.
        roles: which rows of each SM.
        end_ns: time of the last cell, so that two charts compare; None for the end of
            the step.

    Returns:
        Lines: one per role and SM, the axis, and what the letters mean.
    """
    end = max(1, timeline.end_ns if end_ns is None else end_ns)
    return "\n".join(_lines(timeline, width, roles, end)) + "\n"


def _lines(
    timeline: Timeline, width: int, roles: Sequence[Role], end: int
) -> Iterator[str]:
    names = {(sm, r): f"SM {sm} {r}" for sm in range(timeline.sms) for r in roles}
    margin = max(map(len, names.values()), default=0) + 2
    for (sm, role), name in names.items():
        mine = [s for s in timeline.spans if (s.sm, s.role) == (sm, role)]
        yield f"{name:{margin}}{_row(mine, width, end)}"
    stop = f"{end / 1e3:.1f} us"
    yield f"{'':{margin}}0 us{stop:>{max(0, width - 4)}}"
    meaning = ", ".join(f"{letter} {cause}" for cause, letter in LETTERS.items())
    yield f"{'':{margin}}{meaning}, {IDLE} nothing to do"


def _row(spans: Sequence[Span], width: int, end: int) -> str:
    cells: list[str] = []
    for cell in range(width):
        left, right = cell * end / width, (cell + 1) * end / width
        spent = {IDLE: right - left}
        for span in spans:
            shared = min(right, span.end_ns) - max(left, span.start_ns)
            if shared > 0:
                letter = LETTERS[span.cause]
                spent[letter] = spent.get(letter, 0.0) + shared
                spent[IDLE] -= shared
        cells.append(max(spent, key=lambda letter: spent[letter]))
    return "".join(cells)
