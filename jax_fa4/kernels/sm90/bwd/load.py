"""The producer: one warp brings K and V once, then Q with its statistics and dO, tile by tile, head by head."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa4.kernels.common.copies import fetch, views
from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.passes.plan import ahead
from jax_fa4.kernels.sm90.bwd.items import known, nest, placed, take, tell, visit, within


@cute.jit
def fetch_line(source, to, barrier, nbytes: cutlass.Constexpr):
    """Starts a plain bulk copy whose bytes count on `barrier`; its stage has announced them already."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[to.toint(), source.toint(), Int32(nbytes), barrier.toint()],
        )


@cute.jit
def load_keys(ctx, at):
    """K and V of the CTA's tile."""
    plan = ctx.plan
    k, v = plan.rings[:2]
    if const_expr(plan.workers > 0):
        wait(ctx.empty["k"], at)
    fetch(views(ctx.k, (plan.keys, plan.inner), ctx.kv_head, ctx.batch), ctx.tile, ctx.full["k"], at, k.bytes)
    if const_expr(plan.workers > 0):
        wait(ctx.empty["v"], at)
    copy_v = views(ctx.v, (plan.keys, plan.inner_value), ctx.kv_head, ctx.batch)
    fetch(copy_v, ctx.tile, ctx.full["v"], at, v.bytes)


@cute.jit
def load_queries(ctx, g, i, places):
    """Q with its statistics and dO of the i-th query tile that is visited, of the group's head g. Returns q's and
    dout's next places."""
    plan = ctx.plan
    q, dout = plan.rings[2:4]
    k_at, q_at, dout_at = places
    head, m = ctx.kv_head * ctx.group + g, visit(ctx, i)
    line = (ctx.batch.to(Int64) * ctx.heads + head) * ctx.tiles
    wait(ctx.empty["q"], q_at)
    fetch(views(ctx.q, (plan.rows, plan.inner), head, ctx.batch), m, ctx.full["q"], q_at, q.bytes)
    source = ctx.stats + (line + m) * (2 * plan.rows)
    fetch_line(source, ctx.held + q_at.index * (2 * plan.rows), ctx.full["q"] + q_at.index, 8 * plan.rows)
    wait(ctx.empty["dout"], dout_at)
    fetch(views(ctx.dout, (plan.rows, plan.inner_value), head, ctx.batch), m, ctx.full["dout"], dout_at, dout.bytes)
    if const_expr(plan.workers > 0):
        if (g == 0) & (i == ctx.first):
            load_keys(ctx, k_at)
    return step(q_at, plan.query_stages), step(dout_at, plan.dout_stages)


@cute.jit
def load(ctx, places):
    """Fills the rings k and v (one place for both), q and dout; returns the next places.

    K and V are brought only for a tile that somebody sees. With workers they come after the first Q and dO, whose
    stages are free before the tile before is done with its K.
    """
    plan = ctx.plan
    k_at, q_at, dout_at = places
    if const_expr(plan.workers == 0):
        if ctx.last > ctx.first:
            load_keys(ctx, k_at)
    if const_expr(plan.alternates):
        outer, inner = nest(ctx)
        for a in cutlass.range(outer, unroll=1):
            for b in cutlass.range(inner, unroll=1):
                g, i = within(ctx, a, b)
                q_at, dout_at = load_queries(ctx, g, i, (k_at, q_at, dout_at))
    else:
        for g in cutlass.range(ctx.group, unroll=1):
            for i in cutlass.range(ctx.first, ctx.last, unroll=1):
                q_at, dout_at = load_queries(ctx, g, i, (k_at, q_at, dout_at))
    if ctx.last > ctx.first:
        k_at = step(k_at, 1)
    return k_at, q_at, dout_at


@cute.jit
def load_alone(ctx):
    """`load` of the CTA's only tile of keys."""
    _ = load(ctx, (start(0), start(1), start(1)))


@cute.jit
def clear_ahead(ctx):
    """Zeroes this tile's share of the workspace of a later key head, and counts it there. A whole warp calls it."""
    plan = ctx.plan
    size = plan.rows * plan.depth
    kv_heads = ctx.heads // ctx.group
    key_tiles = up(ctx.keys, plan.keys)
    line = ctx.batch * kv_heads + ctx.kv_head + ahead(plan.workers, key_tiles)
    if line * key_tiles < ctx.total:
        all_tiles = ctx.group * ctx.tiles  # of the key head's queries, one after the other
        each = up(all_tiles, key_tiles)
        first = cutlass.min(ctx.tile * each, all_tiles)
        last = cutlass.min(first + each, all_tiles)
        to = ctx.work + (line.to(Int64) * all_tiles + first) * size + 4 * cute.arch.lane_idx()
        zero = cute.make_rmem_tensor(4, Float32)
        zero.fill(0.0)
        for n in cutlass.range((last - first) * (size // 128), unroll=8):
            cute.autovec_copy(zero, cute.make_tensor((to + n * 128).align(16), cute.make_layout(4)))
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.fence_proxy("async.global")  # additions are bulk operations
            cute.arch.red(ctx.cleared + line, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


@cute.jit
def load_items(ctx):
    """Takes tickets until there is no more work: the next one when a tile's last loads have been started, about two
    steps before its end. Taken when it begins, long tiles waited behind long ones (causal 16k: 11 % slower)."""
    at = start(1)
    k_at, q_at, dout_at = start(1), start(1), start(1)
    index = known(take(ctx))
    while index < ctx.total:
        one = placed(ctx, index)
        tell(one, at)
        if const_expr(ctx.plan.clears):
            clear_ahead(one)
        k_at, q_at, dout_at = load(one, (k_at, q_at, dout_at))
        at = step(at, 2)
        index = known(take(ctx))
    tell(replace(ctx, tile=Int32(-1)), at)
