"""Shared memory of an SM as types: every part once, in all the forms it is seen in.

    ring       pages: as tiles, and raw as copies see them
    arena      resident operands of a kind: tiled, raw, in pieces
    staging    results of a kind: tiled, raw
    scratch    values of a body: as they are stored, in pieces

A part is a union over kinds, since one task at a time uses it.
"""

# pyright: reportAbstractUsage=false
# (Pallas is typed in part.)

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lang.program import Scratch
from mkdsl.lower.emit.blocks import RAW, TILED, resident_types, result_types
from mkdsl.lower.emit.code import Code
from mkdsl.lower.emit.walk import slot_rows
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.layout import Layout
from mkdsl.lower.pages import PIECE, STACK_ROWS, round_up


def page_views(codes: Sequence[Code]) -> list[tuple[int, bool]]:
    """(rows, tiled) of the views of the ring; the untiled ones come first."""
    streams = [s for c in codes for s in c.streams]
    views = {(slot_rows(s.page[0]), s.tiled) for s in streams}
    return sorted(views or {(64, True)}, key=lambda v: (v[1], v[0]))


def memory_types(
    codes: Sequence[Code], layouts: Mapping[str, Layout], plan: KernelPlan
) -> list[Any]:
    """Ring, arena, staging, scratch: unions of the views listed above."""
    arena = [
        [resident_types(b, layouts[b.operand.access.buffer]) for b in c.residents]
        for c in codes
    ]
    staging = [
        [result_types(b, layouts[b.operand.access.buffer]) for b in c.results]
        for c in codes
    ]
    scratch = [
        [
            *(_scratch_type(s, c) for s in c.scratch),
            *(plgpu.SMEM((STACK_ROWS, c.columns), jnp.float32) for _ in c.stacked),
        ]
        for c in codes
    ]
    tiled = [[t for t, _ in g] for g in arena]
    raw = [[r for _, r in g] for g in arena]
    return [
        plgpu.RefUnion(*_ring_types(codes, plan)),
        _union(tiled, raw, _all_pieces(codes, tiled)),
        _union(
            [[t for t, _ in g] for g in staging], [[r for _, r in g] for g in staging]
        ),
        _union(scratch, _all_pieces(codes, scratch)),
    ]


def _ring_types(codes: Sequence[Code], plan: KernelPlan) -> list[Any]:
    """The views, then the untiled ones again as copies see them."""
    ring, elements = plan.ring, plan.page_bytes // 2
    types: list[Any] = []
    for rows, tiled in page_views(codes):
        shape = (ring, rows, elements // rows)
        if not tiled:
            shape = (ring, elements // rows // 64, rows, 64)
        types.append(plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED))
    for rows, tiled in page_views(codes):
        if not tiled:
            shape = (ring, elements // rows // 64, rows, 64)
            types.append(plgpu.SMEM(shape, jnp.bfloat16, transforms=RAW))
    return types


def _scratch_type(s: Scratch, code: Code) -> Any:
    columns, padded = code.columns, round_up(s.features, 64)
    if s.use == "operand" and code.kind.pieces and s.features == code.kind.task.long:
        return plgpu.SMEM((padded // PIECE, PIECE), jnp.bfloat16, transforms=TILED)
    if s.use == "roll":
        return plgpu.SMEM((2 * padded, columns), jnp.float32)
    return plgpu.SMEM((columns, padded), jnp.bfloat16, transforms=TILED)


def _all_pieces(codes: Sequence[Code], types: list[list[Any]]) -> list[list[Any]]:
    return [_pieces(c, g) for c, g in zip(codes, types, strict=True)]


def _pieces(code: Code, types: list[Any]) -> list[Any]:
    """The same memory with tiles as pieces of features, for stacked products."""
    if not code.stacked:
        return []
    width = code.stacked[0]

    def pieces(t: Any) -> Any:
        tile = t.transforms == TILED and t.shape[1] % width == 0
        shape = (t.shape[0] * t.shape[1] // width, width) if tile else t.shape
        return plgpu.SMEM(shape, t.dtype, transforms=t.transforms)

    return [pieces(t) for t in types]


def _union(*views: list[list[Any]]) -> Any:
    """One memory for all kinds; a kind that needs none gets a little."""
    little = plgpu.SMEM((32,), jnp.int32)
    return plgpu.RefUnion(*[group or [little] for view in views for group in view])
