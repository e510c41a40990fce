"""The simulator on a clock: when every role of every SM does what, without values.

The agents of agents.py run the encoded schedule; who is first in virtual time steps
next. Time passes where the cost model of the machine (lower/machine.py) says so:

    poll      wait_ns after an event that was waited for
    page      its real bytes at the SM's share of the bandwidth, one after the other
    operand   operands_ns after it was issued
    body      its fixed time and computed operands (lower/estimate.py), at its begin
    signal    signal_ns, store included

All else, products of pages included, takes no time, as in lower/estimate.py; unlike
there, every barrier, page and slot is the simulator's own, and extents are those of the
scalars that were given. Values are not computed: arrays are all zeros and take no
memory, so a step of a real model can be timed anywhere.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkdsl.lower.encode import decode, encode
from mkdsl.lower.estimate import work_of
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import Machine
from mkdsl.lower.stamps import STAMPS
from mkdsl.runtime.agents import Device, Sm
from mkdsl.runtime.barriers import Agent, Counter
from mkdsl.runtime.interpret_schedule import report_deadlock
from mkdsl.runtime.memory import DTYPES, Array, Block, Memory

Stamps = NDArray[np.int64]


def simulate_stamps(
    plan: KernelPlan, machine: Machine, scalars: Mapping[str, Any] | None = None
) -> Stamps:
    """When every task of a plan passes each of its stages.

    Args:
        plan: any plan, verified or not.
        machine: whose cost model the clock follows.
        scalars: integer inputs of the program by name, e.g. lengths; others are 0.

    Returns:
        int64 [SMs, longest queue, len(STAMPS)], ns from 1 on; see lower/stamps.py.

    Raises:
        VerifyError: a deadlock, with the tasks and the user's line.
    """
    encoded = encode(plan)
    queues = decode(encoded)
    shape = len(queues), max(map(len, queues), default=0), len(STAMPS)
    clock = _Clock(machine, np.zeros(shape, np.int64))
    device = Device(
        plan,
        _Hollow(plan, scalars or {}),
        None,
        tuple(Counter(f"e{e}", clock.add) for e in range(encoded.events)),
        lambda one, values, blocks: _no_results(plan, one.kind),
        clock.add,
        clock.note,
    )
    sms = [Sm(device, sm, queue, len(queues)) for sm, queue in enumerate(queues)]
    roles = [agent for sm in sms for agent in sm.agents()]
    clock.run(roles, sms)
    blocked = [agent for agent in roles if agent.wanted is not None]
    if blocked:
        report_deadlock(sms, blocked)
    return clock.stamps


class _Hollow(Memory):
    """Arrays of zeros that take no memory, and cannot be written."""

    def __init__(self, plan: KernelPlan, scalars: Mapping[str, Any]) -> None:
        self.arrays = {
            b.name: np.broadcast_to(np.zeros((), DTYPES[b.dtype]), b.shape)
            for b in plan.schedule.events.graph.buffers
        }
        for name, value in scalars.items():
            array = self.arrays.get(name)
            if array is None or array.dtype.kind != "i":
                raise ValueError(f"{name} is no integer input of the program")
            self.arrays[name] = np.broadcast_to(
                np.asarray(value, np.int32), array.shape
            )
        self._scalars = self.arrays

    def store(self, block: Block, value: Array) -> None:
        """Nothing is kept."""


def _no_results(plan: KernelPlan, kind: int) -> list[Array]:
    outs = plan.schedule.events.graph.kinds[kind].outs
    return [np.zeros(0, np.float32) for _ in outs]


class _Clock:
    """The agents by their time; whoever is woken goes on at the time of its waker."""

    def __init__(self, machine: Machine, stamps: Stamps) -> None:
        self.machine, self.stamps, self.now = machine, stamps, 1.0
        self._queue: list[tuple[float, int, Agent]] = []
        self._turn = 0
        # When the last page of an SM has landed.
        self._port = [0.0] * len(stamps)
        self._body_ns: dict[int, float] = {}
        self._sms: Sequence[Sm] = ()

    def note(self, sm: int, position: int, what: int) -> None:
        """Stamp the time."""
        self.stamps[sm, position, what] = round(self.now)

    def add(self, agent: Agent) -> None:
        """A transfer that has been issued, or an agent whose wait is over."""
        agent.wanted = None
        at = self.now
        if agent.size_bytes:
            start = max(at, self._port[agent.sm])
            at = start + self.machine.read_ns(agent.size_bytes)
            self._port[agent.sm] = at
        elif agent.role == "transfer":
            at += self.machine.operands_ns
        self._push(at, agent)

    def run(self, agents: Sequence[Agent], sms: Sequence[Sm]) -> None:
        """Let the first in time step, again and again, until none can."""
        self._sms = sms
        for agent in agents:
            self._push(self.now, agent)
        while self._queue:
            self.now, _, agent = heapq.heappop(self._queue)
            self._step(agent)

    def _push(self, at: float, agent: Agent) -> None:
        self._turn += 1
        heapq.heappush(self._queue, (at, self._turn, agent))

    def _step(self, agent: Agent) -> None:
        for wanted in agent.steps:
            if wanted is None:
                continue
            if isinstance(wanted, str):
                self._push(self.now + self._cost_ns(agent, wanted), agent)
                return
            if wanted[0].count < wanted[1]:
                agent.wanted = wanted
                wanted[0].waiters.append((wanted[1], agent))
                return

    def _cost_ns(self, agent: Agent, work: str) -> float:
        if work == "poll":
            return self.machine.wait_ns
        if work == "signal":
            return self.machine.signal_ns
        kind = self._sms[agent.sm].at[agent.role].kind
        if kind not in self._body_ns:
            graph = self._sms[agent.sm].device.plan.schedule.events.graph
            one = work_of(graph.kinds[kind], 0, self.machine)
            self._body_ns[kind] = one.body_ns
        return self._body_ns[kind]
