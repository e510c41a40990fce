"""The machines that a plan can be made for: sizes and speeds, with their sources.

What is known of a device kind is a file in machines/, one table for each number:

    [sms]
    value = 132
    origin = "device"         one of ORIGINS
    source = "2026-11-29, driver 580.159.04"

A new machine is one more file, and a constant here if the code names it.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mkdsl.errors import LaunchError

FOLDER = Path(__file__).parent / "machines"
ORIGINS = ("device", "measured", "vendor", "chosen", "assumed")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the value of a field of a Machine is from."""

    name: str
    origin: str
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What the planner knows of a device.

    Attributes:
        device_kind: as `jax.Device.device_kind` names it.
        sms: streaming multiprocessors; one CTA each.
        smem_bytes: shared memory that one block may use.
        page_bytes: one slot of the page ring.
        read_bytes_per_s: what all SMs together can read from device memory.
        flops_per_s: multiplications and additions of all SMs together, bf16 with f32
            accumulation, dense.
        stage_ns: what one more dependent stage costs a step, its tasks included.
        task_ns: what a task costs its SM besides its bytes.
        in_flight: most page loads of one SM under way at a time.
        signal_ns: from the end of a body to its signal: store and release.
        wait_ns: from the last signal of an event to the end of a wait for it.
        operands_ns: from the end of a wait to the arrival of resident operands.
        computed_ns: time of a body for an element that it computes for mk.dot.
        launch_ns: of a step without tasks, counters zeroed.
        runs_kernel: whether the kernel runs on it; else it is planned and simulated.
        sources: of the numbers.
    """

    name: str
    device_kind: str
    sms: int
    smem_bytes: int
    page_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
    stage_ns: float
    task_ns: float
    in_flight: int
    signal_ns: float
    wait_ns: float
    operands_ns: float
    computed_ns: float
    launch_ns: float
    runs_kernel: bool = True
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.sms < 1 or self.page_bytes < 1 or self.in_flight < 1:
            raise ValueError(f"{self}: sms, page_bytes and in_flight start at 1")
        if self.smem_bytes < self.page_bytes:
            raise ValueError(
                f"{self.name}: {self.smem_bytes=} holds no page of {self.page_bytes=}"
            )
        times = self.task_ns, self.signal_ns, self.wait_ns, self.operands_ns
        speeds = self.read_bytes_per_s, self.flops_per_s, self.stage_ns
        if min(speeds) <= 0 or min(times) < 0:
            raise ValueError(f"{self}: speeds are positive")

    def read_ns(self, size_bytes: int) -> float:
        """Time of one SM to read so many bytes while all SMs read."""
        return size_bytes * self.sms * 1e9 / self.read_bytes_per_s

    @property
    def page_ns(self) -> float:
        """Time between pages of one SM while all SMs stream (H200: 940 ns)."""
        return self.read_ns(self.page_bytes)

    @property
    def hand_off_ns(self) -> float:
        """From the end of a body to the operands of a task that waited for it."""
        return self.signal_ns + self.wait_ns + self.operands_ns


def read_machine(path: Path) -> Machine:
    """The machine that a file describes.

    Raises:
        ValueError: a value is missing, unknown, or has no source.
    """
    with path.open("rb") as file:
        table = tomllib.load(file)
    plain = {n: v for n, v in table.items() if not isinstance(v, dict)}
    numbers = {n: v for n, v in table.items() if isinstance(v, dict)}
    sources = tuple(_source(path, name, entry) for name, entry in numbers.items())
    values = {name: entry["value"] for name, entry in numbers.items()}
    try:
        return Machine(**plain, **values, sources=sources)
    except TypeError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _source(path: Path, name: str, entry: Mapping[str, Any]) -> Source:
    if set(entry) != {"value", "origin", "source"} or entry["origin"] not in ORIGINS:
        raise ValueError(
            f"{path.name}: [{name}] has {', '.join(entry)}; expected value, source and "
            f"an origin, one of {', '.join(ORIGINS)}"
        )
    return Source(name, entry["origin"], entry["source"])


H200 = read_machine(FOLDER / "nvidia_h200.toml")
RTX_4090 = read_machine(FOLDER / "nvidia_rtx_4090.toml")
MACHINES = (H200, RTX_4090)


def simulated(
    sms: int = 4,
    page_bytes: int | None = None,
    smem_bytes: int | None = None,
    like: Machine = H200,
) -> Machine:
    """A small machine for the simulator: fewer SMs, the same speed of each.

    Args:
        page_bytes, smem_bytes: where they are not those of `like`.
    """
    return replace(
        like,
        name=f"simulated{sms}",
        device_kind="simulated",
        sms=sms,
        smem_bytes=smem_bytes or like.smem_bytes,
        page_bytes=page_bytes or like.page_bytes,
        read_bytes_per_s=like.read_bytes_per_s * sms / like.sms,
        flops_per_s=like.flops_per_s * sms / like.sms,
        runs_kernel=False,
        sources=(),
    )


def machine_for(device_kind: str) -> Machine:
    """The machine of that device kind, for the kernel.

    Raises:
        LaunchError: the kernel does not run on it; the text lists where it does.
    """
    for machine in MACHINES:
        if machine.device_kind == device_kind:
            check_runs(machine)
            return machine
    raise LaunchError(
        f"no machine for device kind {device_kind!r}; supported: {_supported()}",
        hint="run with implementation='xla', or add a measured machine to "
        "mkdsl/lower/machines/",
    )


def check_runs(machine: Machine) -> None:
    """Refuse a machine that plans are made for, but whose code is not.

    Raises:
        LaunchError: the kernel does not run on it.
    """
    if not machine.runs_kernel:
        raise LaunchError(
            f"machine {machine.name!r} ({machine.device_kind!r}) can be planned and "
            f"simulated, but the kernel does not run on it; supported: {_supported()}",
            hint="run with implementation='xla' or 'simulate'",
        )


def _supported() -> str:
    return ", ".join(repr(m.device_kind) for m in MACHINES if m.runs_kernel)
