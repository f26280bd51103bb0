"""The compute warpgroups: P^T = exp2(S^T - LSE), dS^T = P^T (dP^T - delta); finally dK and dV leave.

A thread has one key, which is its lane of tensor memory, and 64 of the 128 queries: group 0 the first, group 1 the
rest. Statistics are of queries, so all threads of a warp read the same ones.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from jax_fa4.kernels.common.copies import put, views
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.ring import arrive, start, step, wait
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.mask import WORD, covered, hide, limits
from jax_fa4.kernels.sm100.bwd.plan import GROUP
from jax_fa4.kernels.sm100.bwd.segments import hide_others, key_id, query_ids
from jax_fa4.kernels.sm100.bwd.turns import after
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive

LOG2_E = 1.4426950408889634
MEET = 1  # named barrier of the compute warps
CHUNK = 8  # 16-bit numbers of one 16-byte store


@cute.jit
def statistics(ctx, at, which: cutlass.Constexpr, first):
    """WORD statistics, LSE in base 2 (0) or delta (1), of the queries from `first` on."""
    n = ctx.plan.tile
    found = cute.make_rmem_tensor(WORD, Float32)
    source = (ctx.held + (at.index * (2 * n) + which * n + first)).align(16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(WORD)), found)
    return found


def rounded(plan, line):
    """(the numbers in 16 bits, the same registers as words)."""
    count, kind = cute.size(line), DTYPES[plan.dtype]
    words = cute.make_rmem_tensor(count // 2, Float32)
    half = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=kind), cute.make_layout(count))
    half.store(line.load().to(kind))
    return half, words


def piece(line, first, count):
    return cute.make_tensor(line.iterator + first, cute.make_layout(count))


@cute.jit
def cap(ctx, line):
    """tanh(scale * score / cap) in place, as 1 - 2 / (1 + exp 2x), as in the forward."""
    grown = ctx.cap[0] * (2.0 * LOG2_E)
    for c in cutlass.range_constexpr(cute.size(line)):
        line[c] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(line[c] * grown, fastmath=True))


@cute.jit
def exponentials(part, lse, scale, to):
    """P of a part of a row of scores."""
    for j in cutlass.range_constexpr(0, cute.size(part), 2):
        pair = cute.arch.fma_packed_f32x2((part[j], part[j + 1]), (scale, scale), (-lse[j], -lse[j + 1]))
        for i in cutlass.range_constexpr(2):
            to[j + i] = cute.math.exp2(pair[i], fastmath=True)


@cute.jit
def capped(part, weights):
    """P (1 - tanh^2) in tanh's place, which is what dP - delta is multiplied with. A hidden score's -inf stands for
    tanh there, so its factor is held at 0: 0 * inf does not arise."""
    for j in cutlass.range_constexpr(cute.size(part)):
        part[j] = weights[j] * cute.arch.fmax(1.0 - part[j] * part[j], Float32(0.0))


@cute.jit
def differences(part, slope, delta):
    """dS in place of P."""
    for j in cutlass.range_constexpr(0, cute.size(part), 2):
        pair = cute.arch.sub_packed_f32x2((slope[j], slope[j + 1]), (delta[j], delta[j + 1]))
        part[j], part[j + 1] = cute.arch.mul_packed_f32x2((part[j], part[j + 1]), pair)


@cute.jit
def _weigh(ctx, m, group, thread, stats_at, ids):
    """P^T of the thread, in float32 registers; 16-bit copies go over its own scores in tensor memory.

    ids: (the key's segment, its queries' by lane), or None. With a soft cap what `capped` makes is given back.
    """
    plan = ctx.plan
    half = plan.tile // 2
    line = tmem.read(ctx.tmem + (plan.at("s") + half * group), half, thread)
    tmem.loaded()
    scale = ctx.scale * LOG2_E
    if const_expr(plan.soft_cap):
        cap(ctx, line)
        scale = ctx.cap[1] * LOG2_E
    if not covered(ctx, m):
        bounds = limits(ctx, ctx.tile * plan.tile + thread, m * plan.tile + half * group)
        for c in cutlass.range_constexpr(0, half, WORD):
            hide(plan, piece(line, c, WORD), c, bounds)
    if const_expr(plan.segments):
        hide_others(line, *ids)
    for c in cutlass.range_constexpr(0, half, WORD):
        part, lse = piece(line, c, WORD), statistics(ctx, stats_at, 0, half * group + c)
        weights = cute.make_rmem_tensor(WORD, Float32) if const_expr(plan.soft_cap) else part
        exponentials(part, lse, scale, weights)
        _, words = rounded(plan, weights)
        tmem.write(ctx.tmem + (plan.at("p0") + half * group + c // 2), words, thread)
        if const_expr(plan.soft_cap):
            capped(part, weights)
    tmem.stored()
    before_arrive()
    arrive_warp(ctx.full["probs"])
    return line


@cute.jit
def _differ(ctx, line, group, thread, stats_at):
    """dS^T of the thread: over its own dP^T in tensor memory, and as a row of dS^T in shared memory."""
    plan = ctx.plan
    half = plan.tile // 2
    chunks = cute.flat_divide(ctx.ds, (1, CHUNK))
    for c in cutlass.range_constexpr(0, half, WORD):
        slope = tmem.read(ctx.tmem + (plan.at("dp") + half * group + c), WORD, thread)
        delta = statistics(ctx, stats_at, 1, half * group + c)
        tmem.loaded()
        part = piece(line, c, WORD)
        differences(part, slope, delta)
        small, words = rounded(plan, part)
        tmem.write(ctx.tmem + (plan.at("ds0") + half * group + c // 2), words, thread)
        for j in cutlass.range_constexpr(0, WORD, CHUNK):
            source = cute.make_tensor(small.iterator + j, cute.make_layout((1, CHUNK)))
            cute.autovec_copy(source, chunks[None, None, thread, (half * group + c + j) // CHUNK])
    tmem.stored()
    before_arrive()
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive_warp(ctx.full["ds"])


@cute.jit
def lay_down(ctx, name: cutlass.Constexpr, shared, who, factor, alive):
    """A thread's half of its row of a gradient, in the caller's dtype, into `shared`; 0 where nobody looked.

    who: (the thread's group, its row).
    """
    plan, (group, thread) = ctx.plan, who
    width = plan.depth_of(name) // 2
    chunks = cute.flat_divide(shared[None, None, 0], (1, CHUNK))
    for c in cutlass.range_constexpr(0, width, WORD):
        line = cute.make_rmem_tensor(WORD, Float32)
        line.fill(0.0)
        if alive:
            found = tmem.read(ctx.tmem + (plan.at(name) + width * group + c), WORD, thread)
            tmem.loaded()
            line.store(found.load() * factor)
        small, _ = rounded(plan, line)
        for j in cutlass.range_constexpr(0, WORD, CHUNK):
            source = cute.make_tensor(small.iterator + j, cute.make_layout((1, CHUNK)))
            cute.autovec_copy(source, chunks[None, None, thread, (width * group + c + j) // CHUNK])


@cute.jit
def compute(ctx):
    plan = ctx.plan
    group, thread = (ctx.warp - plan.COMPUTE) // 4, ctx.thread % GROUP
    total = ctx.group * (ctx.last - ctx.first)
    stats_at, m = start(0), cutlass.Int32(ctx.course.begin)
    own = key_id(ctx, ctx.tile * plan.tile + thread) if const_expr(plan.segments) else None
    for n in cutlass.range(total, unroll=1):
        ids = None
        if const_expr(plan.segments):  # they come while S does
            ids = (own, query_ids(ctx, m * plan.tile + plan.tile // 2 * group, plan.tile // 2))
        wait(ctx.full["stats"], stats_at)
        cute.arch.mbarrier_wait(ctx.full["scores"], n & 1)
        after_wait()
        line = _weigh(ctx, m, group, thread, stats_at, ids)
        cute.arch.mbarrier_wait(ctx.full["slopes"], n & 1)
        after_wait()
        _differ(ctx, line, group, thread, stats_at)
        arrive(ctx.empty["stats"], stats_at)
        stats_at = step(stats_at, 2)
        m = after(ctx.course, m)
    if total > 0:
        cute.arch.mbarrier_wait(ctx.full["final"], 0)
        after_wait()
    lay_down(ctx, "dv", ctx.dv[2], (group, thread), Float32(1.0), total > 0)
    lay_down(ctx, "dk", ctx.dk[2], (group, thread), ctx.scale, total > 0)
    before_arrive()  # tensor memory has been read; the caller signals that it may go
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=MEET, number_of_threads=2 * GROUP)
    if ctx.warp == plan.COMPUTE:
        put(views(ctx.dk, (plan.tile, plan.inner), ctx.kv_head, ctx.batch), ctx.tile)
        put(views(ctx.dv, (plan.tile, plan.inner_value), ctx.kv_head, ctx.batch), ctx.tile)
