"""Barriers, events and slots of the simulator: what its agents wait for and hand over.

Counter   an mbarrier inside an SM, or an event in device memory
Slot      a page of the ring, a slot of the arena or of the staging buffer
Agent     a generator that yields None after a step, or (counter, count) to be
          resumed when the counter has that count, or a Work that it has begun: one
          step like any other, which takes time where there is a clock
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from mkdsl.errors import VerifyError
from mkdsl.runtime.memory import Array, poison
from mkdsl.runtime.vector_clock import Clock, join


class Counter:
    """A barrier or an event: a count that only rises, and what its signallers knew.

    Attributes:
        name: what one waits for.
        waiters: (count, agent) of those that wait; `wake` is called with an agent
            whose count has been reached.
        history: keep the clock after each signal, for who waits for the first k has
            learnt of k, not of all. A slot is taken before it is filled again: there
            the last clock will do.
    """

    def __init__(
        self, name: str, wake: "Callable[[Agent], None]", history: bool = True
    ) -> None:
        self.name, self.count, self._wake, self._history = name, 0, wake, history
        self.waiters: list[tuple[int, Agent]] = []
        self._known: list[Clock] = []

    def signal(self, clock: Clock | None = None) -> None:
        """Raise the count by one; with a clock, hand over what it knows."""
        if clock is not None:
            known = clock.copy()
            if self._known:
                join(known, self._known[-1])
            if not self._history:
                self._known.clear()
            self._known.append(known)
        self.count += 1
        if self.waiters:
            ready = [a for count, a in self.waiters if count <= self.count]
            self.waiters = [w for w in self.waiters if w[0] > self.count]
            for agent in ready:
                self._wake(agent)

    def acquire(self, count: int, clock: Clock) -> None:
        """Learn what a wait for `count` proves; it must have been reached."""
        join(clock, self._known[count - 1 if self._history else -1])


# The poll of a wait, the body of a task, and the release of its signal.
Work = Literal["poll", "body", "signal"]
Step = tuple[Counter, int] | Work | None
Steps = Generator[Step, None, None]


@dataclass(eq=False, slots=True)
class Agent:
    """A role of an SM, or a transfer, with what it waits for.

    size_bytes: of the page that a transfer brings; 0 for everything else.
    """

    sm: int
    role: str
    steps: Steps
    wanted: tuple[Counter, int] | None = None
    size_bytes: int = 0


@dataclass(slots=True)
class Slot:
    """A slot of the ring, of the arena or of the staging buffer."""

    name: str
    values: dict[int, Array] = field(default_factory=dict[int, Array])

    def fill(self, key: int, value: Array) -> None:
        """A block has arrived.

        Raises:
            VerifyError: the slot still holds one.
        """
        if key in self.values:
            raise VerifyError(
                "simulate", f"{self.name} is filled again before it was freed"
            )
        self.values[key] = value

    def release(self) -> None:
        """Free the slot: what it held must not be used any more."""
        for value in self.values.values():
            poison(value)
        self.values = {}
