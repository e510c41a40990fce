"""A wait that gives up and says so: all waits of a debug build.

It polls as `Counters.wait` does, and in every round also a flag of the whole kernel
and the timer. Whoever gives up reports, raises the flag and goes on as if the count had
been reached, so that barriers inside an SM keep moving and the kernel ends. Before it
goes on it sleeps for about a millisecond: signals of tasks that ran on garbage would
otherwise satisfy the waits of others before these have reported.
"""

# pyright: reportCallIssue=false
# (Pallas is typed in part.)

from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lower.hang import TIMEOUT_NS

Ref = Any
Scalar = Any

# $0 counter, $1 flag, $2 row of the report, $3 event, $4 threshold, $5 position.
# Labels are local to the braces (PTX ISA, "Statements: Label"), and one thread runs it.
_WAIT = f"""{{
.reg .pred met, up, late, told;
.reg .b32 start, waited, seen, flag, state;
mov.u32 start, %globaltimer_lo;
POLL:
ld.relaxed.gpu.global.b32 flag, [$1];
ld.relaxed.gpu.global.b32 seen, [$0];
setp.ge.u32 met, seen, $4;
@met bra DONE;
mov.u32 waited, %globaltimer_lo;
sub.u32 waited, waited, start;
setp.ne.u32 up, flag, 0;
@up bra GIVE_UP;
setp.ge.u32 late, waited, {TIMEOUT_NS};
@!late bra POLL;
GIVE_UP:
ld.relaxed.gpu.global.b32 state, [$2];
setp.ne.u32 told, state, 0;
@told bra DONE;
selp.u32 state, 2, 1, up;
st.global.v4.b32 [$2], {{state, $5, $3, $4}};
st.global.v2.b32 [$2+16], {{seen, waited}};
st.relaxed.gpu.global.b32 [$1], 1;
nanosleep.u32 1000000;
DONE:
fence.acquire.gpu;
}}"""


class Place(NamedTuple):
    """Where a wait is made: row of the role in hang.ROLES, position in the queue."""

    row: int
    position: Scalar


class Watch(NamedTuple):
    """What the bounded waits of an SM share.

    Attributes:
        flag: a counter that no event has, zero until someone gives up.
        report: int32 [ROLES, REPORT_WORDS] of this SM, zero at launch.
    """

    flag: Ref
    report: Ref

    def wait(self, counter: Ref, event: Scalar, least: Scalar, where: Place) -> None:
        """Return once a counter has reached `least`, or has been given up."""
        scalar, ref = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()

        @plgpu.inline_mgpu(arg_types=(ref, ref, ref, scalar, scalar, scalar))
        def poll(ctx: Any, *args: Any) -> None:
            del ctx
            pointers = [mgpu_utils.memref_ptr(a) for a in args[:3]]
            scalars = [a.registers.item() for a in args[3:]]
            with mgpu_utils.single_thread(mgpu_utils.ThreadSubset.WARPGROUP):
                mgpu_utils.inline_ptx(_WAIT, *pointers, *scalars, has_side_effects=True)
            mgpu_utils.warpgroup_barrier()

        row = self.report.at[where.row, 0]
        poll(counter, self.flag, row, event, least, where.position)
