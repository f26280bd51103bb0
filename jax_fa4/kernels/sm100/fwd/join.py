"""Arrivals at the barriers that the MMA warp waits for: its own CTA's, or those of the CTA that leads a pair."""

import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.sm100.sync import arrive_warp


@cute.jit
def join(ctx, barrier):
    """Each thread of a group calls it. A pair arrives by warps: it crosses to another CTA, and 16 do for 512."""
    if const_expr(ctx.plan.pair):
        arrive_warp(barrier, ctx.plan.leader)
    else:
        cute.arch.mbarrier_arrive(barrier)
