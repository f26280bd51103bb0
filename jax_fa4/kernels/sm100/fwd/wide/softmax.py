"""The softmax warpgroup at depth 256: one row a thread, the blocks of one query tile in turn."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.fwd.context import query_tile
from jax_fa4.kernels.sm100.fwd.mask import hide
from jax_fa4.kernels.sm100.fwd.plan import GROUP
from jax_fa4.kernels.sm100.fwd.segments import hide_others, own_ids
from jax_fa4.kernels.sm100.fwd.softmax import cap, move, row_max, row_sum, weigh
from jax_fa4.kernels.sm100.sync import after_wait

# Named barriers, of a warp and the correction warp with the same rows: factors of even and odd blocks, then the sums.
# A factor's place and barrier need no signal back: the scores of block i are issued behind P V of block i - 2, which
# correction has let pass.
EVEN, LAST = 1, 9


@cute.jit
def softmax(ctx):
    plan, thread, stats = ctx.plan, ctx.thread, ctx.stats
    peak, total = -Float32.inf, Float32(0)
    row = query_tile(ctx, 0) * plan.tile + thread
    own = own_ids(ctx, row) if const_expr(plan.segments) else None
    for i in cutlass.range(ctx.blocks, unroll=1):
        b = i & 1
        cute.arch.mbarrier_wait(ctx.full["scores"] + b, i >> 1 & 1)
        after_wait()
        line = tmem.read(ctx.tmem + plan.at("s", b), plan.tile, thread)
        tmem.loaded()
        if const_expr(plan.soft_cap):
            cap(line, ctx.before)
        hide(ctx, 0, thread, ctx.last - 1 - i, line)
        if const_expr(plan.segments):
            hide_others(ctx, ctx.last - 1 - i, line, own)
        peak, factor = move(plan, peak, row_max(line, peak), ctx.scale)
        stats[b * GROUP + thread] = factor
        cute.arch.barrier_arrive(barrier_id=EVEN + 4 * b + ctx.warp, number_of_threads=64)
        weigh(ctx, b, thread, line, peak)
        total = row_sum(line, total * factor)  # the float32 weights, not the rounded ones; off the critical path
    past = row >= ctx.band.q_len
    stats[2 * GROUP + thread] = Float32(0) if past else total
    stats[3 * GROUP + thread] = -Float32.inf if past else peak
    cute.arch.barrier_arrive(barrier_id=LAST + ctx.warp, number_of_threads=64)
