"""The edge warp: zeroes the rows of V past the length in the last key block.

Weights of hidden keys are 0, but 0 * NaN is NaN. Past S the copy engine fills zeros; between the length and S is the
caller's memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.sm100.fwd.plan import PIECE, WARP

CHUNK = 16  # bytes of one store
ROW = 2 * PIECE  # bytes of a row of one piece; the swizzle permutes chunks within a row only, so whole rows are safe


@cute.jit
def edge(ctx):
    plan = ctx.plan
    tail = cutlass.max(ctx.band.kv_len - (ctx.last - 1) * plan.tile, 0)  # rows of the first visited block that count
    if (tail < plan.tile) & (ctx.band.kv_len < ctx.keys):
        stage = 1 % plan.stages  # K0 V0 ...
        cute.arch.mbarrier_wait(ctx.full["kv"] + stage, 0)
        lane, lanes = ctx.thread % WARP, ROW // CHUNK
        words = cute.recast_ptr(ctx.v[2].iterator, dtype=Int32) + stage * plan.stage_bytes // 4
        zero = cute.make_rmem_tensor(CHUNK // 4, Int32)
        zero.fill(0)
        for row in cutlass.range(tail + lane // lanes, plan.tile, WARP // lanes, unroll=1):
            for piece in cutlass.range_constexpr(plan.inner_value // PIECE):
                place = words + (piece * plan.tile + row) * (ROW // 4) + lane % lanes * (CHUNK // 4)
                cute.autovec_copy(zero, cute.make_tensor(place.align(CHUNK), cute.make_layout(CHUNK // 4)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ctx.full["edge"])
