"""The math role: 64 queries a warpgroup; the next scores are started before the last weights meet V."""

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.ring import Place, arrive, step, wait
from jax_fa4.kernels.common.tiles import all_keys_visible, key_tiles, queries_of, whole_key_tiles
from jax_fa4.kernels.sm90 import wgmma
from jax_fa4.kernels.sm90.fwd.packed import bring_rows, query_of
from jax_fa4.kernels.sm90.fwd.segments import hide_others, warp_ids
from jax_fa4.kernels.sm90.fwd.store import finish, normalise, store_lse, store_out, store_part, store_rows
from jax_fa4.kernels.sm90.rows import (
    LOG2_E,
    across_quad,
    add_row,
    by_row,
    column_of,
    exp2_of,
    exponentiate,
    exponents_of,
    first_row,
    folded,
    move,
    scale_rows,
    shrink_rows,
    stand,
    weigh,
)
from jax_fa4.mask import keys_seen

ZERO_BARRIER = 2  # named barrier of the math warps
TURN_BARRIER = 3  # and the next: one for each warpgroup, up to four


def scores_mma(plan):
    """Q K^T, both from shared memory."""
    majors = (wgmma.K_MAJOR, wgmma.K_MAJOR)
    return wgmma.product(DTYPES[plan.dtype], majors, (plan.groups, 1), (64, plan.keys))


def output_mma(plan):
    """P V, P from registers."""
    majors = (wgmma.K_MAJOR, wgmma.MN_MAJOR)
    return wgmma.product(DTYPES[plan.dtype], majors, (plan.groups, 1), (64, plan.inner_value), a_in_registers=True)


def start_scores(ctx, scores, q, k, stage):
    """q: of one query tile."""
    wgmma.issue(scores_mma(ctx.plan), scores, q, k[None, None, None, stage], True, -(-ctx.plan.depth // wgmma.STEP))


def start_output(ctx, out, weights, v, stage):
    wgmma.issue(output_mma(ctx.plan), out, weights, v[None, None, None, stage], False)


def bit(n):
    """An int32 with bit n alone."""
    return 1 << n if n < 31 else -(1 << 31)


@cute.jit
def below(key, word: cutlass.Constexpr):
    """A bit for each of the thread's 32 columns from 32 * word on: whether its key, counted from the thread's first, is
    below this one. With words of bits ptxas sets seven predicates at a time (R2P), where two comparisons a pair were
    twice as many instructions as there are pairs."""
    count = 2 * (key >> 3) + cutlass.min(key & 7, 2) - 32 * word
    count = cutlass.max(cutlass.min(count, 32), 0)
    return Int32(-1) if count == 32 else (Int32(1) << cutlass.min(count, 31)) - 1


@cute.jit
def hide(ctx, scores, row, key):
    """-inf where the key is not visible to the row; row and key are the thread's first."""
    view = by_row(scores)
    for r in cutlass.range_constexpr(2):
        begin, end = cutlass.Int32(0), ctx.band.kv_len - key
        if const_expr(ctx.plan.band):
            i = query_of(ctx, row + 8 * r)
            begin, end = keys_seen(i, i, ctx.band, cutlass.min, cutlass.max)
            begin, end = begin - key, end - key
        columns = cute.size(view, mode=[1])
        if const_expr(ctx.plan.bits):
            for word in cutlass.range_constexpr(-(-columns // 32)):
                bits = below(end, word)
                if const_expr(ctx.plan.band):
                    bits = bits & ~below(begin, word)
                for c in cutlass.range_constexpr(32 * word, min(32 * word + 32, columns)):
                    view[r, c] = view[r, c] if (bits & Int32(bit(c % 32))) != 0 else -Float32.inf
        else:
            for c in cutlass.range_constexpr(columns):
                seen = column_of(c) < end
                if const_expr(ctx.plan.band):
                    seen = seen & (column_of(c) >= begin)
                view[r, c] = view[r, c] if seen else -Float32.inf


@cute.jit
def cap(ctx, scores):
    """s becomes limit * tanh(scale * s / limit), with tanh x = 1 - 2 / (1 + exp 2x).

    Not tanh.approx: its relative error of 2^-11 is 2 % of a weight at a cap of 50.
    """
    inverse_limit, limit = ctx.cap
    view = by_row(scores)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            grown = cute.math.exp2(view[r, c] * (inverse_limit * (2.0 * LOG2_E)), fastmath=True)
            view[r, c] = limit - (2.0 * limit) * cute.arch.rcp_approx(grown + 1.0)


def queries_here(ctx):
    """First and last query of the warpgroup's 64 rows."""
    top = ctx.tile * ctx.plan.rows + 64 * (ctx.warp // 4 - 1)
    first, after = queries_of((top, top + 64), ctx.each)
    return first, after - 1


@cute.jit
def mask(ctx, scores, row, tile, own):
    """Scores capped, hidden pairs at -inf. Only tiles with a hidden pair pay; asked for the warpgroup's 64 rows."""
    plan = ctx.plan
    if const_expr(plan.soft_cap):
        cap(ctx, scores)
    key = tile * plan.keys
    whole = all_keys_visible(queries_here(ctx), (key, key + plan.keys - 1), ctx.band, plan.band)
    if wgmma.uniform(cutlass.Int32(whole)) == 0:
        hide(ctx, scores, row, key + 2 * (ctx.thread % 4))
    if const_expr(plan.segments):
        hide_others(ctx, scores, row, key, own)


@cute.jit
def clear_past(ctx, thread, at):
    """Zeroes V's rows past kv_len in the edge tile, the first that is visited.

    They may hold anything, NaN included, and 0 * NaN would reach O. Rows past S were read as zeros already.
    """
    plan = ctx.plan
    rest = ctx.band.kv_len - (ctx.last - 1) * plan.keys
    if (rest < plan.keys) & (ctx.band.kv_len < ctx.keys):
        wait(ctx.full["v"], at)
        chunks = cute.flat_divide(ctx.v[2][None, None, at.index], (1, 8))  # 16 bytes stay together in any swizzle
        zero = cute.make_rmem_tensor((1, 8), DTYPES[plan.dtype])
        zero.fill(0.0)
        columns = plan.inner_value // 8
        begin = cutlass.max(rest, 0) * columns
        for n in cutlass.range(begin + thread, plan.keys * columns, 128 * plan.groups, unroll=1):
            cute.autovec_copy(zero, chunks[None, None, n // columns, n % columns])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ZERO_BARRIER, number_of_threads=128 * plan.groups)


@cute.jit
def take_turn(ctx):
    """Waits until the warpgroup before has issued its products (the first one's first step has no one to wait for)."""
    if const_expr(ctx.plan.turns):
        cute.arch.barrier(barrier_id=TURN_BARRIER + ctx.warp // 4 - 1, number_of_threads=256)


@cute.jit
def give_turn(ctx, n):
    """Lets the next warpgroup issue, after step n: the last one's next is the first, and its step n + 1.

    Not where there is no such step: no arrival is left over at the end.
    """
    if const_expr(ctx.plan.turns):
        groups = ctx.plan.groups
        group = ctx.warp // 4 - 1
        if (group < groups - 1) & (n > 0) | (n + 1 < ctx.last - ctx.first) & (group == groups - 1):
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + (group + 1) % groups, number_of_threads=256)


def hold(ctx, at):
    """Keeps what stands before it before what stands after it, in a step that has V's stage `at`.

    ptxas moves a wgmma wait up over arithmetic that does not need it, here over all of exp2, which then runs behind
    P V and not beside it (docs/decisions/hopper_waits.md). A wait for a phase that has completed ends the block.
    """
    if const_expr(ctx.plan.held or ctx.plan.halfway):
        wait(ctx.full["v"], at)


@cute.jit
def weigh_lazily(ctx, h, at):
    """`weigh_halfway` with a slack. What few steps do stands in branches: a row's factor and base stay until a score is
    beyond its limit, and O and the sums are shrunk only then. At depth 64 386 of 450 instructions are left.

    The wait for P V stands before the second branch, which is a warp's own: PTX wants the whole warpgroup at it."""
    plan, view = ctx.plan, by_row(h.scores)
    tops, older = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    older.fill(0.0)
    for r in cutlass.range_constexpr(2):
        tops[r] = across_quad(folded(view[r, None], cute.arch.fmax, plan.chains), cute.arch.fmax)
    factors, lows, limits = h.bases
    moved = cute.arch.vote_any_sync((tops[0] > limits[0]) | (tops[1] > limits[1]))
    if moved:
        move(tops, (h.peak, h.bases, older), ctx.scale, plan)
    for r in cutlass.range_constexpr(2):
        line = view[r, None]
        line.store(cute.math.fma(line.load(), cute.full_like(line, factors[r]), cute.full_like(line, -lows[r])))
    exponentiate(view[0, None], plan)
    first = folded(view[0, None], operator.add, plan.chains)
    hold(ctx, at)
    warpgroup.wait_group(0)
    if moved:
        for r in cutlass.range_constexpr(2):
            older[r] = cute.math.exp2(older[r], fastmath=True)
            h.total[r] = h.total[r] * older[r]
        scale_rows(h.out, older)
    arrive(ctx.empty["v"], at)
    exponentiate(view[1, None], plan)
    h.total[0] = h.total[0] + first
    h.total[1] = h.total[1] + folded(view[1, None], operator.add, plan.chains)
    wgmma.narrow_to(h.narrow, h.scores)


@cute.jit
def weigh_halfway(ctx, h, at):
    """A step's `weigh`, with the wait for P V between the two rows of a thread, after which V's stage `at` is free: the
    second row's exp2 runs beside O's shrinking and the rounding of P, neither of which may begin before."""
    plan, view, out = ctx.plan, by_row(h.scores), by_row(h.out)
    shrink = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        exponents_of(view[r, None], (h.peak, shrink), r, ctx.scale, plan)
        shrink[r] = cute.math.exp2(shrink[r], fastmath=True)
    exponentiate(view[0, None], plan)
    add_row(view[0, None], h.total, shrink, 0, plan)
    hold(ctx, at)
    warpgroup.wait_group(0)
    arrive(ctx.empty["v"], at)
    columns, outs = cute.size(view, mode=[1]), cute.size(out, mode=[1])
    for c in cutlass.range_constexpr(columns):  # in the order in which it should be issued: ptxas keeps it mostly
        view[1, c] = exp2_of(view[1, c], c, plan)
        for o in cutlass.range_constexpr(c * outs // columns, (c + 1) * outs // columns):
            for r in cutlass.range_constexpr(2):
                out[r, o] = out[r, o] * shrink[r]
    add_row(view[1, None], h.total, shrink, 1, plan)
    wgmma.narrow_to(h.narrow, h.scores)


def own_trip(ctx):
    """[begin, end) of the key tiles that the warpgroup's 64 rows see, inside the CTA's; one, all hidden, if none."""
    plan = ctx.plan
    if not plan.own:
        return ctx.first, ctx.last
    mine = ctx.tile * plan.groups + ctx.warp // 4 - 1
    trip = key_tiles(mine, (64, plan.keys), ctx.band, plan.band, cutlass.min, cutlass.max, ctx.each)
    end = cutlass.max(cutlass.min(trip[1], ctx.last), ctx.first + 1)
    return cutlass.min(cutlass.max(trip[0], ctx.first), end - 1), end


@cute.jit
def pass_by(ctx, thread, at: Place, n, count):
    """Steps n to n + count, of tiles that no row of the warpgroup sees: their stages are freed, turns are passed on."""
    for step_of in cutlass.range(n, n + count, unroll=1):
        wait(ctx.full["k"], at)
        if step_of > 0:
            take_turn(ctx)
        else:
            clear_past(ctx, thread, at)
        give_turn(ctx, step_of)
        arrive(ctx.empty["k"], at)
        wait(ctx.full["v"], at)
        arrive(ctx.empty["v"], at)
        at = step(at, ctx.plan.stages)
    return at


@dataclass(frozen=True)
class Hands:
    """What a math warpgroup holds during a query tile: registers, and its views of shared memory."""

    row: Any  # the thread's first
    own: Any  # segments.warp_ids, or None
    scores: Any
    weights: Any  # operand A of P V
    narrow: Any  # the same registers in the accumulator's order
    out: Any
    peak: Any  # of the thread's two rows
    total: Any
    bases: Any  # where they change in few steps: see rows.stand
    q: Any
    k: Any
    v: Any


@cute.jit
def steps(ctx, h, behind: Place, trip, hides: cutlass.Constexpr):
    """Steps [trip[0], trip[1]): scores of a tile of keys, and P V of the one before, whose place is `behind`; returns
    the place of the last one. hides: whether a tile may have hidden pairs."""
    plan = ctx.plan
    for n in cutlass.range(trip[0], trip[1], unroll=1):
        at = step(behind, plan.stages)
        wait(ctx.full["k"], at)
        take_turn(ctx)
        start_scores(ctx, h.scores, h.q, h.k, at.index)
        wait(ctx.full["v"], behind)
        start_output(ctx, h.out, h.weights, h.v, behind.index)
        give_turn(ctx, n)
        if const_expr(plan.overlap):
            warpgroup.wait_group(1)
            arrive(ctx.empty["k"], at)
        else:
            warpgroup.wait_group(0)
            arrive(ctx.empty["k"], at)
            arrive(ctx.empty["v"], behind)
        if const_expr(hides):
            mask(ctx, h.scores, h.row, ctx.last - 1 - n, h.own)
        elif const_expr(plan.soft_cap):
            cap(ctx, h.scores)
        if const_expr(plan.lazy):
            weigh_lazily(ctx, h, behind)
        elif const_expr(plan.halfway):
            weigh_halfway(ctx, h, behind)
        else:
            shrink = weigh(h.scores, (h.peak, h.total), ctx.scale, plan)
            if const_expr(plan.overlap):
                hold(ctx, behind)
                warpgroup.wait_group(0)
                arrive(ctx.empty["v"], behind)
            shrink_rows(h.out, shrink, plan.slack)
            wgmma.narrow_to(h.narrow, h.scores)
        behind = at
    return behind


@cute.jit
def all_steps(ctx, h, behind: Place, trip):
    """`steps`, those whose tiles hide nothing in a loop of their own, without a branch. Keys are visited from the last
    to the first, so only the first tile, which is none of these, hides any without a band."""
    plan = ctx.plan
    # With two CTAs an SM, or polynomials in the place of MUFU, more loops make 24 to 36 bytes spill.
    if const_expr(plan.segments or plan.blocks > 1 or plan.on_fma > 0):
        behind = steps(ctx, h, behind, trip, True)
    elif const_expr(not plan.band):
        behind = steps(ctx, h, behind, trip, False)
    else:
        first, last = whole_key_tiles(queries_here(ctx), plan.keys, ctx.band, True, cutlass.min, cutlass.max)
        begin = cutlass.max(cutlass.min(ctx.last - last, trip[1]), trip[0])
        end = cutlass.max(cutlass.min(ctx.last - first, trip[1]), begin)
        start, begin, end, stop = (wgmma.uniform(x) for x in (trip[0], begin, end, trip[1]))
        behind = steps(ctx, h, behind, (start, begin), True)
        behind = steps(ctx, h, behind, (begin, end), False)
        behind = steps(ctx, h, behind, (end, stop), True)
    return behind


def hands(ctx, q_at):
    """What the warpgroup holds for a query tile at a place of the ring q, before the first step."""
    plan = ctx.plan
    row = ctx.tile * plan.rows + first_row(ctx.thread - 128)
    qk, pv = scores_mma(plan), output_mma(plan)
    # Slices of a warpgroup, not of a thread: descriptors are then computed in uniform registers.
    whole = 128 * (ctx.warp // 4 - 1)
    mine, ours = qk.get_slice(whole), pv.get_slice(whole)
    scores = cute.make_rmem_tensor(mine.partition_shape_C((plan.rows, plan.keys)), Float32)
    out = cute.make_rmem_tensor(ours.partition_shape_C((plan.rows, plan.inner_value)), Float32)
    weights, narrow = wgmma.as_operand(scores, DTYPES[plan.dtype])
    peak, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    peak.fill(-Float32.inf)
    total.fill(0.0)
    out.fill(0.0)
    return Hands(
        row=row,
        own=warp_ids(ctx, row) if plan.segments else None,
        scores=scores,
        weights=weights,
        narrow=narrow,
        out=out,
        peak=peak,
        total=total,
        bases=[cute.make_rmem_tensor(2, Float32) for _ in range(3)] if plan.lazy else None,
        q=qk.make_fragment_A(mine.partition_A(ctx.q[2]))[None, None, None, q_at.index],
        k=qk.make_fragment_B(mine.partition_B(ctx.k[2])),
        v=pv.make_fragment_B(ours.partition_B(wgmma.turned(ctx.v[2]))),
    )


@cute.jit
def first_step(ctx, h, at: Place, end):
    """Scores and weights of the last tile of keys that the warpgroup's rows see, `end` - 1."""
    plan = ctx.plan
    thread = ctx.thread - 128
    wait(ctx.full["k"], at)
    if const_expr(plan.own):
        if ctx.last > end:
            take_turn(ctx)
    start_scores(ctx, h.scores, h.q, h.k, at.index)
    if const_expr(plan.own):
        if ctx.last > end:
            give_turn(ctx, ctx.last - end)
        else:
            clear_past(ctx, thread, at)
    else:
        clear_past(ctx, thread, at)
    warpgroup.wait_group(0)
    arrive(ctx.empty["k"], at)
    mask(ctx, h.scores, h.row, end - 1, h.own)
    weigh(h.scores, (h.peak, h.total), ctx.scale, plan)
    if const_expr(plan.lazy):
        stand(h.peak, h.bases, ctx.scale, plan)
    wgmma.narrow_to(h.narrow, h.scores)
    if const_expr(plan.own):
        if ctx.last == end:
            give_turn(ctx, 0)
    else:
        give_turn(ctx, 0)


@cute.jit
def meet_keys(ctx, h, q_at: Place, behind: Place, trip):
    """All steps through the tiles [trip[0], trip[1]) of keys, from the last to the first; returns V's next place."""
    plan = ctx.plan
    begin, end = trip
    first_step(ctx, h, behind, end)
    behind = all_steps(ctx, h, behind, (ctx.last - end + 1, ctx.last - begin))
    if const_expr(plan.workers > 0):
        arrive(ctx.empty["q"], q_at)
    wait(ctx.full["v"], behind)
    start_output(ctx, h.out, h.weights, h.v, behind.index)
    warpgroup.wait_group(0)
    if const_expr(plan.workers > 0 or plan.own):
        arrive(ctx.empty["v"], behind)
        behind = step(behind, plan.stages)
    return behind


@cute.jit
def attend(ctx, q_at: Place, behind: Place):
    """Scores, weights and output of a query tile; returns the next place of V.

    Tensor cores, in order: S(0) | S(n + 1), O += P(n) V(n) | O += P(last) V(last). With `overlap`, exp2 of S(n + 1)
    beside P(n) V(n).
    """
    plan = ctx.plan
    h = hands(ctx, q_at)
    if const_expr(plan.packed):
        bring_rows(ctx, ctx.thread - 128)
    else:
        wait(ctx.full["q"], q_at)
    begin, end = own_trip(ctx)
    if const_expr(plan.own):
        behind = pass_by(ctx, ctx.thread - 128, behind, 0, ctx.last - end)
    if const_expr(plan.hollow):
        if end > begin:
            behind = meet_keys(ctx, h, q_at, behind, (begin, end))
    else:  # there is a tile: see `place`
        behind = meet_keys(ctx, h, q_at, behind, (begin, end))
    if const_expr(plan.own):
        behind = pass_by(ctx, ctx.thread - 128, behind, ctx.last - begin, begin - ctx.first)
    inverse, lse = finish(ctx, h.row, h.peak, h.total)
    normalise(h.out, inverse)
    if const_expr(plan.splits):
        store_part(ctx, h.row, h.out)
    elif const_expr(plan.workers > 0):
        store_rows(ctx, ctx.thread - 128, h.out)
    else:
        store_out(ctx, output_mma(plan), ctx.thread - 128, h.out)
    store_lse(ctx, h.row, lse)
    return behind
