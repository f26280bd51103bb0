"""The producer: one warp brings K and V once, then Q with its statistics and dO, tile by tile, head by head."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.common.copies import fetch, views
from jax_fa4.kernels.common.ring import start, step, wait


@cute.jit
def fetch_line(source, to, barrier, nbytes: cutlass.Constexpr):
    """Starts a plain bulk copy whose bytes count on `barrier`; its stage has announced them already."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[to.toint(), source.toint(), Int32(nbytes), barrier.toint()],
        )


@cute.jit
def load(ctx):
    """Fills the rings k, v, q and dout. K and V are brought only for a tile that somebody sees."""
    plan = ctx.plan
    k, v, q, dout = plan.rings[:4]
    if ctx.last > ctx.first:
        fetch(views(ctx.k, (plan.keys, plan.inner), ctx.kv_head, ctx.batch), ctx.tile, ctx.full["k"], start(0), k.bytes)
        copy_v = views(ctx.v, (plan.keys, plan.inner_value), ctx.kv_head, ctx.batch)
        fetch(copy_v, ctx.tile, ctx.full["v"], start(0), v.bytes)
    q_at, dout_at = start(1), start(1)
    for g in cutlass.range(ctx.group, unroll=1):
        head = ctx.kv_head * ctx.group + g
        copy_q = views(ctx.q, (plan.rows, plan.inner), head, ctx.batch)
        copy_dout = views(ctx.dout, (plan.rows, plan.inner_value), head, ctx.batch)
        line = (ctx.batch.to(Int64) * ctx.heads + head) * ctx.tiles
        for m in cutlass.range(ctx.first, ctx.last, unroll=1):
            wait(ctx.empty["q"], q_at)
            fetch(copy_q, m, ctx.full["q"], q_at, q.bytes)
            source = ctx.stats + (line + m) * (2 * plan.rows)
            fetch_line(source, ctx.held + q_at.index * (2 * plan.rows), ctx.full["q"] + q_at.index, 8 * plan.rows)
            wait(ctx.empty["dout"], dout_at)
            fetch(copy_dout, m, ctx.full["dout"], dout_at, dout.bytes)
            q_at, dout_at = step(q_at, plan.query_stages), step(dout_at, plan.dout_stages)
