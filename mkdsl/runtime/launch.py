"""mk.megakernel: a program function that behaves like jax.jit of it.

    megakernel(f) --trace(*args)--> Traced --lower()--> Lowered --compile()--> Compiled

Each of them prints what it holds, as JAX's stages do. A call does all of it, once for
each pytree structure and set of shapes and dtypes; values never matter.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mkdsl.errors import NO_SRC, LaunchError, SrcInfo
from mkdsl.lang.program import Program
from mkdsl.lang.trace import trace_program
from mkdsl.lower.machine import Machine
from mkdsl.lower.pipeline import Options
from mkdsl.runtime.execute import (
    Executable,
    Implementation,
    check_implementation,
    default_platform,
)
from mkdsl.runtime.stages import Lowered, Traced, aval_of

Array = Any
Tree = Any


def megakernel(
    f: Callable[..., Tree],
    *,
    donate_argnums: int | Sequence[int] = (),
    implementation: Implementation | None = None,
    machine: Machine | None = None,
    options: Options | None = None,
    name: str | None = None,
) -> "Megakernel":
    """Make a program function callable, inside and outside of jax.jit.

    Args:
        f: a function of pytrees of arrays that makes mk.call and mk.scan and returns a
            pytree of arrays of the program.
        donate_argnums: arguments whose arrays may be overwritten by the results, as in
            jax.jit. Without it an array written with mk.Into is copied first; results
            are the same.
        implementation: "mosaic_gpu", the megakernel; "xla", plain JAX; "simulate", the
            schedule on the CPU; None for the megakernel on a supported GPU and XLA
            elsewhere.
        machine: what to plan for; None for the machine of the device.
        options: options of the passes.
        name: name of the program; that of the function by default.

    Returns:
        A function with the stages of jax.jit: trace, lower, compile.
    """
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
    check_implementation(implementation)
    return Megakernel(f, tuple(donated), implementation, machine, options, name)


class Megakernel:
    """What megakernel returns.

    Attributes:
        traces: how many times the function has been traced.
    """

    def __init__(
        self,
        f: Callable[..., Tree],
        donated: tuple[int, ...],
        implementation: Implementation | None,
        machine: Machine | None,
        options: Options | None,
        name: str | None,
    ) -> None:
        self.traces = 0
        self.name = name or getattr(f, "__name__", type(f).__name__)
        self._f, self._donated = f, donated
        self._settings = implementation, machine, options
        self._traced: dict[Any, Traced] = {}
        self._signature = inspect.signature(f)
        inner = inspect.unwrap(f)
        code = getattr(inner, "__code__", None)
        self._src = SrcInfo(code.co_filename, code.co_firstlineno) if code else NO_SRC
        functools.update_wrapper(self, f)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        traced = self.trace(*args, **kwargs)
        return traced.run(jax.tree.leaves(self._bound(args, kwargs)[1]))

    def __repr__(self) -> str:
        return f"<megakernel {self.name} at {self._src}>"

    def trace(self, *args: Tree, **kwargs: Tree) -> Traced:
        """The program for arguments of these shapes (arrays or ShapeDtypeStructs).

        Raises:
            TraceError: the program is not legal.
            LaunchError: the arguments are not those of the function.
        """
        names, values = self._bound(args, kwargs)
        leaves, tree = jax.tree.flatten(values)
        if not all(hasattr(x, "shape") for x in leaves):
            # Let the trace find it: it knows the name of the argument.
            trace_program(self._f, values, self.name, names)
        avals = tuple(aval_of(x) for x in leaves)
        of = [i for i, v in enumerate(values) for _ in jax.tree.leaves(v)]
        donated = {leaf for leaf, i in enumerate(of) if i in self._donated}
        key = tree, tuple((a.shape, a.dtype) for a in avals)
        if key not in self._traced:
            program, out_tree = trace_program(
                self._f, jax.tree.unflatten(tree, avals), self.name, names
            )
            self.traces += 1
            executable = Executable(program, *self._settings, src=self._src)
            self._traced[key] = Traced(executable, tree, out_tree, avals, donated)
        return self._traced[key]

    def lower(
        self,
        *args: Tree,
        implementation: Implementation | None = None,
        platforms: Sequence[str] | None = None,
        debug: bool = False,
        **kwargs: Tree,
    ) -> Lowered:
        """Trace and lower; see Traced.lower."""
        traced = self.trace(*args, **kwargs)
        return traced.lower(
            implementation=implementation, platforms=platforms, debug=debug
        )

    def status(self, *args: Tree, **kwargs: Tree) -> Array:
        """How many writes of a call with these arguments would be out of range.

        Such writes (a token beyond a full cache) are dropped. Evaluate it before the
        call: afterwards donated arguments are gone.

        Returns:
            int32 [], 0 if every write has a place. May be traced.
        """
        traced = self.trace(*args, **kwargs)
        return traced.status(jax.tree.leaves(self._bound(args, kwargs)[1]))

    def why(self) -> str:
        """Which implementation runs on the default backend, and why."""
        settings = self._settings
        program = Program(self.name, (), (), (), ())
        return str(Executable(program, *settings).choose(default_platform()))

    def _bound(self, args: Any, kwargs: Any) -> tuple[list[str], tuple[Tree, ...]]:
        """Names and values of the positional arguments."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise LaunchError(
                f"megakernel '{self.name}{self._signature}': {error}", self._src
            ) from None
        bound.apply_defaults()
        if bound.kwargs:
            raise LaunchError(
                f"megakernel '{self.name}': keyword-only arguments "
                f"{', '.join(bound.kwargs)}",
                self._src,
                "make them positional, or bind constants with functools.partial",
            )
        names: list[str] = []
        for p in self._signature.parameters.values():
            if p.kind is p.VAR_POSITIONAL:
                more = range(len(bound.args) - len(names))
                names += [f"{p.name}{i}" for i in more]
            elif p.kind is not p.VAR_KEYWORD:
                names.append(p.name)
        return names, bound.args
