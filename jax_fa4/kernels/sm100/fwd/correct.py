"""The correction warpgroup: rescales O between products where a row's maximum moved, and normalises it at the end."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.fwd.context import query_tile
from jax_fa4.kernels.sm100.fwd.join import join
from jax_fa4.kernels.sm100.fwd.plan import GROUP
from jax_fa4.kernels.sm100.fwd.rows import put_part, sink_of
from jax_fa4.kernels.sm100.sync import after_wait, before_arrive

CHUNK = 16  # columns of O in registers at a time; more would not fit beside the other roles' shares
LN2, LOG2E = 0.6931471805599453, 1.4426950408889634


def _times(line, factor):
    for c in range(0, cute.size(line), 2):
        line[c], line[c + 1] = cute.arch.mul_packed_f32x2((line[c], line[c + 1]), (factor, factor))


@cute.jit
def rescale(base, depth: cutlass.Constexpr, thread, factor):
    """O *= factor, row by row, in tensor memory."""
    for c in cutlass.range_constexpr(0, depth, CHUNK):
        line = tmem.read(base + c, CHUNK, thread)
        tmem.loaded()
        _times(line, factor)
        tmem.write(base + c, line, thread)
    tmem.stored()


@cute.jit
def _settle(ctx, row, total, peak):
    """(factor of O, log-sum-exp in log2 units, whether the row is dead) from the row's sum and maximum.

    A sink is one more term of the sum. It is added relative to the larger of it and the maximum, so that a large sink
    does not overflow; the factor of O carries that shift.
    """
    dead = total == 0.0
    high = peak * ctx.scale
    if const_expr(ctx.sinks is None):
        return 1.0 / total, high + cute.math.log2(total, fastmath=True), dead
    sink = sink_of(ctx, row) * LOG2E
    top = sink if dead else cute.arch.fmax(high, sink)
    base = Float32(0) if top == -Float32.inf else top  # a sink of -inf is none
    shift = Float32(0) if dead else cute.math.exp2(high - base, fastmath=True)
    all = total * shift + cute.math.exp2(sink - base, fastmath=True)
    return shift / all, base + cute.math.log2(all, fastmath=True), dead


@cute.jit
def _finish(ctx, s: cutlass.Constexpr, thread):
    """The end of tile s, from what its softmax left."""
    plan = ctx.plan
    total, peak = ctx.stats[s * GROUP + thread], ctx.stats[(2 + s) * GROUP + thread]
    if const_expr(plan.workers > 0):
        cute.arch.mbarrier_arrive(ctx.empty["stats"] + s)
        cute.arch.mbarrier_wait(ctx.empty["final"] + s, (ctx.turn & 1) ^ 1)
    deliver(ctx, s, thread, (total, peak), (ctx.full["acc"] + s, ctx.turn & 1))


@cute.jit
def deliver(ctx, s: cutlass.Constexpr, thread, sums, done):
    """O / row sum to shared memory, of a part of the keys to global memory, and log-sum-exp to global memory.

    sums: the row's sum and maximum. done: barrier and parity, of the last product. A row that sees no key gives 0 and
    -inf, or its sink. 0 is selected, not multiplied: queries past the length may have left NaN in O.
    """
    plan = ctx.plan
    # Its row of the line is made where it is wanted: kept, it costs a register more than there is at depth 128.
    factor, lse, dead = _settle(ctx, query_tile(ctx, s) * plan.tile + thread, *sums)
    cute.arch.mbarrier_wait(*done)
    after_wait()
    kind = DTYPES[plan.dtype]
    row = None if const_expr(plan.splits) else ctx.out[2][thread, None, s]
    for c in cutlass.range_constexpr(0, plan.inner_value, plan.last_columns):
        line = tmem.read(ctx.tmem + plan.at("o", s) + c, plan.last_columns, thread)
        tmem.loaded()
        if const_expr(plan.workers > 0 and c + plan.last_columns == plan.inner_value):
            if ctx.turn + 1 < ctx.turns:
                before_arrive()
                join(ctx, ctx.full["probs"] + s)  # O is free for the next pair
        _times(line, factor)
        for j in cutlass.range_constexpr(plan.last_columns):
            line[j] = Float32(0) if dead else line[j]
        if const_expr(plan.splits):
            put_part(ctx, query_tile(ctx, s) * plan.tile + thread, line, c)
        else:
            half = cute.make_rmem_tensor(plan.last_columns, kind)
            half.store(line.load().to(kind))
            for j in cutlass.range_constexpr(0, plan.last_columns, 8):  # 16 bytes
                part = cute.make_tensor(half.iterator + j, cute.make_layout(8))
                cute.autovec_copy(part, cute.local_tile(row, (8,), ((c + j) // 8,)))
    if const_expr(not plan.splits):
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ctx.full["final"] + s)
    to, at = ctx.lse, query_tile(ctx, s) * plan.tile + thread
    if at < ctx.length:
        to[at] = lse * LN2


@cute.jit
def _take(ctx, s: cutlass.Constexpr, thread):
    """O of tile s shrinks by the factors that its softmax left, where a row has moved; then P V may start."""
    plan = ctx.plan
    factor = ctx.stats[s * GROUP + thread]
    after_wait()
    if const_expr(plan.lazy > 0):
        if cute.arch.vote_any_sync(factor < 1.0):
            rescale(ctx.tmem + plan.at("o", s), plan.inner_value, thread, factor)
    else:
        rescale(ctx.tmem + plan.at("o", s), plan.inner_value, thread, factor)
    before_arrive()
    join(ctx, ctx.full["probs"] + s)


@cute.jit
def correct(ctx):
    """Statistics are freed crosswise: a group ends its step after the other's were read, so the two alternate, and do
    not compete for MUFU, without a lock around the exponentials."""
    plan = ctx.plan
    thread, warp = ctx.thread % GROUP, ctx.warp - plan.CORRECT
    free, second = ctx.empty["stats"], ctx.blocks - ctx.trail
    if ctx.turn == 0:
        for s in cutlass.range_constexpr(2):
            join(ctx, ctx.full["probs"] + s)  # O is free: the first product overwrites it
    if ctx.lead == 0:  # the first block has nothing to rescale
        cute.arch.barrier(barrier_id=1 + warp, number_of_threads=64)
        cute.arch.mbarrier_arrive(free)
    cute.arch.barrier(barrier_id=5 + warp, number_of_threads=64)
    for i in cutlass.range(1, ctx.blocks, unroll=1):
        cute.arch.barrier(barrier_id=1 + warp, number_of_threads=64)
        if i > ctx.lead:
            _take(ctx, 0, thread)
        if i <= second:
            cute.arch.mbarrier_arrive(free + 1)
        if i < second:
            cute.arch.barrier(barrier_id=5 + warp, number_of_threads=64)
            _take(ctx, 1, thread)
        cute.arch.mbarrier_arrive(free)
    if ctx.trail == 0:
        cute.arch.mbarrier_arrive(free + 1)
    for s in cutlass.range_constexpr(2):
        cute.arch.barrier(barrier_id=1 + 4 * s + warp, number_of_threads=64)
        _finish(ctx, s, thread)
    before_arrive()  # O has been read; the caller signals that tensor memory may go
