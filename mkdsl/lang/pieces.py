"""Which bodies may see the left side of their dots as pieces of its depth.

A tile of one column fills an eighth of a matrix operand, which has eight columns at
least. The emitter may lay such a row out as [depth / n, n] instead, n pieces side by
side, if the body does nothing to it that tells the pieces apart.
"""

from collections.abc import Sequence

from mkdsl.lang.body import Body, is_literal
from mkdsl.lang.primitives import dot_p
from mkdsl.lang.program import Dot, Param, Stream
from mkdsl.lang.table import ELEMENTWISE, REDUCTIONS, RENAMES


def depth_in_pieces(
    body: Body, params: Sequence[Param], streams: Sequence[Stream], columns: int
) -> int:
    """The depth of the dots if their left sides may be in pieces, or 0.

    Values of that many features have to come from such operands by elementwise
    operations, and to end in reductions and dots.
    """
    depths = {s.depth if isinstance(s, Dot) else 0 for s in streams}
    if columns != 1 or len(depths) != 1 or 0 in depths:
        return 0
    (depth,) = depths
    sort: dict[int, str] = {}
    for v, p in zip(body.invars, params, strict=True):
        wide = p.use in ("tile", "vector") and p.shape[-1] == depth
        if wide and p.dtype not in ("bfloat16", "float16"):
            return 0
        sort[id(v)] = "long" if wide else "scalar" if p.use == "scalar" else "other"
    for e in body.equations:
        ins = ["scalar" if is_literal(v) else sort[id(v)] for v in e.invars]
        found = _result(e, ins, depth)
        if found is None:
            return 0
        sort.update((id(v), found) for v in e.outvars)
    ends = {sort.get(id(v)) for v in body.outvars}
    return 0 if "long" in ends else depth


def _result(e: object, ins: Sequence[str], depth: int) -> str | None:
    """What the results of an equation are; None if it tells pieces apart."""
    primitive, name = e.primitive, e.primitive.name  # pyright: ignore
    out = e.outvars[0].aval.shape  # pyright: ignore
    if primitive is dot_p:
        return "other" if ins[0] == "long" else None
    if "long" in ins:
        if name in RENAMES or name in ELEMENTWISE:
            return None if "other" in ins or out[-1:] != (depth,) else "long"
        return "scalar" if name in REDUCTIONS - {"argmax"} else None
    if set(ins) == {"scalar"} and (name in RENAMES or name in ELEMENTWISE):
        return "scalar"
    return None if out[-1:] == (depth,) else "other"
