"""The load warp: K and V once, then Q, its statistics and dO, tile by tile, head by head."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.common.copies import fetch, views
from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100.bwd.turns import visited


@cute.jit
def fetch_line(source, to, barrier, nbytes: cutlass.Constexpr):
    """Starts a plain bulk copy of consecutive bytes, which complete on `barrier`."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[to.toint(), source.toint(), Int32(nbytes), barrier.toint()],
        )


@cute.jit
def load(ctx):
    """Fills the rings k, v, q, stats and dout. K and V are brought only for a tile that somebody sees."""
    plan = ctx.plan
    n = plan.tile
    sizes = {ring.name: ring.bytes for ring in plan.rings}
    q_at, dout_at, stats_at = start(1), start(1), start(1)
    for g in cutlass.range(ctx.group, unroll=1):
        head = ctx.kv_head * ctx.group + g
        copy_q = views(ctx.q, (n, plan.inner), head, ctx.batch)
        copy_dout = views(ctx.dout, (n, plan.inner_value), head, ctx.batch)
        line = (ctx.batch.to(Int64) * ctx.heads + head) * ctx.tiles
        for i in cutlass.range(ctx.first, ctx.last, unroll=1):
            begin, m = (g == 0) & (i == ctx.first), visited(ctx, i)
            if begin:
                copy_k = views(ctx.k, (n, plan.inner), ctx.kv_head, ctx.batch)
                fetch(copy_k, ctx.tile, ctx.full["k"], start(0), sizes["k"])
            wait(ctx.empty["q"], q_at)
            fetch(copy_q, m, ctx.full["q"], q_at, sizes["q"])
            wait(ctx.empty["stats"], stats_at)
            source, to = ctx.stats + (line + m) * (2 * n), ctx.held + stats_at.index * (2 * n)
            fetch_line(source, to, ctx.full["stats"] + stats_at.index, sizes["stats"])
            if begin:
                copy_v = views(ctx.v, (n, plan.inner_value), ctx.kv_head, ctx.batch)
                fetch(copy_v, ctx.tile, ctx.full["v"], start(0), sizes["v"])
            wait(ctx.empty["dout"], dout_at)
            fetch(copy_dout, m, ctx.full["dout"], dout_at, sizes["dout"])
            q_at, dout_at = step(q_at, plan.query_stages), step(dout_at, plan.dout_stages)
            stats_at = step(stats_at, 2)
