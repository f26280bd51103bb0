"""S^T to P^T to dS^T in a math thread's registers: soft cap, mask, exp2. A thread has two keys, j and j + 8."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa4.kernels.common.ring import arrive
from jax_fa4.kernels.common.tiles import all_keys_visible
from jax_fa4.kernels.passes.plan import FRAGMENT
from jax_fa4.kernels.sm90.bwd.segments import hide_others
from jax_fa4.kernels.sm90.rows import LOG2_E, by_row, column_of
from jax_fa4.mask import queries_seeing


@cute.jit
def cap(ctx, scores):
    """s becomes limit * tanh(scale * s / limit), with tanh x = 1 - 2 / (1 + exp 2x), as in the forward."""
    inverse_limit, limit = ctx.cap
    view = by_row(scores)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            grown = cute.math.exp2(view[r, c] * (inverse_limit * (2.0 * LOG2_E)), fastmath=True)
            view[r, c] = limit - (2.0 * limit) * cute.arch.rcp_approx(grown + 1.0)


@cute.jit
def hide(ctx, scores, key, query):
    """-inf where the key is not visible to the query; key and query are the thread's first.

    Queries past q_len need no hiding: their LSE is +inf.
    """
    view = by_row(scores)
    for r in cutlass.range_constexpr(2):
        j = key + 8 * r
        begin, end = Int32(0), Int32(1 << 30)
        if const_expr(ctx.plan.band):
            begin, end = queries_seeing(j, j, ctx.band, cutlass.min, cutlass.max)
            begin, end = begin - query, end - query
        if j >= ctx.band.kv_len:
            end = Int32(-(1 << 30))
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            seen = column_of(c) < end
            if const_expr(ctx.plan.band):
                seen = seen & (column_of(c) >= begin)
            view[r, c] = view[r, c] if seen else -Float32.inf


@cute.jit
def mask(ctx, h, m):
    """Scores of query tile m capped, hidden pairs at -inf. Only tiles with a hidden pair pay."""
    plan = ctx.plan
    if const_expr(plan.soft_cap):
        cap(ctx, h.scores)
    top = m * plan.rows
    key = ctx.tile * plan.keys + h.key_offset
    if not all_keys_visible((top, top + plan.rows - 1), (key, key + 63), ctx.band, plan.band):
        hide(ctx, h.scores, h.key, top + 2 * (ctx.thread % 4))
    if const_expr(plan.segments):
        hide_others(ctx, h.scores, h.key, top, h.own)


@cute.jit
def statistics(ctx, h, stage, which: cutlass.Constexpr):
    """LSE in base 2 (0) or delta (1) of the thread's columns, in the order of an accumulator row."""
    plan = ctx.plan
    found = cute.make_rmem_tensor(cute.make_layout((2, plan.rows // 8)), Float32)
    if const_expr(plan.by_fours):
        fours = cute.make_layout((4, plan.rows // FRAGMENT))
        of = ctx.held + (stage * (2 * plan.rows) + which * plan.rows + 4 * (ctx.thread % 4))
        source = cute.make_tensor(of.align(16), cute.make_layout(fours.shape, stride=(1, FRAGMENT)))
        cute.autovec_copy(source, cute.make_tensor(found.iterator, fours))
        return found
    at = stage * (2 * plan.rows) + which * plan.rows + 2 * (ctx.thread % 4)
    source = (ctx.held + at).align(8)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, plan.rows // 8), stride=(1, 8))), found)
    return found


@cute.jit
def free_queries(ctx, at):
    """Q's stage is free. Its statistics were read lane by lane, and one lane speaks for its warp: where no barrier
    stands between (`apart`), the lanes wait for one another first, which an election alone does not promise."""
    if const_expr(ctx.plan.each_lane):
        cute.arch.mbarrier_arrive(ctx.empty["q"] + at.index)
    else:
        if const_expr(ctx.plan.apart):
            cute.arch.sync_warp()
        arrive(ctx.empty["q"], at)


@cute.jit
def weigh(ctx, h, lse):
    """`scores` becomes P^T; with a soft cap P^T goes into its 16-bit registers, and `scores` becomes P (1 - tanh^2).

    That is what dP - delta is multiplied with, tanh being the capped score over the cap. Hidden scores are -inf, for
    which 1 - tanh^2 is held at 0 so that 0 * inf does not arise.
    """
    view = by_row(h.scores)
    weights = cute.make_rmem_tensor(h.scores.layout, Float32)
    made = by_row(weights)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            made[r, c] = cute.math.exp2(view[r, c] * h.scale - lse[c], fastmath=True)
            if const_expr(ctx.plan.soft_cap):
                slope = view[r, c] * (1.0 / ctx.cap[1])
                view[r, c] = made[r, c] * cute.arch.fmax(1.0 - slope * slope, Float32(0.0))
            else:
                view[r, c] = made[r, c]
    if const_expr(ctx.plan.soft_cap):
        h.p[1].store(weights.load().to(h.p[1].element_type))


@cute.jit
def round_weights(ctx, h):
    """P^T into its 16-bit registers, if it is not there yet."""
    if const_expr(not ctx.plan.soft_cap):
        h.p[1].store(h.scores.load().to(h.p[1].element_type))


@cute.jit
def differ(h, delta):
    """dP^T becomes dS^T = P (dP - delta)."""
    p, view = by_row(h.scores), by_row(h.slopes)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            view[r, c] = p[r, c] * (view[r, c] - delta[c])


def round_slopes(h):
    """dS^T into its 16-bit registers."""
    h.s[1].store(h.slopes.load().to(h.s[1].element_type))
