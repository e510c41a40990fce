"""Megakernels for JAX: write per-tile tasks, run one persistent kernel.

A program is an ordinary function of arrays that makes calls of tasks; `megakernel`
makes it behave like a jitted function. See README.md for an example.
"""

from mkdsl.errors import (
    InternalError,
    LaunchError,
    MkdslError,
    PlanError,
    TraceError,
    VerifyError,
)
from mkdsl.lang.arrays import (
    Array,
    BoundedSlice,
    Element,
    Into,
    Shape,
    Spec,
    Squeezed,
    ds,
    whole,
)
from mkdsl.lang.call import call
from mkdsl.lang.expr import cdiv, maximum, minimum
from mkdsl.lang.primitives import dot, fold, program_id, roll, valid
from mkdsl.lang.task import task
from mkdsl.lang.trace import scan
from mkdsl.lower.tiling import projection_rows
from mkdsl.runtime.launch import megakernel

__all__ = [
    "Array",
    "BoundedSlice",
    "Element",
    "InternalError",
    "Into",
    "LaunchError",
    "MkdslError",
    "PlanError",
    "Shape",
    "Spec",
    "Squeezed",
    "TraceError",
    "VerifyError",
    "call",
    "cdiv",
    "dot",
    "ds",
    "fold",
    "maximum",
    "megakernel",
    "minimum",
    "program_id",
    "projection_rows",
    "roll",
    "scan",
    "task",
    "valid",
    "whole",
]
