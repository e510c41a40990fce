"""Which task bodies are legal: every axis has a role, column or feature.

    role ::= tile [columns, features] | column [columns] or [columns, 1]
           | vector [features] or [1, features] | scalar [] | stream [rows, features]

Columns (batch rows, heads) are independent of each other, so no operation may mix,
split, merge or reorder them. This is checked once, when the task is traced, whatever
implementation runs it: a body that passes here is one that the emitter can lower.

`ragged` marks values with features past the edge of an array: reducing over them is
an error unless mk.valid masked them first.

Needs: a Body and the parameters. Guarantees: roles of all values, or a TraceError with
the user's line and the remedy. Cost: linear in equations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from mkdsl.errors import TraceError
from mkdsl.lang.body import is_literal, line_of
from mkdsl.lang.table import (
    ELEMENTWISE,
    MAX_SHORT,
    PRIMITIVES,
    REMEDY,
    RENAMES,
    SLICES,
)

Kind = Literal["tile", "column", "vector", "scalar", "stream"]


@dataclass(frozen=True, slots=True)
class Role:
    """What the axes of a value are.

    Attributes:
        ragged: it may hold features past the edge of an array.
        mask: it is a mask made with mk.valid, so jnp.where with it removes `ragged`.
    """

    kind: Kind
    ragged: bool = False
    mask: bool = False


SCALAR = Role("scalar")


def _featured(roles: Sequence[Role]) -> Kind:
    """The kind of a value whose features may differ, made from these."""
    columns = any(r.kind in ("tile", "column") for r in roles)
    return "tile" if columns else "vector"


def check_roles(
    equations: Sequence[Any],
    known: Mapping[Any, Role],
    columns: int,
    who: str,
    *,
    inner: bool = False,
) -> dict[Any, Role]:
    """Roles of all values of some equations, given those of their operands.

    Args:
        inner: True for the body or merge of a fold, whose operands are not the task's.

    Raises:
        TraceError: an operation without meaning on tiles.
    """
    checker = _Checker(dict(known), columns, who, set() if inner else set(known))
    for e in equations:
        roles = checker.equation(e)
        checker.env.update(zip(e.outvars, roles, strict=True))
    return checker.env


def check_primitives(
    equations: Sequence[Any], who: str, *, inner: bool = False
) -> None:
    """Refuse what is not in the published table, before anything else is asked.

    Raises:
        TraceError: with what to use instead.
    """
    checker = _Checker({}, 1, who, set())
    for e in equations:
        if e.primitive.name not in PRIMITIVES:
            checker.refuse(
                e,
                "this primitive is not supported in a task",
                REMEDY.get(e.primitive.name, "see docs/primitives.md for the table"),
            )
        if e.primitive.name != "mk_fold":
            continue
        if inner:
            checker.refuse(
                e,
                "mk.fold inside of mk.fold",
                "streams are operands of the task, and each passes by once; fold over "
                "several of them at once, or let the inner one be a task of its own",
            )
        for name in ("jaxpr", "merge"):
            if e.params[name] is not None:
                check_primitives(e.params[name].eqns, who, inner=True)


class _Checker:
    def __init__(
        self, env: dict[Any, Role], columns: int, who: str, operands: set[Any]
    ) -> None:
        self.env, self.columns, self.who, self.operands = env, columns, who, operands

    def refuse(self, e: Any, why: str, hint: str = "") -> NoReturn:
        avals = ", ".join(str(v.aval) for v in e.invars)
        raise TraceError(
            f"task '{self.who}': {e.primitive.name}({avals}): {why}",
            line_of(e),
            hint,
        )

    def role(self, v: Any) -> Role:
        return SCALAR if is_literal(v) else self.env[v]

    def equation(self, e: Any) -> list[Role]:
        name, ins = e.primitive.name, [self.role(v) for v in e.invars]
        rules: dict[str, Callable[[Any, list[Role]], list[Role]]] = {
            "iota": self.iota,
            "slice": self.slice,
            "split": self.split,
            "select_n": self.select,
            "rem": self.rem,
            "concatenate": self.concatenate,
            "transpose": self.transpose,
            "mk_roll": self.roll,
            "mk_dot": self.dot,
            "mk_fold": self.fold,
            "mk_extent": self.extent,
            "mk_program_id": lambda e, ins: [SCALAR],
        }
        streams = any(r.kind == "stream" for r in ins)
        if streams and name not in ("mk_dot", "mk_fold", "mk_extent", "transpose"):
            self.refuse(
                e,
                "a streamed operand passes through pages and is never whole",
                "streamed operands are the second operand of mk.dot and the operands "
                "of mk.fold; use a different operand for other computations",
            )
        if name in rules:
            return rules[name](e, ins)
        if name in ELEMENTWISE:
            return [self.join(e, ins)]
        if name in RENAMES:
            return [self.rename(e, ins[0])]
        return [self.reduce(e, ins[0])]

    def join(self, e: Any, ins: list[Role]) -> Role:
        kinds: set[Kind] = {r.kind for r in ins if r.kind != "scalar"}
        both = {"column", "vector"} <= kinds
        kind: Kind = "tile" if "tile" in kinds or both else "scalar"
        if len(kinds) == 1:
            kind = next(iter(kinds))
        name = e.primitive.name
        mask = any(r.mask for r in ins) and name not in ("not", "xor")
        if name == "or":
            mask = all(r.mask for r in ins)
        if e.primitive.name == "select_n" and ins[0].mask:
            return Role(kind)
        logical = e.outvars[0].aval.dtype == bool
        return Role(kind, any(r.ragged for r in ins), mask and (logical or mask))

    def rename(self, e: Any, role: Role) -> Role:
        old, new = e.invars[0].aval.shape, e.outvars[0].aval.shape
        if role.kind == "scalar":
            return role
        dims = e.params.get("broadcast_dimensions", ())
        ok = len(new) <= 2
        if role.kind in ("vector", "tile"):
            ok = ok and new[-1:] == old[-1:] and (not dims or dims[-1] == len(new) - 1)
        if role.kind == "tile":
            ok = ok and (len(new) == 2 or self.columns == 1)
        if role.kind == "column":
            ok = ok and new[:1] == old[:1] and (not dims or dims[0] == 0)
        if not ok:
            self.refuse(
                e,
                f"{old} -> {new} changes the role of an axis",
                "columns stay first and features last; give each task one head "
                "through an index map",
            )
        return role

    def reduce(self, e: Any, role: Role) -> Role:
        axes = e.params["axes"]
        rank = e.invars[0].aval.ndim
        if not rank:
            return role
        if axes != (rank - 1,) or (role.kind == "column" and rank == 1):
            self.refuse(
                e,
                f"axes {axes} of {e.invars[0].aval.shape} are not the features",
                "columns are independent: only the last axis can be reduced",
            )
        if role.ragged:
            self.refuse(
                e,
                "reduces over features past the edge of an array",
                "mask them: jnp.where(mk.valid(operand, axis), value, neutral)",
            )
        return Role("column" if role.kind in ("tile", "column") else "scalar")

    def select(self, e: Any, ins: list[Role]) -> list[Role]:
        if len(ins) > 3:
            self.refuse(
                e, f"selects one of {len(ins) - 1} values", "nest jnp.where of two"
            )
        return [self.join(e, ins)]

    def rem(self, e: Any, ins: list[Role]) -> list[Role]:
        if "int" not in e.outvars[0].aval.dtype.name:
            self.refuse(
                e,
                "the remainder of floating-point numbers",
                "use x - y * jnp.floor(x / y), exact for small quotients only",
            )
        return [self.join(e, ins)]

    def iota(self, e: Any, ins: list[Role]) -> list[Role]:
        shape = e.params["shape"]
        if e.params["dimension"] != len(shape) - 1 or len(shape) > 2:
            self.refuse(
                e,
                "columns have no position",
                "pass positions as a [columns, 1] operand",
            )
        return [Role("vector")]

    def slice(self, e: Any, ins: list[Role]) -> list[Role]:
        p, old = e.params, e.invars[0].aval.shape
        lo, hi = p["start_indices"], p["limit_indices"]
        whole = all(a == 0 and b == n for a, b, n in zip(lo, hi, old, strict=True))
        if whole and not p["strides"]:
            return [ins[0]]
        features = self.has_features(e.invars[0], ins[0]) and (
            lo[:-1] == (0,) * (len(old) - 1) and hi[:-1] == old[:-1]
        )
        aligned = not p["strides"] and lo[-1] % 64 == 0 and hi[-1] % 64 == 0
        if not features or not aligned:
            steps = p["strides"] or (1,) * len(old)
            spans = [f"{a}:{b}" for a, b in zip(lo, hi, strict=True)]
            pairs = zip(spans, steps, strict=True)
            spans = [s if k == 1 else f"{s}:{k}" for s, k in pairs]
            self.refuse(e, f"[{', '.join(spans)}] of {list(old)}", SLICES)
        return [ins[0]]

    def split(self, e: Any, ins: list[Role]) -> list[Role]:
        p, old = e.params, e.invars[0].aval.shape
        last = p["axis"] == len(old) - 1 and self.has_features(e.invars[0], ins[0])
        if not last or any(n % 64 for n in p["sizes"]):
            self.refuse(e, f"{list(old)} into {p['sizes']}, axis {p['axis']}", SLICES)
        return ins * len(p["sizes"])

    @staticmethod
    def has_features(v: Any, role: Role) -> bool:
        """True if the last axis of a value holds features, be they all equal."""
        return v.aval.ndim == 2 or (v.aval.ndim == 1 and role.kind != "column")

    def concatenate(self, e: Any, ins: list[Role]) -> list[Role]:
        out = e.outvars[0].aval.shape
        last = e.params["dimension"] == len(out) - 1
        aligned = all(v.aval.shape[-1] % 64 == 0 for v in e.invars)
        features = all(map(self.has_features, e.invars, ins))
        if not last or not aligned or not features or out[-1] > MAX_SHORT:
            self.refuse(
                e,
                f"to {list(out)}",
                f"concatenation joins multiples of 64 features, {MAX_SHORT} at most; "
                "mk.roll rotates features by any number",
            )
        return [replace(self.join(e, ins), kind=_featured(ins))]

    def transpose(self, e: Any, ins: list[Role]) -> list[Role]:
        if ins[0].kind != "stream":
            self.refuse(e, "an axis changes its role", REMEDY["transpose"])
        return [ins[0]]

    def extent(self, e: Any, ins: list[Role]) -> list[Role]:
        if e.invars[0] not in self.operands:
            self.refuse(
                e,
                "mk.valid of a value that is no operand of the task",
                "a computed value has the extent of the operand that it comes from: "
                "mk.valid(operand, axis); inside of mk.fold use its `valid`",
            )
        return [Role("scalar", mask=True)]

    def roll(self, e: Any, ins: list[Role]) -> list[Role]:
        x = e.invars[0]
        if not self.has_features(x, ins[0]) or x.aval.shape[-1] > MAX_SHORT:
            self.refuse(
                e,
                f"mk.roll rotates the features of a tile, {MAX_SHORT} at most",
                "give each task one head through an index map",
            )
        if "float" not in x.aval.dtype.name:
            self.refuse(
                e,
                "mk.roll rotates floating-point numbers",
                "cast to float32 before and back after it",
            )
        return [replace(ins[0], kind=_featured(ins))]

    def dot(self, e: Any, ins: list[Role]) -> list[Role]:
        x, w = ins
        if w.kind != "stream":
            self.refuse(
                e,
                "the second operand is not streamed",
                "mk.dot(x, w): w is an operand of the task that nothing else uses, a "
                "block of a fold, or the transpose of one",
            )
        if x.kind == "stream" or not self.has_features(e.invars[0], x):
            self.refuse(
                e,
                f"the first operand is a {x.kind}",
                "mk.dot(x, w): x is a tile [columns, depth]; what streams is second",
            )
        return [Role(_featured([x]), ragged=w.ragged)]

    def fold(self, e: Any, ins: list[Role]) -> list[Role]:
        p = e.params
        consts, count = p["consts"], p["streams"]
        a = 1 + consts
        carries = [self.carry(v.aval.shape) for v in e.outvars]
        inner = p["jaxpr"]
        blocks = [Role("stream")] * count
        roles = [*ins[1:a], *blocks, Role("vector", mask=True), *carries]
        check_roles(
            inner.eqns,
            dict(zip(inner.invars, roles, strict=True)),
            self.columns,
            self.who,
            inner=True,
        )
        if p["merge"] is not None:
            known = dict(zip(p["merge"].invars, carries * 2, strict=True))
            check_roles(p["merge"].eqns, known, self.columns, self.who, inner=True)
        return carries

    def carry(self, shape: tuple[int, ...]) -> Role:
        if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
            return Role("column")
        return Role("tile") if len(shape) == 2 else SCALAR
