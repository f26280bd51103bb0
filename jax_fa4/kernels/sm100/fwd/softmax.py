"""A softmax warpgroup: scores become weights. One thread owns one row, so maximum and sum need no shuffle."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass._mlir.dialects import nvvm

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.exp2 import exp2_line
from jax_fa4.kernels.sm100.fwd.context import query_of, query_tile
from jax_fa4.kernels.sm100.fwd.join import join
from jax_fa4.kernels.sm100.fwd.mask import hide
from jax_fa4.kernels.sm100.fwd.plan import GROUP
from jax_fa4.kernels.sm100.fwd.rows import bring_row
from jax_fa4.kernels.sm100.fwd.segments import hide_others, own_ids
from jax_fa4.kernels.sm100.fwd.work import of_tile
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive

CHAINS = 4  # independent chains of maxima and of packed sums


def _max3(a, b, c):
    """One 3-input max.f32. Two nested `fmax` are not fused, and `.reduce(MAX)` emits the NaN-propagating form."""
    a, b, c = (Float32(x).ir_value() for x in (a, b, c))
    return Float32(nvvm.fmax(a, b, c=c))


def row_max(line, peak, once=False):
    """max(peak, line). once: `peak` enters one chain only, which costs nothing and is the same number; the static
    verifier's proof of equality wants every term of a maximum once."""
    best = [_max3(line[2 * i], line[2 * i + 1], peak) for i in range(1 if once else CHAINS)]
    best += [cute.arch.fmax(line[2 * i], line[2 * i + 1]) for i in range(len(best), CHAINS)]
    for c in range(2 * CHAINS, cute.size(line), 2 * CHAINS):
        for i in range(CHAINS):
            best[i] = _max3(best[i], line[c + 2 * i], line[c + 2 * i + 1])
    return _max3(cute.arch.fmax(best[0], best[1]), best[2], best[3])


def row_sum(line, first):
    """first + sum(line)."""
    add = cute.arch.add_packed_f32x2
    lanes = [(line[2 * i], line[2 * i + 1]) for i in range(CHAINS)]
    lanes[0] = add((first, Float32(0)), lanes[0])
    for c in range(2 * CHAINS, cute.size(line), 2 * CHAINS):
        for i in range(CHAINS):
            lanes[i] = add(lanes[i], (line[c + 2 * i], line[c + 2 * i + 1]))
    a, b = add(add(lanes[0], lanes[1]), add(lanes[2], lanes[3]))
    return a + b


@cute.jit
def cap(line, before):
    """tanh of the score, in place, as 1 - 2 / (1 + 2^(before * score)); before has the factor 2 log2(e).

    Not tanh.approx, whose relative error of 2^-11 is 2 % of a weight at a cap of 50.
    """
    for c in cutlass.range_constexpr(cute.size(line)):
        line[c] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(line[c] * before, fastmath=True))


@cute.jit
def move(plan: cutlass.Constexpr, peak, top, scale):
    """New reference maximum of the row and the factor for what was summed under the old one.

    While the maximum has grown by no more than `lazy` the old reference stays and the factor is exactly 1; weights
    and sums then exceed 1 by at most 2^lazy, and the final division by the sum is exact either way. -inf is kept as
    the maximum of a row that has seen no key, but 0 stands for it in exponents.
    """
    safe = Float32(0) if top == -Float32.inf else top
    d = (peak - safe) * scale
    factor = cute.math.exp2(d, fastmath=True)
    if const_expr(plan.lazy > 0):
        keep = d >= -plan.lazy
        top = peak if keep else top
        factor = Float32(1) if keep else factor
    return top, factor


@cute.jit
def weigh(ctx, s, thread, line, top):
    """line = 2^((line - top) scale); 16-bit copies go to tensor memory by quarters over the upper half of S.

    The first `early` quarters arrive at the join, so that P V starts on them; the rest has a barrier of its own.
    """
    plan = ctx.plan
    base = Float32(0) if top == -Float32.inf else -(top * ctx.scale)
    quarter = plan.tile // 4
    for i in cutlass.range_constexpr(4):
        part = cute.make_tensor(line.iterator + quarter * i, cute.make_layout(quarter))
        for c in cutlass.range_constexpr(0, quarter, 2):
            part[c], part[c + 1] = cute.arch.fma_packed_f32x2(
                (part[c], part[c + 1]), (ctx.scale, ctx.scale), (base, base)
            )
        exp2_line(part, quarter * i, plan.emulated, plan.share.degree if plan.share else 0)
        words = cute.make_rmem_tensor(quarter // 2, Float32)
        kind = DTYPES[plan.dtype]
        half = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=kind), cute.make_layout(quarter))
        half.store(part.load().to(kind))
        tmem.write(ctx.tmem + plan.at("p", s) + quarter // 2 * i, words, thread)
        if const_expr(i == plan.early - 1):
            tmem.stored()
            before_arrive()
            join(ctx, ctx.full["probs"] + s)
    if const_expr(plan.early < 4):
        tmem.stored()
        before_arrive()
        arrive_warp(ctx.full["rest"] + s, plan.leader)


@cute.jit
def softmax(ctx):
    plan = ctx.plan
    s, thread = ctx.warp // 4, ctx.thread % GROUP
    # Bound here: a store through ctx in a loop would make ctx a carried value.
    slot, stats = s * GROUP + thread, ctx.stats
    mine = 1 + ctx.warp  # named barrier of this warp and the correction warp with the same rows
    row = query_tile(ctx, s) * plan.tile + thread
    round, start = of_tile(ctx.rounds, s), of_tile((ctx.last - 1 - ctx.lead, ctx.last - 1), s)
    spent = round + ctx.turn  # phases of `stats`: one a block, one a pair
    if const_expr(plan.packed):
        bring_row(ctx, s, thread)
    own = own_ids(ctx, row) if const_expr(plan.segments) else None
    peak, total = -Float32.inf, Float32(0)
    if const_expr(plan.workers > 0):  # the last pair's sum and maximum were read
        cute.arch.mbarrier_wait(ctx.empty["stats"] + s, (spent & 1) ^ 1)
    for i in cutlass.range(ctx.blocks - of_tile((ctx.lead, ctx.trail), s), unroll=1):
        cute.arch.mbarrier_wait(ctx.full["scores"] + s, (round + i) & 1)
        after_wait()
        line = tmem.read(ctx.tmem + plan.at("s", s), plan.tile, thread)
        tmem.loaded()
        if const_expr(plan.soft_cap):
            cap(line, ctx.before)
        hide(ctx, s, thread, start - i, line)
        if const_expr(plan.segments):
            hide_others(ctx, start - i, line, own)
        peak, factor = move(plan, peak, row_max(line, peak, plan.baked_scale is not None), ctx.scale)
        stats[slot] = factor
        cute.arch.barrier_arrive(barrier_id=mine, number_of_threads=64)
        weigh(ctx, s, thread, line, peak)
        cute.arch.mbarrier_wait(ctx.empty["stats"] + s, (spent + i) & 1)
        total = row_sum(line, total * factor)  # the float32 weights, not the rounded ones; off the critical path
    past = query_of(ctx, row) >= ctx.band.q_len
    stats[slot] = Float32(0) if past else total
    stats[2 * GROUP + slot] = -Float32.inf if past else peak
    cute.arch.barrier_arrive(barrier_id=mine, number_of_threads=64)
