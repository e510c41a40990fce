"""Bodies of tasks on numpy values, compiled once for each kind.

What evaluate.py says of one instance, with everything that differs between instances of
a kind as an argument: values, extents, position in the grid. Only whether a part is the
first one decides about code: a fold starts from its init there alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mkdsl.lang.program import Dot
from mkdsl.lower.encode import Instruction
from mkdsl.lower.ir import KernelPlan, Kind
from mkdsl.lower.pages import kind_streams
from mkdsl.runtime.evaluate import Operand, run_combine, run_full, run_partial
from mkdsl.runtime.memory import Array, Block

Run = Callable[[Sequence[Any], Any, Any, Any], list[Any]]


class Bodies:
    """The bodies of all kinds of a plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self._kinds = plan.schedule.events.graph.kinds
        self._run: dict[tuple[int, bool], Run] = {}

    def __call__(
        self, one: Instruction, values: Sequence[Array | None], blocks: Sequence[Block]
    ) -> list[Array]:
        """Results of one task.

        Args:
            values: per operand of the kind; None where only its extents are needed.
            blocks: where the values came from.
        """
        kind = self._kinds[one.kind]
        key = one.kind, one.part == 0
        if key not in self._run:
            shapes = tuple(access.shape for access in kind.ins)
            plain = replace(kind, ins=(), outs=())
            body = id(kind.task.body)
            self._run[key] = _compiled(plain, shapes, body, one.part == 0)
        extents = np.array([n for b in blocks for n in b.extents], np.int32)
        pids = np.array(one.grid, np.int32)
        part = np.int32(one.part)
        return [np.array(x) for x in self._run[key](values, extents, pids, part)]


# The key has the identity of the body as well: TaskDef does not compare bodies. Where
# the blocks lie does not matter.
@functools.lru_cache(maxsize=256)
def _compiled(
    kind: Kind, blocks: tuple[tuple[int, ...], ...], _: int, first_part: bool
) -> Run:
    task, cut_vars = kind.task, kind.task.body.cut_vars
    shapes = [task.body.invars[i].aval.shape for i in kind.operands]
    dots = {s.rhs for s in kind_streams(kind) if isinstance(s, Dot)}

    def run(values: Sequence[Any], extents: Any, pids: Any, part: Any) -> list[Any]:
        operands: dict[int, Operand] = {}
        at = 0
        for n, (i, shape) in enumerate(zip(kind.operands, shapes, strict=True)):
            rank = len(blocks[n])
            known = tuple(extents[at : at + rank])
            at += rank
            # A block [n] of a `column` spec is [n, 1] to the task.
            known += (1,) * (len(shape) - rank)
            value = values[n]
            if value is not None:
                value = value.reshape(value.shape + (1,) * (len(shape) - rank))
            size = blocks[n][-1] if rank else 0
            operands[i] = Operand(value, known, part * size if i in dots else 0)
        if kind.mode == "partial":
            return run_partial(task, operands, pids, 0 if first_part else 1)
        if kind.mode == "full":
            return run_full(task, operands, pids)
        cuts = [
            c.reshape(kind.parts, *v.aval.shape)
            for c, v in zip(values[len(shapes) :], cut_vars, strict=True)
        ]
        return run_combine(task, operands, pids, cuts)

    return jax.jit(run)
