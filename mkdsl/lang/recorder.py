"""The program under construction, which mk.call and mk.scan add to."""

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, field

from mkdsl.errors import SrcInfo, TraceError, caller
from mkdsl.lang.arrays import Array
from mkdsl.lang.program import Buffer, Call, Step


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a temp lives now: entry `at` of a carry's stacked buffer."""

    stack: str
    length: int
    at: int


@dataclass
class Recorder:
    """The program under construction.

    made: temps of the scope (the program, or a variant of a scan) so far.
    versions: how many times each buffer has been written by mk.Into.
    moved: temps that became an entry of a carry's stacked buffer.
    """

    name: str
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    steps: list[Step] = field(default_factory=list[Step])
    calls: list[Call] | None = None
    layers: int | None = None
    names: set[str] = field(default_factory=set[str])
    made: set[str] = field(default_factory=set[str])
    versions: dict[str, int] = field(default_factory=dict[str, int])
    moved: dict[str, Moved] = field(default_factory=dict[str, Moved])

    def unique(self, base: str) -> str:
        """A name for a call that no call of this scope has."""
        name, n = base, 1
        while name in self.names:
            n += 1
            name = f"{base}{n}"
        self.names.add(name)
        return name

    def add(self, call: Call) -> None:
        """Append a call to the scan's variant or to the program."""
        if self.calls is None:
            self.steps.append(call)
        else:
            self.calls.append(call)

    def check_version(self, array: Array, what: str, src: SrcInfo) -> None:
        """Refuse an array that mk.Into has overwritten since."""
        if array.version != self.versions.get(array.buffer, 0):
            raise TraceError(
                f"{what}: this version of {array.buffer} was overwritten by mk.Into",
                src,
                "use the array that the call returned",
            )


class _State(threading.local):
    recorder: Recorder | None = None


_STATE = _State()


def current(what: str) -> Recorder:
    """The program being traced."""
    if _STATE.recorder is None:
        raise TraceError(
            f"{what} outside a program",
            caller(),
            "wrap the program function in mk.megakernel",
        )
    return _STATE.recorder


@contextlib.contextmanager
def recording(recorder: Recorder) -> Generator[Recorder]:
    """Make `recorder` the program that mk.call and mk.scan add to."""
    before, _STATE.recorder = _STATE.recorder, recorder
    try:
        yield recorder
    finally:
        _STATE.recorder = before
