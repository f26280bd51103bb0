"""The load warp of each CTA: its halves of K, V, Q and dO, and the statistics, tile by tile, head by head."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.copies import fetch, views
from jax_fa4.kernels.common.ring import start, step, wait


@cute.jit
def _fetch_line(source, to, barrier, nbytes: cutlass.Constexpr):
    """Starts a plain bulk copy of consecutive bytes, which complete on `barrier`."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[to.toint(), source.toint(), Int32(nbytes), barrier.toint()],
        )


@cute.jit
def _bring(ctx, name: cutlass.Constexpr, head, tile, column):
    """Starts the load of a tile into its only place, which the caller knows is free."""
    plan = ctx.plan
    copy = views(ctx.maps[name], plan.boxes[name], head, ctx.batch, column)
    fetch(copy, tile, ctx.full[name], start(0), plan.tile_bytes(name))


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
        for m in cutlass.range(ctx.first, ctx.last, unroll=1):
            begin = (g == 0) & (m == ctx.first)
            if begin:
                _bring(ctx, "k", ctx.kv_head, ctx.tile, 0)
            for p in cutlass.range_constexpr(plan.parts):
                span = plan.parts * m + p
                cute.arch.mbarrier_wait(ctx.full["scores"], free)
                _bring(ctx, "q", head, 2 * span + ctx.rank, 0)
                if const_expr(p == 0):
                    wait(ctx.empty["stats"], stats_at)
                    source, to = ctx.stats + (line + m) * (2 * n), ctx.held + stats_at.index * (2 * n)
                    _fetch_line(source, to, ctx.full["stats"] + stats_at.index, lines)
                    if begin:
                        _bring(ctx, "v", ctx.kv_head, ctx.tile, 0)
                cute.arch.mbarrier_wait(ctx.full["slopes"], free)
                _bring(ctx, "dout", head, 2 * span + ctx.rank, 0)
                cute.arch.mbarrier_wait(ctx.empty["doutt"], free)
                _bring(ctx, "doutt", head, span, ctx.rank)
                cute.arch.mbarrier_wait(ctx.empty["qt"], free)
                _bring(ctx, "qt", head, span, ctx.rank)
                free = free ^ 1
            if begin:
                _bring(ctx, "kt", ctx.kv_head, ctx.pair, ctx.rank)
            stats_at = step(stats_at, 2)
