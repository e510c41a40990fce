"""The body of a task as data: equations, and where they may be cut in two.

    Body ::= invars, Equation*, outvars         calls inlined, equal equations merged
    cut  ::= the dots (none feeding another) | the one fold that has a merge | nothing

Before the cut stand the equations that the cut needs, after it those that the results
still need; the values of the cut itself are the accumulators or carries that parts of
a split task hand on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax._src import core
from jax._src import source_info_util as source_info

from mkdsl.errors import NO_SRC, OURS, SrcInfo
from mkdsl.lang.primitives import dot_p, fold_p
from mkdsl.lang.program import Cut

Var = Any
Equation = Any
Value = Any

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
}


@dataclass(frozen=True, eq=False)
class Body:
    """Equations of a task in order, and those on either side of the cut."""

    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    equations: tuple[Equation, ...]
    cut: Cut
    cut_equations: tuple[Equation, ...]
    before: tuple[Equation, ...]
    after: tuple[Equation, ...]

    @property
    def cut_vars(self) -> tuple[Var, ...]:
        """The accumulators or carries."""
        return tuple(v for e in self.cut_equations for v in e.outvars)

    def operands(self, equations: Iterable[Equation], more: Iterable[Var]) -> set[int]:
        """Which parameters some equations and further values use."""
        used = {id(v) for e in equations for v in e.invars} | {id(v) for v in more}
        return {i for i, v in enumerate(self.invars) if id(v) in used}


def is_literal(v: Any) -> bool:
    """True for a constant written into an equation."""
    return isinstance(v, core.Literal)


def line_of(equation: Equation) -> SrcInfo:
    """The user's line that an equation came from."""
    for frame in source_info.user_frames(equation.source_info.traceback):
        if not frame.file_name.startswith(OURS):
            return SrcInfo(frame.file_name, frame.start_line)
    return NO_SRC


def flatten(jaxpr: Any) -> Any:
    """Calls inlined and equal equations merged: a norm written twice is made once."""
    equations: list[Equation] = []
    seen: dict[Any, list[Var]] = {}

    def walk(j: Any, env: dict[Var, Any], outer: Any = None) -> list[Any]:
        sub: Callable[[Any], Any] = lambda v: v if is_literal(v) else env[v]  # noqa: E731
        for e in j.eqns:
            ins = [sub(v) for v in e.invars]
            if outer is not None and line_of(e) == NO_SRC:
                # JAX traces the inside of jnp functions once, for all their callers.
                e = e.replace(source_info=outer)
            inner = e.params.get(_CALLS.get(e.primitive.name, ""))
            if inner is not None:
                known = dict(zip(inner.invars, ins, strict=True))
                outs = walk(inner, known, e.source_info)
            else:
                outs = _merged(e, ins)
            env.update(zip(e.outvars, outs, strict=True))
        return [sub(v) for v in j.outvars]

    def _merged(e: Equation, ins: list[Any]) -> list[Any]:
        names = [(str(v), str(v.aval)) if is_literal(v) else v for v in ins]
        key = (e.primitive, str(e.params), *names)
        if key not in seen:
            seen[key] = [core.Var(v.aval) for v in e.outvars]
            params = dict(e.params)
            for name in ("jaxpr", "merge"):
                if e.primitive is fold_p and params[name] is not None:
                    params[name] = flatten(params[name])
            equations.append(e.replace(invars=ins, outvars=seen[key], params=params))
        return seen[key]

    outs = walk(jaxpr, {v: v for v in jaxpr.invars})
    names = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(eqns=equations, outvars=outs, debug_info=names)


def needed(
    equations: Sequence[Equation], wanted: Iterable[Var], given: Iterable[Var]
) -> tuple[Equation, ...]:
    """The equations, in order, that `wanted` needs when `given` are known."""
    known = {id(v) for v in given}
    want = {id(v) for v in wanted if not is_literal(v)} - known
    kept: list[Equation] = []
    for e in reversed(equations):
        if any(id(v) in want for v in e.outvars):
            kept.append(e)
            want |= {id(v) for v in e.invars if not is_literal(v)} - known
    return tuple(reversed(kept))


def make_body(jaxpr: Any) -> Body:
    """The body of a traced task."""
    flat = flatten(jaxpr)
    equations = needed(flat.eqns, flat.outvars, ())
    dots = [e for e in equations if e.primitive is dot_p]
    folds = [e for e in equations if e.primitive is fold_p]
    cut: Cut = "none"
    cut_equations: list[Equation] = []
    if dots and not folds and _independent(equations, dots):
        cut, cut_equations = "dot", dots
    elif len(folds) == 1 and not dots and folds[0].params["merge"] is not None:
        cut, cut_equations = "fold", folds
    cut_ins = [v for e in cut_equations for v in e.invars]
    cut_outs = [v for e in cut_equations for v in e.outvars]
    return Body(
        tuple(flat.invars),
        tuple(flat.outvars),
        equations,
        cut,
        tuple(cut_equations),
        needed(equations, cut_ins, ()),
        needed(equations, flat.outvars, cut_outs),
    )


def without_cut(body: Body) -> Body:
    """The same body, which may not be split."""
    return replace(body, cut="none", cut_equations=(), before=(), after=body.equations)


def _independent(equations: Sequence[Equation], dots: Sequence[Equation]) -> bool:
    if len({e.invars[0].aval.shape[-1] for e in dots}) != 1:
        return False
    feeding = needed(equations, [v for e in dots for v in e.invars], ())
    return not any(e.primitive is dot_p for e in feeding)


def evaluate(
    equations: Sequence[Equation],
    known: Mapping[Var, Value],
    outs: Sequence[Var],
    special: Mapping[Any, Callable[..., list[Value]]],
) -> list[Value]:
    """Run equations on values.

    Args:
        known: values of the operands (and of the cut, after it).
        outs: the wanted values.
        special: primitive -> function of (equation, *operands), for the primitives
            whose meaning depends on where the values come from.
    """
    env = dict(known)

    def read(v: Any) -> Value:
        return v.val if is_literal(v) else env[v]

    for e in equations:
        ins = [read(v) for v in e.invars]
        if e.primitive in special:
            results = special[e.primitive](e, *ins)
        else:
            results = e.primitive.bind(*ins, **e.params)
            if not e.primitive.multiple_results:
                results = [results]
        env.update(zip(e.outvars, results, strict=True))
    return [read(v) for v in outs]
