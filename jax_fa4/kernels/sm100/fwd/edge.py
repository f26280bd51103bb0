"""The edge warp: zeroes the rows of V past the length in the last key block.

Weights of hidden keys are 0, but 0 * NaN is NaN. Past S the copy engine fills zeros; between the length and S is the
caller's memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.ring import start, wait
from jax_fa4.kernels.sm100.fwd.plan import WARP
from jax_fa4.kernels.sm100.fwd.work import place_of
from jax_fa4.kernels.sm100.sync import arrive_warp, wait_pair

CHUNK = 16  # bytes of one store


@cute.jit
def _clear(ctx, tail, stage):
    """Zeroes rows `tail` and later of this CTA's part of V; the products will see it."""
    plan = ctx.plan
    row_bytes = 2 * plan.value_piece  # the swizzle permutes chunks within a row only, so whole rows are safe
    lane, lanes = ctx.thread % WARP, row_bytes // CHUNK
    words = cute.recast_ptr(ctx.v[2].iterator, dtype=Int32) + stage * plan.stage_bytes // 4
    zero = cute.make_rmem_tensor(CHUNK // 4, Int32)
    zero.fill(0)
    for row in cutlass.range(tail + lane // lanes, plan.tile, WARP // lanes, unroll=1):
        for piece in cutlass.range_constexpr(plan.inner_value // plan.ctas // plan.value_piece):
            place = words + (piece * plan.tile + row) * (row_bytes // 4) + lane % lanes * (CHUNK // 4)
            cute.autovec_copy(zero, cute.make_tensor(place.align(CHUNK), cute.make_layout(CHUNK // 4)))
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def edge(ctx):
    plan = ctx.plan
    if const_expr(plan.workers > 0):  # products of the last pair have met all its tiles: see mma.py
        cute.arch.mbarrier_wait(ctx.empty["edge"], (ctx.turn & 1) ^ 1)
    tail = cutlass.max(ctx.band.kv_len - (ctx.last - 1) * plan.tile, 0)  # rows of the first visited block that count
    if (tail < plan.tile) & (ctx.band.kv_len < ctx.keys):
        # K0 V0 ..., or its own ring's first
        at = place_of(ctx, 1, 0) if const_expr(plan.value_ring == "kv") else start(0)
        stage = at.index
        if const_expr(not plan.pair):
            wait(ctx.full[plan.value_ring], at)
        elif ctx.rank == plan.leader:  # the bytes of both halves count here: tell the other CTA
            wait_pair(ctx.full[plan.value_ring] + stage, 0)
            arrive_warp(ctx.full["landed"], 1 - plan.leader, data=True)
        else:
            wait_pair(ctx.full["landed"], 0)
        _clear(ctx, tail, stage)
        cute.arch.sync_warp()
    if const_expr(plan.pair):
        arrive_warp(ctx.full["edge"], plan.leader, data=True)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ctx.full["edge"])
