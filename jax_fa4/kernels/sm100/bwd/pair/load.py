"""The load warp of each CTA: its halves of K, V, Q and dO, and the statistics, tile by tile, head by head."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.copies import fetch, views
from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100.bwd.load import fetch_line
from jax_fa4.kernels.sm100.bwd.turns import visited


@cute.jit
def bring(ctx, name: cutlass.Constexpr, head, tile, column, at):
    """Starts the load of a tile into a place that the caller knows is free."""
    plan = ctx.plan
    copy = views(ctx.maps[name], plan.boxes[name], head, ctx.batch, column)
    fetch(copy, tile, ctx.full[name], at, plan.tile_bytes(name))


@cute.jit
def load(ctx):
    """Fills the rings k, v, kt, q, stats, dout, doutt and qt, in the order in which products take them.

    K and V are brought only for a tile that somebody sees. What a product's result barrier frees is refilled at its
    phase of the part before; fresh barriers let the first one pass.
    """
    plan = ctx.plan
    n, lines = plan.tile, 8 * plan.tile
    stats_at, free = start(1), Int32(1)
    for g in cutlass.range(ctx.group, unroll=1):
        head = ctx.kv_head * ctx.group + g
        line = (ctx.batch.to(Int64) * ctx.heads + head) * ctx.tiles
        for i in cutlass.range(ctx.first, ctx.last, unroll=1):
            begin, m = (g == 0) & (i == ctx.first), visited(ctx, i)
            if begin:
                bring(ctx, "k", ctx.kv_head, ctx.tile, 0, start(0))
            for p in cutlass.range_constexpr(plan.parts):
                span = plan.parts * m + p
                cute.arch.mbarrier_wait(ctx.full["scores"], free)
                bring(ctx, "q", head, 2 * span + ctx.rank, 0, start(0))
                if const_expr(p == 0):
                    wait(ctx.empty["stats"], stats_at)
                    source, to = ctx.stats + (line + m) * (2 * n), ctx.held + stats_at.index * (2 * n)
                    fetch_line(source, to, ctx.full["stats"] + stats_at.index, lines)
                    if begin:
                        bring(ctx, "v", ctx.kv_head, ctx.tile, 0, start(0))
                cute.arch.mbarrier_wait(ctx.full["slopes"], free)
                bring(ctx, "dout", head, 2 * span + ctx.rank, 0, start(0))
                cute.arch.mbarrier_wait(ctx.empty["doutt"], free)
                bring(ctx, "doutt", head, span, ctx.rank, start(0))
                cute.arch.mbarrier_wait(ctx.empty["qt"], free)
                bring(ctx, "qt", head, span, ctx.rank, start(0))
                free = free ^ 1
            if begin:
                bring(ctx, "kt", ctx.kv_head, ctx.pair, ctx.rank, start(0))
            stats_at = step(stats_at, 2)
