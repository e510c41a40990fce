"""The machines that a plan can be made for: sizes and measured speeds.

The numbers of H200 were read from the device or measured on it on 2026-11-29 (driver
580; gpu_facts.md). A new machine is one more constant here.
"""

from dataclasses import dataclass

from mkdsl.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Machine:
    """What the planner knows of a device.

    Attributes:
        device_kind: as `jax.Device.device_kind` names it.
        sms: streaming multiprocessors; one CTA each.
        smem_bytes: shared memory that one block may use.
        page_bytes: one slot of the page ring.
        read_bytes_per_s: what all SMs together can read from device memory.
        stage_ns: from the store of the last producer to the first load of its
            consumer on another SM: store, release, wait.
        task_ns: what a task costs its SM besides its bytes.
        in_flight: most page loads of one SM under way at a time.
    """

    name: str
    device_kind: str
    sms: int
    smem_bytes: int
    page_bytes: int
    read_bytes_per_s: float
    stage_ns: float
    task_ns: float
    in_flight: int

    def __post_init__(self) -> None:
        if self.sms < 1 or self.page_bytes < 1 or self.in_flight < 1:
            raise ValueError(f"{self}: sms, page_bytes and in_flight start at 1")
        if self.smem_bytes < self.page_bytes:
            raise ValueError(
                f"{self.name}: {self.smem_bytes=} holds no page of {self.page_bytes=}"
            )
        if min(self.read_bytes_per_s, self.stage_ns) <= 0 or self.task_ns < 0:
            raise ValueError(f"{self}: speeds are positive")

    def read_ns(self, size_bytes: int) -> float:
        """Time of one SM to read so many bytes while all SMs read."""
        return size_bytes * self.sms * 1e9 / self.read_bytes_per_s

    @property
    def page_ns(self) -> float:
        """Time between pages of one SM while all SMs stream (H200: 940 ns)."""
        return self.read_ns(self.page_bytes)


# Measured 2026-11-29 on an NVIDIA H200. Read ceiling 4.60e12 B/s: a kernel that reads
# 4.3 GB. stage_ns: from stored to signalled 1.1 to 1.7 us under load, polled 0.4,
# fetched 0.6 to 1.4, stored 0.2. task_ns: words from shared memory 0.2 us. in_flight: 2
# pages gave 600 us per step, 1 page 674, 4 pages 636 (prototype of Llama-3.2-1B).
H200 = Machine(
    name="h200",
    device_kind="NVIDIA H200",
    sms=132,
    smem_bytes=232_448,
    page_bytes=32_768,
    read_bytes_per_s=4.60e12,
    stage_ns=4000.0,
    task_ns=200.0,
    in_flight=2,
)

MACHINES = (H200,)


def simulated(
    sms: int = 4, page_bytes: int = 32_768, smem_bytes: int = H200.smem_bytes
) -> Machine:
    """A small H200 for the simulator: fewer SMs, the same speed of each."""
    return Machine(
        name=f"simulated{sms}",
        device_kind="simulated",
        sms=sms,
        smem_bytes=smem_bytes,
        page_bytes=page_bytes,
        read_bytes_per_s=H200.read_bytes_per_s * sms / H200.sms,
        stage_ns=H200.stage_ns,
        task_ns=H200.task_ns,
        in_flight=H200.in_flight,
    )


def machine_for(device_kind: str) -> Machine:
    """The machine of that device kind.

    Raises:
        LaunchError: no plan can be made for it; the text lists those supported.
    """
    for machine in MACHINES:
        if machine.device_kind == device_kind:
            return machine
    known = ", ".join(repr(m.device_kind) for m in MACHINES)
    raise LaunchError(
        f"no machine for device kind {device_kind!r}; supported: {known}",
        hint="run with implementation='xla', or add a measured Machine to "
        "mkdsl/lower/machine.py",
    )
