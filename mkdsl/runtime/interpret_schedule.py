"""implementation="simulate": the encoded schedule on virtual SMs, without a GPU.

The plan is encoded, and the words are decoded again: instructions are what runs, not
the tasks of the plan. Every SM has the four roles of the kernel (agents.py). One seed
is one interleaving: a random role takes the next small step, in any order that the
barriers and counters allow. Values are copied when a transfer is made, so a missing
wait reads what is in memory then: NaN, or an old value. Shadow (vector_clock.py)
reports the race itself, also where the value happens to be right.

Shares nothing with the verifier but the decoder and the sizes of pages.
"""

import random
from collections.abc import Sequence
from typing import NoReturn

import jax

from mkdsl.errors import VerifyError
from mkdsl.lower.encode import decode, encode
from mkdsl.lower.ir import KernelPlan
from mkdsl.runtime.agents import Device, Sm, blocked_on
from mkdsl.runtime.barriers import Agent, Counter
from mkdsl.runtime.memory import Array, Memory
from mkdsl.runtime.run_body import Bodies
from mkdsl.runtime.vector_clock import Shadow

# An agent goes on with this chance before another one is picked, one of them per seed:
# short steps mix all roles, long runs let one role get far ahead of the others.
RUN_ON = (0.0, 0.5, 0.9, 0.99)
# Lines of a deadlock report; a machine has four roles on each SM.
MOST_LINES = 64


def simulate(
    plan: KernelPlan,
    inputs: Sequence[Array],
    *,
    seed: int = 0,
    check_races: bool = True,
) -> list[Array]:
    """Run a plan on arrays.

    Args:
        plan: any plan, verified or not.
        inputs: one array per input of the program, as it was traced; not changed.
        seed: which interleaving.
        check_races: follow every access with vector clocks.

    Returns:
        The outputs of the program, as copies.

    Raises:
        VerifyError: a race or a deadlock, with the tasks and the user's line.
    """
    encoded = encode(plan)
    queues = decode(encoded)
    memory = Memory(plan, inputs)
    agents = _Agents(seed)
    device = Device(
        plan,
        memory,
        Shadow(plan, queues) if check_races else None,
        tuple(Counter(f"e{e}", agents.add) for e in range(encoded.events)),
        Bodies(plan),
        agents.add,
    )
    sms = [Sm(device, sm, queue, len(queues)) for sm, queue in enumerate(queues)]
    roles = [agent for sm in sms for agent in sm.agents()]
    for agent in roles:
        agents.add(agent)
    with jax.default_device(jax.devices("cpu")[0]):
        agents.run()
    blocked = [agent for agent in roles if agent.wanted is not None]
    if blocked:
        report_deadlock(sms, blocked)
    return memory.outputs(plan.schedule.events.graph.program)


class _Agents:
    """The agents that can step. Those that wait are at their counters."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._run_on = self._random.choice(RUN_ON)
        self._ready: list[Agent] = []

    def add(self, agent: Agent) -> None:
        """A new agent, or one whose wait is over."""
        agent.wanted = None
        self._ready.append(agent)

    def run(self) -> None:
        """Let one of them step, again and again, until none can."""
        at = -1
        while self._ready:
            if at < 0 or self._random.random() >= self._run_on:
                at = self._random.randrange(len(self._ready))
            if self._step(self._ready[at]):
                continue
            # The order of the list has no meaning: the last agent fills the gap.
            last = self._ready.pop()
            if at < len(self._ready):
                self._ready[at] = last
            at = -1

    def _step(self, agent: Agent) -> bool:
        """One step; False if the agent has ended, or waits from now on."""
        for wanted in agent.steps:
            if not isinstance(wanted, tuple) or wanted[0].count >= wanted[1]:
                return True
            agent.wanted = wanted
            wanted[0].waiters.append((wanted[1], agent))
            return False
        return False


def report_deadlock(sms: Sequence[Sm], blocked: Sequence[Agent]) -> NoReturn:
    """Report what every blocked role waits for, roles at an event first."""
    events = sms[0].device.events
    first = [a for a in blocked if a.wanted and a.wanted[0] in events]
    rest = [a for a in blocked if a not in first]
    lines = [blocked_on(a, sms[a.sm]) for a in (*first, *rest)]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} more"]
    at = (*first, *rest)[0]
    kind = sms[at.sm].device.kind(sms[at.sm].at[at.role])
    raise VerifyError(
        "simulate",
        f"deadlock: {len(blocked)} roles wait and none can go on\n"
        + "\n".join(f"    {line}" for line in lines),
        kind.src,
    )
