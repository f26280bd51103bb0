"""The compute warpgroups: P^T = exp2(S^T - LSE), dS^T = P^T (dP^T - delta); finally dK and dV leave.

A thread has one key, which is its lane of tensor memory, and every other unit of the queries, see plan.unit. CTA r of
the pair sums dQ of the queries of group r: so of each CTA's dS one group's stays and the other's is sent, a warp's part
as soon as that warp has it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa4.kernels.common.copies import put, views
from jax_fa4.kernels.common.ring import arrive, start, step, wait
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.compute import (
    CHUNK,
    LOG2_E,
    MEET,
    cap,
    capped,
    differences,
    exponentials,
    lay_down,
    rounded,
)
from jax_fa4.kernels.sm100.bwd.mask import covered, hide, limits
from jax_fa4.kernels.sm100.bwd.pair.plan import GROUP, WARP
from jax_fa4.kernels.sm100.bwd.segments import hide_others, key_id, query_ids
from jax_fa4.kernels.sm100.bwd.turns import after
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive


@cute.jit
def _statistics(ctx, at, which: cutlass.Constexpr, first):
    """A unit's statistics, LSE in base 2 (0) or delta (1), of the tile's queries from `first` on."""
    n = ctx.plan.tile
    found = cute.make_rmem_tensor(ctx.plan.unit, Float32)
    source = (ctx.held + (at.index * (2 * n) + which * n + first)).align(16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(ctx.plan.unit)), found)
    return found


def _mine(plan, group, i):
    """The first query, counted in a part, of the group's unit i."""
    return plan.unit * (2 * i + group)


@cute.jit
def _weigh(ctx, top, group, thread, stats, ids):
    """P^T of the thread, in float32 registers; 16-bit copies go over its own scores in tensor memory.

    top: the part's first query. stats: (place in the ring, the part's first query in its tile). ids: (the key's
    segment, its queries' by lane for each unit), or None. With a soft cap what `capped` makes is given back.
    """
    plan = ctx.plan
    unit = plan.unit
    lines = [tmem.read(ctx.tmem + (plan.at("s") + _mine(plan, group, i)), unit, thread) for i in range(2)]
    tmem.loaded()
    before_arrive()
    arrive_warp(ctx.empty["scores"], plan.leader)
    scale = ctx.scale * LOG2_E
    if const_expr(plan.soft_cap):
        for i in cutlass.range_constexpr(2):
            cap(ctx, lines[i])
        scale = ctx.cap[1] * LOG2_E
    if not covered(ctx, top // plan.tile):
        bounds = limits(ctx, ctx.tile * plan.tile + thread, top + _mine(plan, group, 0))
        for i in cutlass.range_constexpr(2):
            hide(plan, lines[i], _mine(plan, 0, i), bounds)
    if const_expr(plan.segments):
        for i in cutlass.range_constexpr(2):
            hide_others(lines[i], ids[0], ids[1][i])
    for i in cutlass.range_constexpr(2):
        part, lse = lines[i], _statistics(ctx, stats[0], 0, stats[1] + _mine(plan, group, i))
        weights = cute.make_rmem_tensor(unit, Float32) if const_expr(plan.soft_cap) else part
        exponentials(part, lse, scale, weights)
        _, words = rounded(plan, weights)
        tmem.write(ctx.tmem + (plan.at("p") + unit * group + unit // 2 * i), words, thread)
        if const_expr(plan.soft_cap):
            capped(part, weights)
    tmem.stored()
    before_arrive()
    arrive_warp(ctx.full["probs"], plan.leader)
    return lines


@cute.jit
def _differ(ctx, lines, group, thread, stats):
    """dS^T of the thread, over its own dP^T in tensor memory; given back in 16 bits."""
    plan = ctx.plan
    made = []
    for i in cutlass.range_constexpr(2):
        slope = tmem.read(ctx.tmem + (plan.at("dp") + _mine(plan, group, i)), plan.unit, thread)
        delta = _statistics(ctx, stats[0], 1, stats[1] + _mine(plan, group, i))
        tmem.loaded()
        part = lines[i]
        differences(part, slope, delta)
        small, words = rounded(plan, part)
        tmem.write(ctx.tmem + (plan.at("ds") + plan.unit * group + plan.unit // 2 * i), words, thread)
        made.append(small)
    tmem.stored()
    before_arrive()
    arrive_warp(ctx.full["ds"], plan.leader)
    return made


@cute.jit
def _send(ctx, warp):
    """Starts the copy of a warp's 32 keys of the parcel to where the other CTA has these keys."""
    plan = ctx.plan
    row = cute.size(ctx.parcel, mode=[1])
    nbytes = plan.tile_bytes("parcel") // plan.tile * WARP
    with cute.arch.elect_one():
        peer = ctx.rank ^ 1
        source = ctx.parcel.iterator.toint() + warp * nbytes
        to = cute.arch.map_dsmem_ptr(ctx.ds.iterator, peer).toint() + (ctx.rank * plan.tile * row * 2 + warp * nbytes)
        barrier = cute.arch.map_dsmem_ptr(ctx.full["trade"], peer).toint()
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[to, source, Int32(nbytes), barrier],
        )


@cute.jit
def _hand_over(ctx, small, group, thread, n, part: cutlass.Constexpr):
    """dS of the thread in one part of step n, in its row of 64 queries: kept, or sent to the other CTA."""
    plan = ctx.plan
    if const_expr(part == 0):  # dQ of the step before has read both places, and the other CTA's
        cute.arch.mbarrier_wait(ctx.full["dq"], (n & 1) ^ 1)
    keeps = group == ctx.rank
    at = cute.arch.make_warp_uniform(cutlass.select_(keeps, ctx.rank * plan.tile, 0)) + thread
    base = ctx.parcel.iterator
    if keeps:
        base = ctx.ds.iterator
    chunks = cute.flat_divide(cute.make_tensor(base, ctx.ds.layout), (1, CHUNK))
    for i in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(0, plan.unit, CHUNK):
            source = cute.make_tensor(small[i].iterator + j, cute.make_layout((1, CHUNK)))
            cute.autovec_copy(source, chunks[None, None, at, (plan.unit * (2 * part + i) + j) // CHUNK])
    if const_expr(part == plan.parts - 1):
        cute.arch.fence_proxy("async.shared", space="cta")
        if keeps:
            arrive_warp(ctx.full["square"], plan.leader, True)
        else:
            cute.arch.sync_warp()
            _send(ctx, ctx.warp % 4)


@cute.jit
def compute(ctx):
    plan = ctx.plan
    group, thread = (ctx.warp - plan.COMPUTE) // 4, ctx.thread % GROUP
    total = ctx.group * (ctx.last - ctx.first)
    stats_at, m = start(0), Int32(ctx.course.begin)
    own = key_id(ctx, ctx.tile * plan.tile + thread) if const_expr(plan.segments) else None
    for n in cutlass.range(total, unroll=1):
        for p in cutlass.range_constexpr(plan.parts):
            u, top, ids = plan.parts * n + p, m * plan.tile + p * plan.span, None
            if const_expr(plan.segments):  # they come while S does
                ids = (own, [query_ids(ctx, top + _mine(plan, group, i), plan.unit) for i in range(2)])
            if const_expr(p == 0):
                wait(ctx.full["stats"], stats_at)
            cute.arch.mbarrier_wait(ctx.full["scores"], u & 1)
            after_wait()
            stats = (stats_at, p * plan.span)
            lines = _weigh(ctx, top, group, thread, stats, ids)
            cute.arch.mbarrier_wait(ctx.full["slopes"], u & 1)
            after_wait()
            small = _differ(ctx, lines, group, thread, stats)
            if const_expr(p == plan.parts - 1):
                arrive(ctx.empty["stats"], stats_at)
            _hand_over(ctx, small, group, thread, n, p)
        stats_at = step(stats_at, 2)
        m = after(ctx.course, m)
    if total > 0:
        cute.arch.mbarrier_wait(ctx.full["dq"], (total & 1) ^ 1)  # the last product
        after_wait()
    lay_down(ctx, "dv", ctx.maps["dv"][2], (group, thread), Float32(1.0), total > 0)
    lay_down(ctx, "dk", ctx.maps["dk"][2], (group, thread), ctx.scale, total > 0)
    before_arrive()  # tensor memory has been read; the caller signals that it may go
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=MEET, number_of_threads=2 * GROUP)
    if ctx.warp == plan.COMPUTE:
        for name in ("dk", "dv"):
            put(views(ctx.maps[name], (plan.tile, plan.depth_of(name)), ctx.kv_head, ctx.batch), ctx.tile)
