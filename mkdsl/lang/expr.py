"""Index expressions: the closed grammar of everything mkdsl knows about positions.

    expr ::= term (("+" | "-") term)*            a linear form, kept sorted
    term ::= INT | INT "*" atom | atom
    atom ::= VAR                                 grid axis g0, g1, ..; layer; part
           | NAME "[" expr ("," expr)* "]"       a scalar of an integer program input
           | "(" expr "//" expr ")" | "(" expr "%" expr ")" | "(" expr ")"
           | "min(" expr "," expr ")" | "max(" expr "," expr ")"

Every expression is a linear form over atoms in one canonical order, and so are the
operands of min and max, so that two expressions that are equal as Python values are
equal as integers for all values, and `a - b` folds to a constant whenever the grammar
can see that it is one.
All quantities are non-negative element counts or positions; // and % round towards
minus infinity as in Python.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

OpName = Literal["//", "%", "min", "max"]


@dataclass(frozen=True, slots=True)
class Var:
    """A variable of the instruction: a grid axis, `layer` or `part`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Read:
    """A scalar element of an integer program input, known when the kernel starts."""

    buffer: str
    index: tuple["Expr", ...]

    def __str__(self) -> str:
        return f"{self.buffer}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """A non-linear operation on two expressions."""

    name: OpName
    left: "Expr"
    right: "Expr"

    def __str__(self) -> str:
        if self.name in ("min", "max"):
            return f"{self.name}({self.left}, {self.right})"
        return f"({_grouped(self.left)} {self.name} {_grouped(self.right)})"


def _grouped(value: "Expr") -> str:
    alone = len(value.terms) + (value.constant != 0) <= 1
    return str(value) if alone else f"({value})"


Atom = Var | Read | Op


class Ops(NamedTuple):
    """How to compute //, %, min and max on the values of an evaluation."""

    floordiv: Callable[[Any, Any], Any]
    mod: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]


PYTHON_OPS = Ops(lambda a, b: a // b, lambda a, b: a % b, min, max)


def _no_read(buffer: str, index: tuple[Any, ...]) -> Any:
    raise ValueError(f"{buffer}{list(index)} is known only at run time")


@dataclass(frozen=True, slots=True)
class Expr:
    """constant + sum of coefficient * atom, terms sorted by their text."""

    constant: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    def __str__(self) -> str:
        if not self.terms:
            return str(self.constant)
        text = ""
        for atom, k in self.terms:
            sign = " - " if k < 0 else " + "
            factor = str(atom) if abs(k) == 1 else f"{abs(k)}*{atom}"
            text += (sign if text else "-" if k < 0 else "") + factor
        if self.constant:
            text += f" {'-' if self.constant < 0 else '+'} {abs(self.constant)}"
        return text

    def __repr__(self) -> str:
        return f"Expr({self})"

    @property
    def is_constant(self) -> bool:
        """True if the value needs no variable and no run-time scalar."""
        return not self.terms

    def __int__(self) -> int:
        if self.terms:
            raise ValueError(f"{self} is not a constant")
        return self.constant

    def __index__(self) -> int:
        return int(self)

    def __add__(self, other: "ExprLike") -> "Expr":
        other = expr(other)
        total = dict(self.terms)
        for atom, k in other.terms:
            total[atom] = total.get(atom, 0) + k
        return _linear(self.constant + other.constant, total)

    __radd__ = __add__

    def __neg__(self) -> "Expr":
        return self * -1

    def __sub__(self, other: "ExprLike") -> "Expr":
        return self + -expr(other)

    def __rsub__(self, other: "ExprLike") -> "Expr":
        return expr(other) + -self

    def __mul__(self, other: "ExprLike") -> "Expr":
        other = expr(other)
        if not other.is_constant:
            self, other = other, self
        if not other.is_constant:
            raise ValueError(
                f"({self}) * ({other}): one factor of a product in an index must be "
                "a constant"
            )
        k = other.constant
        return _linear(self.constant * k, {a: c * k for a, c in self.terms})

    __rmul__ = __mul__

    def __floordiv__(self, other: "ExprLike") -> "Expr":
        other = expr(other)
        if other == expr(0):
            raise ZeroDivisionError(f"({self}) // 0 in an index")
        if self.is_constant and other.is_constant:
            return expr(self.constant // other.constant)
        if other.is_constant:
            k = other.constant
            if all(c % k == 0 for _, c in self.terms):
                terms = {a: c // k for a, c in self.terms}
                return _linear(self.constant // k, terms)
        return _atom(Op("//", self, other))

    def __rfloordiv__(self, other: "ExprLike") -> "Expr":
        return expr(other) // self

    def __mod__(self, other: "ExprLike") -> "Expr":
        other = expr(other)
        if other == expr(0):
            raise ZeroDivisionError(f"({self}) % 0 in an index")
        if self.is_constant and other.is_constant:
            return expr(self.constant % other.constant)
        if other.is_constant and all(c % other.constant == 0 for _, c in self.terms):
            return expr(self.constant % other.constant)
        return _atom(Op("%", self, other))

    def __rmod__(self, other: "ExprLike") -> "Expr":
        return expr(other) % self

    def __bool__(self) -> bool:
        if self.terms:
            raise TypeError(
                f"the truth of `{self}` is not known while the program is traced: "
                "an index map is a formula, use mk.minimum, mk.maximum, // and %"
            )
        return self.constant != 0

    def _ordered(self, other: object) -> bool:
        raise TypeError(
            f"comparison of `{self}` with {other}: an index map is a formula, use "
            "mk.minimum and mk.maximum"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _ordered

    def atoms(self) -> Iterator[Atom]:
        """Every atom of the expression, nested ones included."""
        for atom, _ in self.terms:
            yield atom
            if isinstance(atom, Op):
                yield from atom.left.atoms()
                yield from atom.right.atoms()
            elif isinstance(atom, Read):
                for index in atom.index:
                    yield from index.atoms()

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the value depends on."""
        return frozenset(a.name for a in self.atoms() if isinstance(a, Var))

    @property
    def reads(self) -> frozenset[str]:
        """Names of the program inputs whose scalars the value depends on."""
        return frozenset(a.buffer for a in self.atoms() if isinstance(a, Read))

    def evaluate(
        self,
        env: Mapping[str, Any],
        read: Callable[[str, tuple[Any, ...]], Any] = _no_read,
        ops: Ops = PYTHON_OPS,
    ) -> Any:
        """The value, on Python integers or on any numbers with + and *.

        Args:
            env: value of each variable.
            read: value of a scalar of a program input at evaluated indices.
            ops: the four operations that are not + and *.
        """
        total: Any = self.constant
        for atom, k in self.terms:
            value = _value(atom, env, read, ops)
            total = total + (value if k == 1 else value * k)
        return total

    def substitute(self, env: Mapping[str, "ExprLike"]) -> "Expr":
        """The same expression with some variables replaced, folded again."""
        total = expr(self.constant)
        for atom, k in self.terms:
            total = total + _substitute(atom, env) * k
        return total


ExprLike = Expr | int


def _value(atom: Atom, env: Mapping[str, Any], read: Any, ops: Ops) -> Any:
    if isinstance(atom, Var):
        return env[atom.name]
    if isinstance(atom, Read):
        at = tuple(i.evaluate(env, read, ops) for i in atom.index)
        return read(atom.buffer, at)
    left = atom.left.evaluate(env, read, ops)
    right = atom.right.evaluate(env, read, ops)
    table = {
        "//": ops.floordiv,
        "%": ops.mod,
        "min": ops.minimum,
        "max": ops.maximum,
    }
    return table[atom.name](left, right)


def _substitute(atom: Atom, env: Mapping[str, ExprLike]) -> Expr:
    if isinstance(atom, Var):
        return expr(env[atom.name]) if atom.name in env else _atom(atom)
    if isinstance(atom, Read):
        index = tuple(i.substitute(env) for i in atom.index)
        return _atom(Read(atom.buffer, index))
    left, right = atom.left.substitute(env), atom.right.substitute(env)
    if atom.name == "//":
        return left // right
    if atom.name == "%":
        return left % right
    return minimum(left, right) if atom.name == "min" else maximum(left, right)


def _linear(constant: int, terms: Mapping[Atom, int]) -> Expr:
    kept = [(a, k) for a, k in terms.items() if k]
    return Expr(constant, tuple(sorted(kept, key=lambda t: str(t[0]))))


def _atom(atom: Atom) -> Expr:
    return Expr(0, ((atom, 1),))


@overload
def expr(value: int) -> Expr: ...
@overload
def expr(value: ExprLike) -> Expr: ...
def expr(value: ExprLike) -> Expr:
    """An integer or an expression as an expression."""
    if isinstance(value, Expr):
        return value
    return Expr(int(value))


def var(name: str) -> Expr:
    """The variable of that name."""
    return _atom(Var(name))


def read(buffer: str, *index: ExprLike) -> Expr:
    """Element `index` of the integer program input `buffer`."""
    return _atom(Read(buffer, tuple(map(expr, index))))


def _rank(value: Expr) -> tuple[bool, str]:
    """The order of the operands of min and max: constants first, then by text."""
    return not value.is_constant, str(value)


def minimum(left: ExprLike, right: ExprLike) -> Expr:
    """The smaller of two index values."""
    left, right = expr(left), expr(right)
    gap = left - right
    if gap.is_constant:
        return left if gap.constant <= 0 else right
    return _atom(Op("min", *sorted((left, right), key=_rank)))


def maximum(left: ExprLike, right: ExprLike) -> Expr:
    """The larger of two index values."""
    left, right = expr(left), expr(right)
    gap = left - right
    if gap.is_constant:
        return left if gap.constant >= 0 else right
    return _atom(Op("max", *sorted((left, right), key=_rank)))


def cdiv(value: Any, divisor: int) -> Any:
    """value / divisor, rounded up."""
    return (value + (divisor - 1)) // divisor
