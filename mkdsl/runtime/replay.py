"""Replay a printed stage in the simulator: a bug report is a text and a seed.

Whoever sees a wrong plan saves its text,

    text = step.lower(*arguments).as_text("pages")

and whoever looks into it reads it back, with the bodies of the same tasks:

    program = step.trace(*arguments).program
    outputs = mk.replay(text, leaves_of_arguments, tasks=program, seed=7)

The verifier speaks first. What it refuses can still be run here, to see it break:

    outputs = replay_unproved(text, leaves_of_arguments, tasks=program, seed=7)
"""

from collections.abc import Iterable, Sequence

from mkdsl.lang.program import Program, TaskDef
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import H200, Machine
from mkdsl.lower.parse import parse
from mkdsl.lower.pipeline import finish
from mkdsl.lower.proof import Proof
from mkdsl.lower.verify_stage import verify_stage
from mkdsl.runtime.interpret_schedule import simulate
from mkdsl.runtime.memory import Array


def replay(
    text: str,
    inputs: Sequence[Array],
    tasks: Program | Iterable[TaskDef],
    *,
    machine: Machine = H200,
    seed: int = 0,
) -> list[Array]:
    """Verify a printed stage and run it in the simulator.

    Args:
        text: of any stage; what comes after it is planned.
        inputs: one array per input of the program, in their order; not changed.
        tasks: a program that has the bodies of its tasks, or the tasks.
        machine: to verify and to plan for.
        seed: which interleaving of the roles.

    Returns:
        The outputs of the program.

    Raises:
        ParseError: the text is not that of a stage, or tasks are missing.
        VerifyError: the stage may hang or race; or it did, if `stage` is "simulate".
        PlanError: it does not fit the machine.
    """
    stage = parse(text, tasks)
    if not isinstance(stage, KernelPlan):
        verify_stage(stage, machine)
    proof = Proof(finish(stage, machine), machine)
    return simulate(proof.plan, inputs, seed=seed)


def replay_unproved(
    text: str,
    inputs: Sequence[Array],
    tasks: Program | Iterable[TaskDef],
    *,
    machine: Machine = H200,
    seed: int = 0,
    check_races: bool = True,
) -> list[Array]:
    """Run a printed stage in the simulator without a proof, to see it break.

    Arguments are those of `replay`. Without `check_races` a race is not reported, and
    shows as wrong values at some seeds. Nothing is launched on a device.

    Raises:
        ParseError: the text is not that of a stage, or tasks are missing.
        VerifyError: a race or a deadlock happened in this order of the roles.
        PlanError: it does not fit the machine.
    """
    plan = finish(parse(text, tasks), machine)
    return simulate(plan, inputs, seed=seed, check_races=check_races)
