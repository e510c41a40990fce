"""A traced program as one JAX primitive, and which implementation runs it.

The primitive can be bound anywhere inside jax.jit. What it becomes is decided when it
is lowered, for the platform of that lowering: the megakernel where a plan can be made
for the device, plain JAX elsewhere, or what the user named. vmap, grad and several
devices are refused here, whatever the implementation.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mkdsl.errors import NO_SRC, LaunchError, PlanError, SrcInfo
from mkdsl.lang.program import ITEM_BYTES, Program
from mkdsl.lower.ir import KernelPlan
from mkdsl.lower.machine import (
    H200,
    MACHINES,
    Machine,
    check_runs,
    machine_for,
    simulated,
)
from mkdsl.lower.pages import stream_operands
from mkdsl.lower.pipeline import Options, prove_program
from mkdsl.lower.proof import Proof
from mkdsl.runtime.interpret_program import run_program

if TYPE_CHECKING:
    from mkdsl.lower.emit.kernel import Launcher

Array = Any
Implementation = Literal["mosaic_gpu", "xla", "simulate"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementation runs, the machine that it is planned for, and why."""

    implementation: Implementation
    machine: Machine
    why: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.why}"


@dataclass(frozen=True, eq=False)
class Executable:
    """A program and what the user asked for. Compared by identity.

    Attributes:
        implementation: None leaves it to the platform.
        machine: to plan for; None is that of the device.
        src: the user's program function.
    """

    program: Program
    implementation: Implementation | None = None
    machine: Machine | None = None
    options: Options | None = None
    src: SrcInfo = NO_SRC
    _proofs: dict[Machine, Proof] = field(
        default_factory=dict[Machine, Proof], init=False
    )

    def __post_init__(self) -> None:
        check_implementation(self.implementation)

    def proof(self, machine: Machine) -> Proof:
        """The plan for a machine with its proof, made once."""
        if machine not in self._proofs:
            self._proofs[machine] = prove_program(self.program, machine, self.options)
        return self._proofs[machine]

    def plan(self, machine: Machine) -> KernelPlan:
        """The plan for a machine."""
        return self.proof(machine).plan

    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each output of the program."""
        dtypes = {b.name: jnp.dtype(b.dtype) for b in self.program.buffers}
        outs = self.program.outputs
        return [jax.ShapeDtypeStruct(o.shape, dtypes[o.buffer]) for o in outs]

    def choose(self, platform: str) -> Choice:
        """What runs on a platform.

        Raises:
            LaunchError: the implementation that the user named cannot run there.
        """
        if self.implementation == "xla":
            return Choice("xla", self.machine or H200, "asked for")
        if self.implementation == "simulate":
            machine = self.machine or _simulated(self.program)
            return Choice("simulate", machine, "asked for")
        named = self.implementation == "mosaic_gpu"
        try:
            machine = _gpu_machine(platform, self.machine)
        except LaunchError as error:
            if named:
                raise LaunchError(
                    f"megakernel '{self.program.name}': implementation='mosaic_gpu' "
                    f"cannot run: {error.what}",
                    hint=error.hint or "use implementation=None or 'xla'",
                ) from error
            return Choice("xla", self.machine or H200, error.what)
        why = "asked for" if named else f"the device is a {machine.device_kind}"
        return Choice("mosaic_gpu", machine, why)

    def function(self, choice: Choice) -> Callable[..., Sequence[Array]]:
        """The implementation as a function of the program's inputs."""
        if choice.implementation == "xla":
            return lambda *inputs: run_program(self.program, inputs)
        try:
            if choice.implementation == "mosaic_gpu":
                return self.launcher(choice.machine)
            plan = self.plan(choice.machine)
        except PlanError as error:
            error.add_note("implementation='xla' runs the program without a plan")
            raise
        return functools.partial(jax.pure_callback, _simulation(plan), self.outputs())

    def launcher(self, machine: Machine, *, debug: bool = False) -> "Launcher":
        """The kernel for a machine as a function of the program's inputs."""
        from mkdsl.lower.emit.code import check_streams
        from mkdsl.lower.emit.kernel import build

        check_streams(self.program)
        return build(self.proof(machine), debug=debug)

    def simulate(self, inputs: Sequence[Array]) -> list[Array]:
        """Run in the simulator at once, not from inside of a compiled computation."""
        plan = self.plan(self.choose("cpu").machine)
        return [jnp.asarray(x) for x in _simulation(plan)(*inputs)]


def check_implementation(name: Any) -> None:
    """Refuse a name that is no implementation."""
    if name is not None and name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise LaunchError(f"{name!r} is no implementation", hint=f"use None, {known}")


def _simulation(plan: KernelPlan) -> Callable[..., list[np.ndarray]]:
    from mkdsl.runtime.interpret_schedule import simulate

    def run(*inputs: Array) -> list[np.ndarray]:
        return simulate(plan, [np.asarray(x) for x in inputs], seed=0)

    return run


def _simulated(program: Program) -> Machine:
    """A small machine; one that is twice as wide where float32 streams, so that plans
    are those of bfloat16."""
    wide = any(
        ITEM_BYTES[call.task.params[i].dtype] > 2
        for call in program.calls()
        for stream in call.task.streams
        for i in stream_operands(stream)
    )
    if not wide:
        return simulated()
    return simulated(page_bytes=2 * H200.page_bytes, smem_bytes=2 * H200.smem_bytes)


def _gpu_machine(platform: str, machine: Machine | None) -> Machine:
    """The machine to plan for on a platform.

    Raises:
        LaunchError: there is none; the text says why.
    """
    if platform != "cuda":
        raise LaunchError(
            f"it needs a CUDA device, and the platform is {platform!r}",
            hint="install jax[cuda13] on a machine with a supported GPU",
        )
    if machine is not None:
        check_runs(machine)
    kind = device_kind()
    if kind is None:
        if machine is None:
            names = ", ".join(m.name for m in MACHINES if m.runs_kernel)
            raise LaunchError(
                "lowered for 'cuda' on a machine without a CUDA device",
                hint=f"pass machine=, one of {names}",
            )
        return machine
    if machine is not None and machine.device_kind != kind:
        raise LaunchError(
            f"machine {machine.name!r} is a {machine.device_kind!r}, the device is a "
            f"{kind!r}",
            hint="leave machine= out",
        )
    machine = machine or machine_for(kind)
    sms = device_sms()
    if sms is not None and sms < machine.sms:
        raise LaunchError(
            f"machine {machine.name!r} has {machine.sms} SMs, the device has {sms}: "
            "not all CTAs would be co-resident, and the kernel would hang",
            hint="give the process the whole card, without MIG",
        )
    return machine


def default_platform() -> str:
    """Platform of JAX's default backend, as lowering names it."""
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def device_kind() -> str | None:
    """Kind of the first CUDA device, None if there is none."""
    try:
        return jax.local_devices(backend="cuda")[0].device_kind
    except RuntimeError:
        return None


def device_sms() -> int | None:
    """SMs of the first CUDA device, None if there is none or it does not say."""
    try:
        return getattr(jax.local_devices(backend="cuda")[0], "core_count", None)
    except RuntimeError:
        return None


def _outputs(*_: Any, executable: Executable) -> list[Any]:
    return [core.ShapedArray(o.shape, o.dtype) for o in executable.outputs()]


def _refuse(what: str, hint: str, *_: Any, executable: Executable) -> NoReturn:
    raise LaunchError(
        f"megakernel '{executable.program.name}': {what} is not supported",
        executable.src,
        hint,
    )


_NO_VMAP = (
    "jax.vmap",
    "batch columns inside the program instead: a tile is [columns, features]",
)
_NO_GRAD = (
    "differentiation",
    "differentiate a plain-JAX forward pass; jax.lax.stop_gradient keeps "
    "derivatives away from a megakernel",
)


def _lower(platform: str | None, ctx: Any, *args: Any, executable: Executable) -> Any:
    where = ctx.module_context.axis_context
    mesh = getattr(where, "mesh", None)
    devices = getattr(where, "num_devices", None) or (mesh.size if mesh else 1)
    if devices > 1:
        _refuse(
            f"a computation over {devices} devices",
            "put all arguments on one device, e.g. jax.device_put(x, jax.devices()[0])",
            executable=executable,
        )
    platform = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    function = executable.function(executable.choose(cast(str, platform)))
    return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


megakernel_p = Primitive("megakernel")
megakernel_p.multiple_results = True
megakernel_p.def_abstract_eval(_outputs)
megakernel_p.def_impl(functools.partial(dispatch.apply_primitive, megakernel_p))
batching.primitive_batchers[megakernel_p] = functools.partial(_refuse, *_NO_VMAP)
ad.primitive_jvps[megakernel_p] = functools.partial(_refuse, *_NO_GRAD)
mlir.register_lowering(megakernel_p, functools.partial(_lower, None))
mlir.register_lowering(megakernel_p, functools.partial(_lower, "cuda"), platform="cuda")
