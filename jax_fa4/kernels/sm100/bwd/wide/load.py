"""The load warp of each CTA of a sweep: its own rows once, then halves of the other side's tiles, and statistics."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr

from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100.bwd.load import fetch_line
from jax_fa4.kernels.sm100.bwd.pair.load import bring


@cute.jit
def load(ctx):
    """Fills the rings score_a, score_b, stats, slope_a, slope_b and turned, in the order in which they are taken.

    Own rows are brought only for a tile that somebody sees. What a product's result barrier frees is refilled at its
    phase of the use before; fresh barriers let the first one pass.
    """
    plan, once = ctx.plan, start(0)
    n, lines = plan.tile, 8 * plan.tile
    at, stats_at = start(1), start(1)
    for g in cutlass.range(ctx.group, unroll=1):
        other = ctx.head // ctx.ratio if const_expr(plan.by_query) else ctx.head * ctx.ratio + g
        for m in cutlass.range(ctx.first, ctx.last, unroll=1):
            begin = (g == 0) & (m == ctx.first)
            if begin:
                bring(ctx, "score_a", ctx.head, ctx.tile, 0, once)
            wait(ctx.full["scores"], at)
            bring(ctx, "score_b", other, 2 * m + ctx.rank, 0, at)
            if const_expr(not plan.by_query):
                wait(ctx.empty["stats"], stats_at)
                line = (ctx.batch.to(Int64) * ctx.heads + other) * ctx.tiles + m
                to = ctx.held + stats_at.index * (2 * n)
                fetch_line(ctx.stats + line * (2 * n), to, ctx.full["stats"] + stats_at.index, lines)
            if const_expr(plan.slopes):
                if begin:
                    bring(ctx, "slope_a", ctx.head, ctx.tile, 0, once)
                wait(ctx.full["slopes"], at)
                bring(ctx, "slope_b", other, 2 * m + ctx.rank, 0, at)
            wait(ctx.empty["turned"], at)
            bring(ctx, "turned", other, m, ctx.rank, at)
            at, stats_at = step(at, plan.places), step(stats_at, 2)
