"""Signals between warps around the tensor pipe: commits, warp arrivals, and the tcgen05 fences that the DSL omits."""

import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05


@cute.jit
def commit(barrier):
    """`barrier` completes when every product that this warp has issued so far has. Called by a converged warp."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@cute.jit
def arrive_warp(barrier):
    """One arrival for the warp, after all its lanes got here."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def after_wait():
    """Orders this thread's later tcgen05 work behind a wait. No copy, product or pipeline of the DSL emits it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def before_arrive():
    """Orders this thread's earlier tcgen05 work before an arrival."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
