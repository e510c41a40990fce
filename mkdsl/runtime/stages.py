"""The stages of a megakernel: Traced, Lowered, Compiled, as those of jax.jit.

Each prints what it holds. A trace is for one pytree structure and one set of shapes and
dtypes; the values of arguments never matter.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mkdsl.errors import LaunchError
from mkdsl.lang.program import Program
from mkdsl.lower.encode import Encoded
from mkdsl.lower.hang import not_traceable, raise_if_hung
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import check_runs
from mkdsl.lower.pipeline import STAGES, Options, compile_program, run_passes
from mkdsl.runtime.execute import (
    Choice,
    Executable,
    Implementation,
    default_platform,
    megakernel_p,
)
from mkdsl.runtime.interpret_program import count_dropped, write_scalars
from mkdsl.runtime.pictures import draw_stage
from mkdsl.runtime.timeline import Timeline, from_stamps
from mkdsl.runtime.virtual_time import simulate_stamps

if TYPE_CHECKING:
    from mkdsl.lower.emit.kernel import Launcher

Array = Any
Tree = Any
TEXTS = (*STAGES, "words", "kernel", "stablehlo")


def aval_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf as JAX sees it (64-bit types are narrowed)."""
    dtype = x.dtype if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).dtype
    return jax.ShapeDtypeStruct(tuple(int(n) for n in x.shape), dtype)


class Traced:
    """A program for arguments of fixed shapes."""

    def __init__(
        self,
        executable: Executable,
        in_tree: Any,
        out_tree: Any,
        avals: tuple[jax.ShapeDtypeStruct, ...],
        donated: set[int],
    ) -> None:
        self.executable = executable
        self.in_tree, self.out_tree, self.avals = in_tree, out_tree, avals
        program = executable.program
        state = {b.name for b in program.buffers if b.role == "state"}
        reused = {i for i, n in enumerate(program.inputs) if n in state} & donated
        self._donated = tuple(sorted(reused))
        self._jit = self._jitted(executable)
        self._status = jax.jit(functools.partial(count_dropped, program))

    @property
    def program(self) -> Program:
        """What the function does, as data."""
        return self.executable.program

    def as_text(self, stage: str = "program") -> str:
        """The text of the program, or of a later stage."""
        return self.lower().as_text(stage)

    def lower(
        self,
        *,
        implementation: Implementation | None = None,
        platforms: Sequence[str] | None = None,
        debug: bool = False,
    ) -> "Lowered":
        """Lower for platforms ("cpu", "cuda"), the default backend's if None.

        Args:
            implementation: instead of that given to megakernel.
            debug: the kernel with bounded waits. What it compiles to is called
                directly, waits for the device, and raises a HangError instead of
                hanging. It is slower.
        """
        e = self.executable
        if implementation is not None and implementation != e.implementation:
            e = Executable(e.program, implementation, e.machine, e.options, e.src)
        return Lowered(self, e, platforms, debug)

    def run(self, leaves: Sequence[Array]) -> Tree:
        """Call on the leaves of the arguments."""
        if any(isinstance(x, Tracer) for x in leaves):
            arrays = [jnp.asarray(x) for x in leaves]
            outs = megakernel_p.bind(*arrays, executable=self.executable)
            return jax.tree.unflatten(self.out_tree, outs)
        self.check_devices(leaves)
        if self.executable.implementation == "simulate":
            return jax.tree.unflatten(self.out_tree, self.executable.simulate(leaves))
        return jax.tree.unflatten(self.out_tree, self._jit(*leaves))

    @property
    def compilations(self) -> int:
        """How many times XLA has compiled the call, for tests."""
        return self._jit._cache_size()

    def status(self, leaves: Sequence[Array]) -> Array:
        """See Megakernel.status."""
        inputs = dict(zip(self.program.inputs, leaves, strict=True))
        return self._status({n: inputs[n] for n in write_scalars(self.program)})

    def check_devices(self, leaves: Sequence[Array]) -> None:
        """Refuse arguments that are spread over several devices."""
        for name, x in zip(self.program.inputs, leaves, strict=True):
            devices = len(x.sharding.device_set) if isinstance(x, jax.Array) else 1
            if devices > 1:
                raise LaunchError(
                    f"megakernel '{self.program.name}': argument {name} is sharded "
                    f"over {devices} devices, which is not supported",
                    self.executable.src,
                    "put it on one device, e.g. jax.device_put(x, jax.devices()[0])",
                )

    def check(self, tree: Any, leaves: Sequence[Array]) -> None:
        """Refuse arguments of other structure, shapes or dtypes than traced."""
        who = f"megakernel '{self.program.name}'"
        if tree != self.in_tree:
            raise LaunchError(
                f"{who}: the arguments are {tree}, it was traced for {self.in_tree}",
                self.executable.src,
            )
        names = self.program.inputs
        for name, x, want in zip(names, leaves, self.avals, strict=True):
            have = aval_of(x) if hasattr(x, "shape") else None
            if have is None or (have.shape, have.dtype) != (want.shape, want.dtype):
                raise LaunchError(
                    f"{who}: argument {name} is {_show(x, have)}, it was traced for "
                    f"{_show(x, want)}",
                    self.executable.src,
                    "trace again for other shapes: call the megakernel itself",
                )

    def stage(self, executable: Executable, debugged: "Launcher | None" = None) -> Any:
        """JAX's own Traced of the program, or of its debug build."""
        if debugged is not None:
            jitted = jax.jit(debugged.run, donate_argnums=self._donated)
            return jitted.trace(*self.avals)
        jitted = self._jit if executable is self.executable else None
        return (jitted or self._jitted(executable)).trace(*self.avals)

    def _jitted(self, executable: Executable) -> Any:
        def call(*leaves: Array) -> list[Array]:
            return megakernel_p.bind(*leaves, executable=executable)

        call.__name__ = call.__qualname__ = executable.program.name
        return jax.jit(call, donate_argnums=self._donated)


def _show(x: Any, aval: jax.ShapeDtypeStruct | None) -> str:
    if aval is None:
        return f"a {type(x).__name__}"
    return f"{np.dtype(aval.dtype).name}[{', '.join(map(str, aval.shape))}]"


class Lowered:
    """A program lowered for an implementation and a platform."""

    def __init__(
        self,
        traced: Traced,
        executable: Executable,
        platforms: Sequence[str] | None,
        debug: bool = False,
    ) -> None:
        self._traced, self._executable, self._platforms = traced, executable, platforms
        self._choices = [
            executable.choose(p) for p in platforms or (default_platform(),)
        ]
        self._texts: dict[str, str] = {}
        self._debugged: Launcher | None = None
        if debug:
            self._debugged = self._debug_build()

    @property
    def choice(self) -> Choice:
        """What runs on the first platform."""
        return self._choices[0]

    @property
    def plan(self) -> KernelPlan:
        """The plan for the machine of the first platform (of an H200, for "xla")."""
        return self._executable.plan(self.choice.machine)

    def why(self) -> str:
        """Which implementation runs, and why."""
        return str(self.choice)

    def as_text(self, stage: str = "stablehlo") -> str:
        """The text of a stage of the compiler.

        Args:
            stage: program, tasks, dependences, events, widened, normalized, schedule,
                elided, pages, words, kernel for the Pallas kernel, or stablehlo for
                what JAX compiles.
        """
        if stage not in TEXTS:
            raise LaunchError(f"no stage {stage!r}", hint=f"one of {', '.join(TEXTS)}")
        if stage == "stablehlo":
            return self._jax_lowered().as_text()
        if stage == "words":
            return _words_text(self._executable.proof(self.choice.machine).encoded)
        if stage == "kernel":
            check_runs(self.choice.machine)
            launcher = self._executable.launcher(self.choice.machine)
            return f"{jax.make_jaxpr(launcher.run)(*self._traced.avals)}\n"
        if stage not in self._texts:
            e = self._executable
            for made in run_passes(e.program, self.choice.machine, e.options):
                self._texts[made.name] = made.as_text()
                if made.name == stage:
                    break
        return self._texts[stage]

    def draw(self, stage: str, path: str | Path) -> None:
        """Draw a stage of the compiler as a picture, see runtime/pictures.py.

        Args:
            stage: as for `as_text`.
            path: to write, .svg or .png.

        Raises:
            LaunchError: no such stage or kind of file, or matplotlib is missing.
        """
        if stage not in TEXTS:
            raise LaunchError(f"no stage {stage!r}", hint=f"one of {', '.join(TEXTS)}")
        e = self._executable
        made = run_passes(e.program, self.choice.machine, e.options)
        draw_stage(stage, {one.name: one.value for one in made}, Path(path))

    def timeline(
        self, scalars: Mapping[str, Any] | None = None, *, coarse: bool = False
    ) -> Timeline:
        """When every task runs, on the clock of the simulator (virtual_time.py).

        Args:
            scalars: integer inputs by name, e.g. lengths; others are 0.
            coarse: of the same tasks where each waits for whole calls.
        """
        e, machine = self._executable, self.choice.machine
        plan = self.plan
        if coarse:
            options = replace(e.options or Options(), coarse=True)
            plan = compile_program(e.program, machine, options)
        return from_stamps(plan, simulate_stamps(plan, machine, scalars), "simulator")

    def compile(self) -> "Compiled":
        """Compile for the device."""
        compiled = self._jax_lowered().compile()
        return Compiled(self._traced, compiled, self.choice, self._debugged)

    def _debug_build(self) -> "Launcher":
        for choice in self._choices:
            if choice.implementation != "mosaic_gpu":
                raise LaunchError(
                    f"megakernel '{self._executable.program.name}': debug=True bounds "
                    f"the waits of the kernel, and what runs is {choice}",
                    self._executable.src,
                    "leave it out; implementation='simulate' finds deadlocks and races "
                    "without a GPU",
                )
        return self._executable.launcher(self.choice.machine, debug=True)

    def _jax_lowered(self) -> Any:
        stage = self._traced.stage(self._executable, self._debugged)
        if self._platforms is None:
            return stage.lower()
        return stage.lower(lowering_platforms=tuple(self._platforms))


def _words_text(encoded: Encoded) -> str:
    """The instructions of every SM, one a line, then its lists of waits."""
    lines: list[str] = []
    for sm, words in enumerate(encoded.words):
        lines.append(f"sm {sm}")
        for at in range(0, encoded.waits_at, encoded.stride):
            lines.append("  " + " ".join(map(str, words[at : at + encoded.stride])))
        lines.append("  waits " + " ".join(map(str, words[encoded.waits_at :])))
    return "\n".join(lines) + "\n"


class Compiled:
    """A compiled program: call it with arguments of the shapes that were traced."""

    def __init__(
        self,
        traced: Traced,
        compiled: Any,
        choice: Choice,
        debugged: "Launcher | None" = None,
    ) -> None:
        self._traced, self._compiled, self.choice = traced, compiled, choice
        self._debugged = debugged

    def __call__(self, *args: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(args)
        self._traced.check(tree, leaves)
        if self._debugged is not None and any(isinstance(x, Tracer) for x in leaves):
            raise not_traceable(self._traced.program.name)
        self._traced.check_devices(leaves)
        outs = self._compiled(*leaves)
        if self._debugged is not None:
            raise_if_hung(self._debugged.plan, np.asarray(outs.report).tolist())
            outs = outs.outputs
        return jax.tree.unflatten(self._traced.out_tree, outs)

    def why(self) -> str:
        """Which implementation runs, and why."""
        return str(self.choice)

    def as_text(self) -> str:
        """The optimised HLO of the device."""
        return self._compiled.as_text()
