"""Look into what was lowered for CUDA, on a machine without a GPU.

A kernel is one custom call of the StableHLO module that carries its own MLIR module as
bytecode. In it everything that touches memory order is inline PTX or an NVVM operation.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

Lowered = Any
TARGET = "mosaic_gpu_v2"
_ASM = re.compile(r'asm_string = "([^"]*)"')
_NVVM = re.compile(r'"stable_mosaic_gpu\.nvvm\.([a-z_.]+)"\([^)]*\) (?:\{([^}]*)\})?')
_ALIAS = re.compile(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)")


@dataclass(frozen=True)
class Kernel:
    """One call of a Mosaic GPU kernel.

    Attributes:
        bytecode: the serialised module.
        aliases: (operand, result) pairs that share a buffer, by number.
        operands, results: their types, e.g. "tensor<2x8xbf16>".
    """

    bytecode: bytes
    aliases: tuple[tuple[int, int], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]

    def as_text(self) -> str:
        """The module of the kernel, one operation a line."""
        with mlir.make_ir_context() as context:
            context.allow_unregistered_dialects = True
            return str(ir.Module.parse(self.bytecode))


def kernels(lowered: Lowered) -> list[Kernel]:
    """Every call of a kernel in a jax.stages.Lowered."""
    found: list[Kernel] = []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and TARGET in str(
            op.attributes["call_target_name"]
        ):
            found.append(_kernel(op))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def _kernel(op: Any) -> Kernel:
    config = ir.DictAttr(op.attributes["mhlo.backend_config"])
    named = "output_operand_aliases"
    text = str(op.attributes[named]) if named in op.attributes else ""
    aliases = [(int(operand), int(out)) for out, operand in _ALIAS.findall(text)]
    return Kernel(
        ir.StringAttr(config["module"]).value_bytes,
        tuple(aliases),
        tuple(str(o.type) for o in op.operands),
        tuple(str(r.type) for r in op.results),
    )


def ptx(kernel: Kernel) -> list[str]:
    """The inline PTX of a kernel in program order, and NVVM operations, as
    `name attributes`.

    Regions are printed depth first, so what follows in the text follows in the program,
    or is the other branch of a condition.
    """
    return list(_instructions(kernel.as_text()))


def _instructions(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if asm := _ASM.search(line):
            yield asm[1].replace("\\0A", " ").strip()
        elif operation := _NVVM.search(line):
            yield f"{operation[1]} {operation[2] or ''}".strip()
