"""Megakernels for JAX: write per-tile tasks, run one persistent kernel.

A program is an ordinary function of arrays that makes calls of tasks; `megakernel`
makes it behave like a jitted function. See README.md for an example.
"""

from mkdsl.errors import (
    HangError,
    InternalError,
    LaunchError,
    MkdslError,
    ParseError,
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
from mkdsl.lower.machine import simulated
from mkdsl.lower.parse import parse
from mkdsl.lower.pipeline import Options
from mkdsl.lower.tiling import projection_rows
from mkdsl.runtime.launch import megakernel
from mkdsl.runtime.replay import replay

__all__ = [
    "Array",
    "BoundedSlice",
    "Element",
    "HangError",
    "InternalError",
    "Into",
    "LaunchError",
    "MkdslError",
    "Options",
    "ParseError",
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
    "parse",
    "program_id",
    "projection_rows",
    "replay",
    "roll",
    "scan",
    "simulated",
    "task",
    "valid",
    "whole",
]
