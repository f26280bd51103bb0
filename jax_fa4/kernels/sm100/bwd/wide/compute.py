"""The compute warpgroups of a sweep: P = exp2(S - LSE), for dK and dQ dS = P (dP - delta); then the gradient leaves.

A thread has one row, a key or a query, which is its lane of tensor memory, and 64 of the 128 columns of the other side:
group 0 the first, group 1 the rest. Of keys the statistics are the columns', so all threads of a warp read the same
ones; of queries a thread has its own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa4.kernels.common.copies import put, views
from jax_fa4.kernels.common.ring import arrive, start, step, wait
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.compute import (
    LOG2_E,
    MEET,
    cap,
    capped,
    differences,
    exponentials,
    lay_down,
    piece,
    rounded,
    statistics,
)
from jax_fa4.kernels.sm100.bwd.mask import WORD, covered, hide, key_limits, limits
from jax_fa4.kernels.sm100.bwd.plan import GROUP
from jax_fa4.kernels.sm100.bwd.segments import LANES, hide_others, ids_from
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive


@cute.jit
def _own_statistics(ctx, thread):
    """(LSE in base 2, delta) of the thread's query; the last tile of an odd number has no row in the table."""
    plan, lse, delta = ctx.plan, Float32.inf, Float32(0.0)
    if ctx.tile < ctx.tiles:
        line = (ctx.batch.to(Int64) * ctx.heads + ctx.head) * ctx.tiles + ctx.tile
        found = ctx.stats + (line * (2 * plan.tile) + thread)
        lse, delta = found[0], found[plan.tile]
    return lse, delta


@cute.jit
def _found(ctx, which: cutlass.Constexpr, stats, first):
    """Statistics of WORD columns from `first` on. stats: the place in their ring, or the thread's own ones."""
    if const_expr(ctx.plan.by_query):
        same = cute.make_rmem_tensor(WORD, Float32)
        same.fill(stats[which])
        return same
    return statistics(ctx, stats, which, first)


@cute.jit
def _ids(ctx, of_rows: cutlass.Constexpr, first, count: cutlass.Constexpr):
    """Segment ids of rows, or of columns, from `first` on."""
    of_queries, of_keys = ctx.segments
    if const_expr(ctx.plan.by_query == of_rows):
        return ids_from(of_queries, first, ctx.queries, count)
    return ids_from(of_keys, first, ctx.keys, count)


@cute.jit
def _seen(ctx, line, m, who, ids):
    """-inf in place of the thread's hidden scores with tile m. ids: (the row's segment, the columns' by lane)."""
    plan, (group, thread) = ctx.plan, who
    row, column = ctx.tile * plan.tile + thread, m * plan.tile + plan.tile // 2 * group
    if const_expr(plan.by_query):
        whole = covered(ctx, ctx.tile, m)
    else:
        whole = covered(ctx, m)
    if not whole:
        bounds = key_limits(ctx, row, column) if const_expr(plan.by_query) else limits(ctx, row, column)
        for c in cutlass.range_constexpr(0, cute.size(line), WORD):
            hide(plan, piece(line, c, WORD), c, bounds)
    if const_expr(plan.segments):
        hide_others(line, *ids)


@cute.jit
def _weigh(ctx, m, at, who, stats, ids):
    """P of the thread. For dV 16-bit copies go over its own scores in tensor memory; else it is given back, in float32
    registers, as what dP - delta is multiplied with."""
    plan, (group, thread) = ctx.plan, who
    half, scale = plan.tile // 2, ctx.scale * LOG2_E
    base = ctx.tmem + (plan.tile * at.index + half * group)
    line = tmem.read(base + plan.at("s"), half, thread)
    tmem.loaded()
    if const_expr(plan.slopes):
        before_arrive()
        arrive_warp(ctx.empty["scores"], plan.leader)
    if const_expr(plan.soft_cap):
        cap(ctx, line)
        scale = ctx.cap[1] * LOG2_E
    _seen(ctx, line, m, who, ids)
    for c in cutlass.range_constexpr(0, half, WORD):
        part, lse = piece(line, c, WORD), _found(ctx, 0, stats, half * group + c)
        weights = cute.make_rmem_tensor(WORD, Float32) if const_expr(plan.soft_cap) else part
        exponentials(part, lse, scale, weights)
        if const_expr(not plan.slopes):
            _, words = rounded(plan, weights)
            tmem.write(base + (plan.at("p0") + c // 2), words, thread)
        elif const_expr(plan.soft_cap):
            capped(part, weights)
    return line


@cute.jit
def _differ(ctx, line, who, stats):
    """dS of the thread, over its own dP in tensor memory."""
    plan, (group, thread) = ctx.plan, who
    half = plan.tile // 2
    for c in cutlass.range_constexpr(0, half, WORD):
        slope = tmem.read(ctx.tmem + (plan.at("dp") + half * group + c), WORD, thread)
        delta = _found(ctx, 1, stats, half * group + c)
        tmem.loaded()
        part = piece(line, c, WORD)
        differences(part, slope, delta)
        _, words = rounded(plan, part)
        tmem.write(ctx.tmem + (plan.at("ds0") + half * group + c // 2), words, thread)


@cute.jit
def compute(ctx):
    plan = ctx.plan
    group, thread = (ctx.warp - plan.COMPUTE) // 4, ctx.thread % GROUP
    who, half = (group, thread), plan.tile // 2
    total = ctx.group * (ctx.last - ctx.first)
    at, stats_at, m = start(0), start(0), Int32(ctx.first)
    mine, own = None, None
    if const_expr(plan.by_query):
        mine = _own_statistics(ctx, thread)
    if const_expr(plan.segments):
        own = _ids(ctx, True, ctx.tile * plan.tile + thread, LANES)[0]
    for _ in cutlass.range(total, unroll=1):
        ids = None
        if const_expr(plan.segments):  # they come while scores do
            ids = (own, _ids(ctx, False, m * plan.tile + half * group + thread % LANES, half))
        if const_expr(not plan.by_query):
            wait(ctx.full["stats"], stats_at)
        stats = mine if const_expr(plan.by_query) else stats_at
        wait(ctx.full["scores"], at)
        after_wait()
        line = _weigh(ctx, m, at, who, stats, ids)
        if const_expr(plan.slopes):
            wait(ctx.full["slopes"], at)
            after_wait()
            _differ(ctx, line, who, stats)
        tmem.stored()
        before_arrive()
        arrive_warp(ctx.full["weights"] + at.index, plan.leader)
        if const_expr(not plan.by_query):
            arrive(ctx.empty["stats"], stats_at)
        at, stats_at = step(at, plan.places), step(stats_at, 2)
        m = m + 1
        if m == ctx.last:
            m = Int32(ctx.first)
    if total > 0:
        cute.arch.mbarrier_wait(ctx.full["final"], 0)
        after_wait()
    factor = ctx.scale if const_expr(plan.slopes) else Float32(1.0)
    lay_down(ctx, plan.gradient, ctx.maps["out"][2], who, factor, total > 0)
    before_arrive()  # tensor memory has been read; the caller signals that it may go
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=MEET, number_of_threads=2 * GROUP)
    if ctx.warp == plan.COMPUTE:
        put(views(ctx.maps["out"], plan.boxes["out"], ctx.head, ctx.batch), ctx.tile)
