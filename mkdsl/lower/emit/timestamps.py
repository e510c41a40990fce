"""Device timestamps of every task and role, for timelines.

Stamps are the low 32 bits of %globaltimer in ns (PTX ISA, "Special Registers";
on the H200 it advanced in steps of 32 ns), written with one plain store each to an
array that nothing else reads; its layout is in lower/stamps.py.
"""

# pyright: reportCallIssue=false
# (Pallas is typed in part.)

from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any


def stamp(ref: Ref) -> None:
    """Write the time to an element in device memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def write(ctx: Any, target: Any) -> None:
        del ctx
        one = mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP)
        mgpu_utils.inline_ptx(
            "{ .reg .u32 t; mov.u32 t, %globaltimer_lo; @$1 st.global.u32 [$0], t; }",
            mgpu_utils.memref_ptr(target),
            one,
            has_side_effects=True,
        )

    write(ref)
