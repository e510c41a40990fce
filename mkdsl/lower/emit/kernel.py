"""One persistent Pallas kernel for a whole KernelPlan.

Grid = one CTA per SM, four warpgroups each: loader, fetcher, consumer, storer. Every SM
copies its instruction words and the scalars of index expressions to shared memory, then
each role walks them.
Counters live in device memory and start at zero in every launch. State buffers are
written in place through references.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.errors import LaunchError
from mkdsl.lang.program import Access, Output
from mkdsl.lower.emit import walk
from mkdsl.lower.emit.bounded import Watch
from mkdsl.lower.emit.code import Code, check_streams, code_of
from mkdsl.lower.emit.consumer import consumer
from mkdsl.lower.emit.fetcher import fetcher
from mkdsl.lower.emit.loader import loader
from mkdsl.lower.emit.memory import memory_types, page_views
from mkdsl.lower.emit.physical import from_physical, to_physical
from mkdsl.lower.emit.storer import storer
from mkdsl.lower.emit.sync import Counters
from mkdsl.lower.encode import BLOCK_WORDS
from mkdsl.lower.hang import REPORT_WORDS, ROLES, not_traceable, raise_if_hung
from mkdsl.lower.ir import MOST_BLOCKS, KernelPlan
from mkdsl.lower.layout import plan_layouts
from mkdsl.lower.machine import H200, Machine
from mkdsl.lower.pages import round_up
from mkdsl.lower.pieces import buffers_in_pieces
from mkdsl.lower.proof import Proof
from mkdsl.lower.stamps import STAMPS
from mkdsl.lower.verify_launch import verify_launch

Array = Any
Ref = Any

# Registers per thread and role, multiples of 8, 512 in all (64K for 4 warpgroups).
REGISTERS = {"consumer": 240, "loader": 40, "fetcher": 40, "storer": 40}
# Warpgroup number of each role.
CONSUMER, LOADER, FETCHER, STORER = range(4)


class Results(NamedTuple):
    """What a launch returns.

    Attributes:
        outputs: of the program, in its order.
        stamps: int32 [SMs, instructions, stamps], ns, see lower/stamps.py; or None.
        report: of a debug build, int32, for hang.raise_if_hung; or None.
    """

    outputs: tuple[Array, ...]
    stamps: Array | None
    report: Array | None


class Launcher:
    """A planned program as a function of arrays.

    Args:
        plan: a proof; or a plan, which is proved here, or refused.
        interpret: Pallas interpreter parameters, to run on a CPU: one SM, without
            device counters.
        machine: what a plan without a proof is for.
        timestamps: also write the time of every step, see `run`.
        debug: bound every wait. A call that hangs then raises a HangError, and
            what makes other plans unproved is let through: their waits give up.

    Raises:
        VerifyError: the plan is not proved; in a debug build, it could block a barrier
            inside an SM or leave its memory.
    """

    def __init__(
        self,
        plan: KernelPlan | Proof,
        interpret: Any = None,
        *,
        machine: Machine = H200,
        timestamps: bool = False,
        debug: bool = False,
    ) -> None:
        if debug and interpret is not None:
            raise LaunchError(
                "a debug build bounds waits, and the interpreter has none",
                hint="leave out debug=True: there an SM does one task after another",
            )
        plan, self.encoded = verify_launch(plan, machine, bounded=debug)
        graph = plan.schedule.events.graph
        self.plan, self.interpret = plan, interpret
        self.timestamps, self.debug = timestamps, debug
        self._jitted = jax.jit(self.run)
        self.program = graph.program
        chunks = interpret is None
        self.layouts = plan_layouts(graph.buffers, graph.kinds, chunks=chunks)
        pieced = buffers_in_pieces(graph.kinds)
        self.codes = [
            code_of(i, k, self.layouts, plan.page_bytes, pieced)
            for i, k in enumerate(graph.kinds)
        ]
        self.offsets, self.scalar_count = self._scalar_table()
        used = [b for b in graph.buffers if b.name in self.layouts]
        self.inputs = [b for b in used if b.role == "input"]
        self.states = [b for b in used if b.role == "state"]
        self.temps = [b for b in used if b.role == "temp"]

    def _scalar_table(self) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
        buffers = {b.name: b for b in self.program.buffers}
        names = sorted({n for c in self.codes for n in _scalar_reads(c)})
        offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
        at = 0
        for name in names:
            offsets[name] = (at, buffers[name].shape)
            at += math.prod(buffers[name].shape)
        # A copy moves a multiple of 128 bytes (one warpgroup).
        return offsets, round_up(max(at, 1), BLOCK_WORDS if at > BLOCK_WORDS else 32)

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Run the program: inputs in its order, outputs in its order.

        Raises:
            HangError: a debug build gave up a wait.
            LaunchError: a debug build is called inside jax.jit.
        """
        if not self.debug:
            return self.run(*arrays).outputs
        if any(isinstance(x, Tracer) for x in arrays):
            raise not_traceable(self.program.name)
        results = self._jitted(*arrays)
        raise_if_hung(self.plan, np.asarray(results.report).tolist())
        return results.outputs

    def timed(self, *arrays: Array) -> tuple[tuple[Array, ...], Array | None]:
        """Outputs and stamps."""
        return self.run(*arrays)[:2]

    def run(self, *arrays: Array) -> Results:
        """As a call, for use inside jax.jit; a debug build does not raise here."""
        values = dict(zip(self.program.inputs, arrays, strict=True))
        scalars = [values[n].reshape(-1).astype(jnp.int32) for n in self.offsets]
        flat = jnp.concatenate([*scalars, jnp.zeros(0, jnp.int32)])
        flat = jnp.pad(flat, (0, self.scalar_count - flat.shape[0]))
        words = jnp.asarray(np.asarray(self.encoded.words, np.int32))
        ins = [to_physical(self.layouts[b.name], values[b.name]) for b in self.inputs]
        refs = [
            jax.new_ref(to_physical(self.layouts[b.name], values[b.name]))
            for b in self.states
        ]
        reports: list[Ref] = []
        if self.debug:
            shape = (len(self.encoded.words), len(ROLES), REPORT_WORDS)
            reports.append(jax.new_ref(jnp.zeros(shape, jnp.int32)))
        stamps: list[Ref] = []
        if self.timestamps:
            # 0: not noted. Memory that a kernel allocates for a result holds anything.
            stamps.append(jax.new_ref(jnp.zeros(self._stamp_shape(), jnp.int32)))
        temps = self._kernel()(words, flat, *ins, *refs, *reports, *stamps)
        results = dict(zip((b.name for b in self.temps), temps, strict=True))
        results |= {
            b.name: jax.freeze(r) for b, r in zip(self.states, refs, strict=True)
        }
        outputs = self.program.outputs
        return Results(
            tuple(self._output(o, values, results) for o in outputs),
            jax.freeze(stamps[0]) if stamps else None,
            jax.freeze(reports[0]) if reports else None,
        )

    def _output(
        self, o: Output, inputs: Mapping[str, Array], results: Mapping[str, Array]
    ) -> Array:
        if o.buffer not in results:
            return inputs[o.buffer]
        whole = from_physical(self.layouts[o.buffer], results[o.buffer])
        return (whole if o.layer is None else whole[o.layer]).reshape(o.shape)

    def _kernel(self) -> Callable[..., Any]:
        plan = self.plan
        shapes = [
            jax.ShapeDtypeStruct(self.layouts[b.name].shape, jnp.dtype(b.dtype))
            for b in self.temps
        ]
        params = plgpu.CompilerParams(
            lowering_semantics=mgpu.core.LoweringSemantics.Lane
        )
        barrier = plgpu.Barrier
        arrivals = self._arrivals()
        length = len(self.encoded.words[0])
        return plgpu.kernel(
            self._body,
            out_type=shapes,
            grid=(len(self.encoded.words),),
            grid_names=("sm",),
            num_threads=4,
            thread_name="role",
            compiler_params=params,
            interpret=self.interpret or False,
            scratch_types=[
                plgpu.SMEM((length,), jnp.int32),
                plgpu.SMEM((self.scalar_count,), jnp.int32),
                barrier(num_arrivals=len(list(self._preamble()))),
                barrier(num_arrivals=arrivals[0], num_barriers=plan.ring),
                barrier(num_barriers=plan.ring),
                *[barrier()] * 3,
                barrier(num_arrivals=1 if self.interpret is None else 2),
                *(barrier(num_arrivals=n) for n in arrivals[1]),
                *(
                    barrier(num_arrivals=n, num_barriers=MOST_BLOCKS - 1)
                    for n in self._block_arrivals()
                ),
            ],
        )

    def _stamp_shape(self) -> tuple[int, int, int]:
        queues = self.plan.schedule.queues
        return len(queues), max(map(len, queues)), len(STAMPS)

    def _arrivals(self) -> tuple[int, list[int]]:
        """Copies of a page at most; numbers of copies of resident operands."""
        pages = [s.copies for c in self.codes for s in c.streams]
        return max([1, *pages]), sorted({c.arrivals for c in self.codes})

    def _block_arrivals(self) -> list[int]:
        """Numbers of copies of the blocks of resident operands."""
        return sorted({c.block_arrivals for c in self.codes if c.kind.blocks > 1})

    def _preamble(self) -> Iterator[tuple[int, int, int]]:
        """(which, start, size) of the copies of words and scalars."""
        for which, n in enumerate((len(self.encoded.words[0]), self.scalar_count)):
            for at in range(0, n, BLOCK_WORDS):
                yield which, at, min(BLOCK_WORDS, n - at)

    def _body(self, words_gmem: Ref, scalars_gmem: Ref, *refs: Ref) -> None:
        rest = list(refs)
        arrays = {b.name: rest.pop(0) for b in (*self.inputs, *self.states)}
        report = rest.pop(0).at[lax.axis_index("sm")] if self.debug else None
        stamps = rest.pop(0).at[lax.axis_index("sm")] if self.timestamps else None
        arrays |= {b.name: rest.pop(0) for b in self.temps}
        words, scalars, start, *barriers = rest
        role, sm = lax.axis_index("role"), lax.axis_index("sm")

        @pl.when(role == LOADER)
        def _() -> None:
            sources = (words_gmem.at[sm], scalars_gmem)
            for which, at, size in self._preamble():
                span = pl.ds(at, size)
                target = (words, scalars)[which].at[span]
                plgpu.copy_gmem_to_smem(sources[which].at[span], target, start)

        plgpu.barrier_wait(start)
        counters = None
        if self.interpret is None:
            # One counter more is the flag of a debug build.
            count = max(self.encoded.events, 1) + self.debug
            events = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
            flag = events.at[count - 1]
            watch = None if report is None else Watch(flag, report)
            counters = Counters(events, watch)

        def scoped(ring: Any, arena: Any, staging: Any, scratch: Any) -> None:
            self._roles(
                arrays,
                words,
                scalars,
                barriers,
                counters,
                stamps,
                ring,
                arena,
                staging,
                scratch,
            )

        pl.run_scoped(
            scoped,
            *memory_types(self.codes, self.layouts, self.plan),
            collective_axes="role",
        )

    def _roles(
        self,
        arrays: dict[str, Ref],
        words: Ref,
        scalars: Ref,
        barriers: Sequence[Ref],
        counters: Counters | None,
        stamps: Ref | None,
        ring: Sequence[Ref],
        arena: Sequence[Any],
        staging: Sequence[Any],
        scratch: Sequence[Any],
    ) -> None:
        n, views = len(self.codes), page_views(self.codes)
        arrivals, counts = self._arrivals()
        full, empty, free, ready, drained, done, *landed = barriers
        # The interpreter gives the two views of a block memory of their own.
        raw = 1 if self.interpret is None else 0
        memory = walk.Memory(
            arrays,
            words,
            scalars,
            dict(zip(views, ring, strict=False)),
            {
                rows: ring[len(views) + i if raw else i]
                for i, (rows, tiled) in enumerate(views)
                if not tiled
            },
            arena[:n],
            arena[n : 2 * n],
            arena[2 * n :],
            scratch[:n],
            scratch[n:],
            staging[:n],
            staging[raw * n : (raw + 1) * n],
            full,
            empty,
            dict(zip(counts, landed, strict=False)),
            free,
            ready,
            drained,
            done,
            dict(zip(self._block_arrivals(), landed[len(counts) :], strict=True)),
        )
        plan = self.plan
        kernel = walk.Kernel(
            self.codes,
            self.encoded.stride,
            self.offsets,
            plan.ring,
            plan.in_flight,
            arrivals,
            self.encoded.blocks_at,
            memory,
            counters,
            stamps,
        )
        table = {
            CONSUMER: consumer,
            LOADER: loader,
            FETCHER: fetcher,
            STORER: storer,
        }
        role = lax.axis_index("role")
        for number, run in table.items():

            @pl.when(role == number)
            def _(run: Callable[[walk.Kernel], None] = run) -> None:
                if self.interpret is None:
                    more = "increase" if run is consumer else "decrease"
                    plgpu.set_max_registers(REGISTERS[run.__name__], action=more)
                run(kernel)


def _scalar_reads(code: Code) -> Iterator[str]:
    """Integer inputs whose elements the index expressions of a kind read."""
    for o in (*code.operands, *(b.operand for b in code.results)):
        yield from _access_reads(o.access)
        if o.param.use == "scalar":
            yield o.access.buffer


def _access_reads(access: Access) -> Iterator[str]:
    for axis in access.axes:
        yield from axis.start.reads
        if axis.extent is not None:
            yield from axis.extent.reads


def build(
    plan: KernelPlan | Proof,
    interpret: Any = None,
    *,
    machine: Machine = H200,
    debug: bool = False,
) -> Launcher:
    """The planned program as a function of its inputs; see Launcher.

    Raises:
        PlanError: a stream is no operand of the tensor cores.
        VerifyError: the plan is not proved.
    """
    schedule = (plan.plan if isinstance(plan, Proof) else plan).schedule
    check_streams(schedule.events.graph.program)
    return Launcher(plan, interpret, machine=machine, debug=debug)
