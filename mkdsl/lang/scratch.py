"""Shared memory that a body needs for values of its own: computed operands and rolls.

The second operand of a product is read from shared memory, so a computed left side of
mk.dot is stored there: over the operand that it was made from, where nothing needs that
any more, or else to scratch. mk.roll moves features between warps through scratch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mkdsl.lang.body import Body, is_literal, needed
from mkdsl.lang.primitives import dot_p, fold_p, roll_p
from mkdsl.lang.program import Scratch
from mkdsl.lang.table import ELEMENTWISE, REDUCTIONS, RENAMES


def planned_scratch(body: Body, columns: int) -> tuple[Scratch, ...]:
    """Shared memory for the values of a body, before and after its cut."""
    # A part of a split task may overwrite more than the whole; what is planned serves
    # both.
    own = stored_in_place(body.equations, body.invars, body.outvars, columns)
    if body.cut == "none":
        return scratch_of(body.equations, body.invars, columns, own)
    before = (*body.before, *body.cut_equations)
    merges = [e.params["merge"] for e in body.cut_equations if e.primitive is fold_p]
    after = [e for m in merges for e in m.eqns] + list(body.after)
    return (
        *scratch_of(before, body.invars, columns, own),
        *(replace(s, after_cut=True) for s in scratch_of(after, body.invars, columns)),
    )


def stored_in_place(
    equations: Sequence[Any],
    parameters: Sequence[Any],
    results: Sequence[Any],
    columns: int,
) -> dict[int, int]:
    """Computed left sides of dots that may overwrite a resident operand.

    A norm of x, say, takes the place of x in shared memory: each chunk of it depends on
    the same chunk of x (and on reductions, made before), and nothing needs x or any
    other tile made from x afterwards, the results of the body included.

    Returns:
        id of the variable -> index of the operand.
    """
    found: dict[int, int] = {}
    for e in equations:
        if e.primitive is not dot_p:
            continue
        v = e.invars[0]
        if id(v) in found or is_literal(v):
            continue
        making = needed(equations, [v], ())
        names = {m.primitive.name for m in making}
        if not making or not names <= ELEMENTWISE | RENAMES | REDUCTIONS | {"iota"}:
            continue
        tiles = {id(o) for m in making for o in m.outvars if len(o.aval.shape) == 2}
        inside = {id(m) for m in making}
        for i, x in enumerate(parameters):
            same = x.aval.shape == v.aval.shape and x.aval.dtype == v.aval.dtype
            tile = len(x.aval.shape) == 2 and x.aval.shape[0] == columns
            if not same or not tile or i in found.values():
                continue
            mine = tiles | {id(x)}
            if mine & {id(r) for r in results}:
                continue
            if _used_only(equations, mine, id(v), inside):
                found[id(v)] = i
                break
    return found


def _used_only(
    equations: Sequence[Any], tiles: set[int], result: int, inside: set[int]
) -> bool:
    """True if `tiles` are used by the equations `inside`, and `result` by dots."""
    for e in equations:
        if id(e) in inside:
            continue
        for k, v in enumerate(e.invars):
            as_left = e.primitive is dot_p and k == 0 and id(v) == result
            if id(v) in tiles and not as_left:
                return False
    return True


def scratch_of(
    equations: Sequence[Any],
    parameters: Sequence[Any],
    columns: int,
    in_place: Iterable[int] = (),
) -> tuple[Scratch, ...]:
    """Shared memory for computed left sides of dots and for rolls, in order of use.

    Args:
        in_place: ids of the left sides that need none (stored_in_place).
    """
    found: list[Scratch] = []
    stored: set[int] = set()

    def walk(equations: Sequence[Any], blocks: set[int]) -> None:
        for e in equations:
            if e.primitive is dot_p:
                x = e.invars[0]
                if id(x) not in blocks and id(x) not in stored:
                    found.append(Scratch("operand", x.aval.shape[-1]))
                    stored.add(id(x))
            elif e.primitive is roll_p:
                found.append(Scratch("roll", e.invars[0].aval.shape[-1]))
            elif e.primitive is fold_p:
                p = e.params
                inner, a = p["jaxpr"], p["consts"]
                outer = e.invars[1 : 1 + a]
                pairs = zip(inner.invars[:a], outer, strict=True)
                known = {id(i) for i, o in pairs if id(o) in blocks or id(o) in stored}
                walk(inner.eqns, known)

    tiles = {
        id(v)
        for v in parameters
        if len(v.aval.shape) == 2 and v.aval.shape[0] == columns
    }
    stored |= set(in_place)
    walk(equations, tiles)
    return tuple(found)
