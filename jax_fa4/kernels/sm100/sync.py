"""Signals between warps around the tensor pipe: commits, warp arrivals, and the tcgen05 fences that the DSL omits."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05


@cute.jit
def commit(barrier):
    """`barrier` completes when every product that this warp has issued so far has. Called by a converged warp."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


# The address is made at the spot: kept over a loop it costs a register more than the softmax groups have.
_ARRIVE_AT = """{{ .reg .b32 there; mapa.shared::cluster.u32 there, {{$r0}}, {rank};
mbarrier.arrive{order}.shared::cluster.b64 _, [there]; }}"""


@cute.jit
def arrive_warp(barrier, rank: cutlass.Constexpr = None, data: cutlass.Constexpr = False):
    """One arrival for the warp, after all its lanes got here, at `barrier` of this CTA or of the cluster's CTA `rank`.

    data: whether it hands over shared memory to another CTA. What is in tensor memory needs execution order only.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if const_expr(rank is None):
            cute.arch.mbarrier_arrive(barrier)
        else:
            text = _ARRIVE_AT.format(rank=rank, order=".release.cluster" if data else "").replace("\n", " ")
            cute.arch.inline_ptx(text, read_only_args=[barrier.toint()])


@cute.jit
def wait_pair(barrier, phase):
    """Waits for what threads of the other CTA did to shared memory too; a plain wait is ordered within its CTA only."""
    cute.arch.inline_ptx(
        """{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};
        @!done bra again; }""".replace("\n", " "),
        read_only_args=[barrier.toint(), Int32(phase)],
    )


@cute.jit
def meet():
    """All threads of all CTAs of the cluster."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def after_wait():
    """Orders this thread's later tcgen05 work behind a wait. No copy, product or pipeline of the DSL emits it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def before_arrive():
    """Orders this thread's earlier tcgen05 work before an arrival."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
