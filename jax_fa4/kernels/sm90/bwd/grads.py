"""The math role: dK and dV stay in registers, dQ leaves tile by tile."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.ring import Place, arrive, start, step, wait
from jax_fa4.kernels.sm90 import wgmma
from jax_fa4.kernels.sm90.bwd import products
from jax_fa4.kernels.sm90.bwd.items import another, nest, together, told, visit, within
from jax_fa4.kernels.sm90.bwd.kept import keep_values, values_kept
from jax_fa4.kernels.sm90.bwd.leave import announce, announce_older, hand_over, leave
from jax_fa4.kernels.sm90.bwd.plan import DS_BUFFERS
from jax_fa4.kernels.sm90.bwd.scores import differ, free_queries, mask, round_slopes, round_weights, statistics, weigh
from jax_fa4.kernels.sm90.bwd.segments import key_ids
from jax_fa4.kernels.sm90.bwd.store import OWN_BARRIERS, TURN_BARRIERS, clear_rows, hand_keys, meet, store_keys
from jax_fa4.kernels.sm90.rows import LOG2_E, first_row


@dataclass(frozen=True)
class Hands:
    """What the math role holds: its accumulators, their 16-bit copies, its views of shared memory."""

    thread: Any  # 0.. within the math role
    group: Any  # the warpgroup, a uniform number
    key: Any  # the thread's first
    key_offset: Any  # of the warpgroup's keys within the tile
    scale: Any  # what a score (capped, where there is a cap) is multiplied with in the exponent
    own: Any  # segments.key_ids, or None
    scores: Any  # S^T, then P^T
    slopes: Any  # dP^T, then dS^T
    dk: Any
    dv: Any
    part: Any  # this query tile's dQ
    dk_mma: Any
    dv_mma: Any
    p: Any  # (operand A, the same registers in an accumulator's order)
    s: Any
    put: Any  # tiled copy of dS^T into shared memory
    k: Any  # fragments: operands of S and dP
    v: Any
    kept: Any  # the first steps of operand A of dP in registers: see Plan.kept
    q: Any
    dout: Any
    q_t: Any  # operands B of dK and dV
    dout_t: Any
    ds_t: Any  # operands of dQ
    k_t: Any


def hands(ctx, thread):
    """Everything of the role that does not move."""
    plan = ctx.plan
    dtype = DTYPES[plan.dtype]
    first, second, third = products.scores_mma(plan), products.keys_mma(plan, plan.inner), products.queries_mma(plan)
    value = products.keys_mma(plan, plan.inner_value)
    # Slices of a warpgroup, not of a thread: what a product reads from shared memory depends on no more, and from a
    # uniform number ptxas computes descriptors in uniform registers. From the thread's it moved two words there before
    # each wgmma (R2UR): 600 instructions a step for 440, 0.93 to 0.98 of the speed (H200, 2026-11-30).
    group = ctx.warp // 4 - 1
    one, two, three, four = (mma.get_slice(128 * group) for mma in (first, second, third, value))
    row, key_offset = first_row(thread % 128), 64 * group
    key = ctx.tile * plan.keys + key_offset + row
    shapes = (
        one.partition_shape_C((plan.keys, plan.rows)),
        one.partition_shape_C((plan.keys, plan.rows)),
        two.partition_shape_C((plan.keys, plan.inner)),
        four.partition_shape_C((plan.keys, plan.inner_value)),
        three.partition_shape_C((plan.rows, plan.inner)),
    )
    scores, slopes, dk, dv, part = (cute.make_rmem_tensor(shape, Float32) for shape in shapes)
    turned = wgmma.turned
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    return Hands(
        thread=thread,
        group=group,
        key=key,
        key_offset=key_offset,
        scale=LOG2_E if plan.soft_cap else ctx.scale * LOG2_E,
        own=key_ids(ctx, key) if plan.segments else None,
        scores=scores,
        slopes=slopes,
        dk=dk,
        dv=dv,
        part=part,
        dk_mma=second,
        dv_mma=value,
        p=wgmma.as_operand(scores, dtype),
        s=wgmma.as_operand(slopes, dtype),
        put=cute.make_tiled_copy_C(matrix, first).get_slice(thread),
        k=first.make_fragment_A(one.partition_A(ctx.k[2])),
        v=first.make_fragment_A(one.partition_A(ctx.v[2])),
        kept=values_kept(ctx, 128 * group) if plan.kept else None,
        q=first.make_fragment_B(one.partition_B(ctx.q[2])),
        dout=first.make_fragment_B(one.partition_B(ctx.dout[2])),
        q_t=second.make_fragment_B(two.partition_B(turned(ctx.q[2]))),
        dout_t=value.make_fragment_B(four.partition_B(turned(ctx.dout[2]))),
        ds_t=third.make_fragment_A(three.partition_A(turned(ctx.ds))),
        k_t=third.make_fragment_B(three.partition_B(turned(ctx.k[2]))),
    )


def stage(fragment, index):
    return fragment[None, None, None, index]


@cute.jit
def start_scores(ctx, h, at):
    wait(ctx.full["q"], at)
    steps = products.steps(ctx.plan.depth)
    wgmma.issue(products.scores_mma(ctx.plan), h.scores, stage(h.k, 0), stage(h.q, at.index), True, steps)


@cute.jit
def start_slopes(ctx, h, at):
    wait(ctx.full["dout"], at)
    steps, kept = products.steps(ctx.plan.value_depth), ctx.plan.kept
    dout = stage(h.dout, at.index)
    if const_expr(kept > 0):
        warpgroup.fence()
        some, rest = products.slopes_mma(ctx.plan), products.scores_mma(ctx.plan)
        for n in cutlass.range_constexpr(min(kept, steps)):
            some.set(warpgroup.Field.ACCUMULATE, n > 0)
            cute.gemm(some, h.slopes, h.kept[n][None, None, 0], dout[None, None, n], h.slopes)
        rest.set(warpgroup.Field.ACCUMULATE, True)
        for n in cutlass.range_constexpr(kept, steps):
            cute.gemm(rest, h.slopes, stage(h.v, 0)[None, None, n], dout[None, None, n], h.slopes)
        warpgroup.commit_group()
    else:
        wgmma.issue(products.scores_mma(ctx.plan), h.slopes, stage(h.v, 0), dout, True, steps)


@cute.jit
def start_values(ctx, h, at):
    wgmma.issue(products.keys_mma(ctx.plan, ctx.plan.inner_value), h.dv, h.p[0], stage(h.dout_t, at.index), False)


@cute.jit
def start_keys(ctx, h, at):
    wgmma.issue(products.keys_mma(ctx.plan, ctx.plan.inner), h.dk, h.s[0], stage(h.q_t, at.index), False)


@cute.jit
def lay_down(ctx, h, half, to, buffer):
    """dS^T from registers to shared memory (keys, rows)."""
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), DTYPES[ctx.plan.dtype])
    cute.copy(matrix, h.put.retile(half[1]), h.put.partition_D(to[None, None, buffer.index]))


@cute.jit
def clear_queries(ctx, h, m, q_at, dout_at):
    """Rows past q_len of Q and dO, which may hold anything, become zeros. Rows past T were read as such already."""
    plan = ctx.plan
    rest = ctx.band.q_len - m * plan.rows
    if (rest < plan.rows) & (ctx.band.q_len < ctx.queries):
        wait(ctx.full["q"], q_at)
        wait(ctx.full["dout"], dout_at)
        clear_rows(ctx.q[2][None, None, q_at.index], rest, h.thread, plan)
        clear_rows(ctx.dout[2][None, None, dout_at.index], rest, h.thread, plan)
        meet(plan)


@cute.jit
def clear_keys(ctx, thread):
    """Likewise the rows past kv_len of K and V: 0 * NaN would reach dQ."""
    plan = ctx.plan
    rest = ctx.band.kv_len - ctx.tile * plan.keys
    if (rest < plan.keys) & (ctx.band.kv_len < ctx.keys):
        clear_rows(ctx.k[2][None, None, 0], rest, thread, plan)
        clear_rows(ctx.v[2][None, None, 0], rest, thread, plan)
        meet(plan)


@cute.jit
def hold(ctx, at):
    """Keeps what stands before it before what stands after it, in a step that has dO's stage `at`.

    ptxas moves a wgmma wait up over arithmetic that does not need it: of 32 exp2 that PTX has between the waits for S
    and for dP, 1 was left there in SASS, so that exp2 ran after dP and not beside it (DSL 4.8.1, ptxas 13.4). It does
    not move them into another basic block, and a wait for a phase that has completed already makes one for the price of
    a test and a branch.
    """
    if const_expr(ctx.plan.held):
        wait(ctx.full["dout"], at)


@cute.jit
def tile_step(ctx, h, m, places, line, begun):
    """Tensor cores, in order: S, dP | dV | dQ, dK. exp2 runs beside dP, handing dQ over beside dK.

    Starting dV before dP is awaited looks like more overlap and is slower: 3-7 % on full masks, 1-3 % on causal ones
    (H200, 2026-11-29, DSL 4.8.1). No wgmma is in flight across the loop's back edge: ptxas spills there.
    """
    plan = ctx.plan
    q_at, dout_at, turn_at, buffer = places
    clear_queries(ctx, h, m, q_at, dout_at)
    if const_expr(plan.early):  # loads behind it wait for what S and dP read: 0.97 of the speed
        wait(ctx.full["q"], q_at)
        lse = statistics(ctx, h, q_at.index, 0)
    start_scores(ctx, h, q_at)
    start_slopes(ctx, h, dout_at)
    announce_older(ctx, turn_at, begun)
    late, kept = plan.crowded, plan.kept > 0 or plan.early
    if const_expr(plan.early):
        pass
    elif const_expr(kept and not late):  # delta beside exp2, which needs fewer registers
        lse = statistics(ctx, h, q_at.index, 0)
    elif const_expr(not late):
        lse, delta = statistics(ctx, h, q_at.index, 0), statistics(ctx, h, q_at.index, 1)
    warpgroup.wait_group(1)  # S
    mask(ctx, h, m)
    if const_expr(late and not plan.early):  # read only now
        lse = statistics(ctx, h, q_at.index, 0)
    weigh(ctx, h, lse)
    hold(ctx, dout_at)
    if const_expr(kept and not late):
        delta = statistics(ctx, h, q_at.index, 1)
    warpgroup.wait_group(0)  # dP
    if const_expr(late):
        delta = statistics(ctx, h, q_at.index, 1)
    differ(h, delta)
    round_weights(ctx, h)  # only now, when its float32 registers are no longer needed
    round_slopes(h)
    lay_down(ctx, h, h.s, ctx.ds, buffer)
    start_values(ctx, h, dout_at)
    meet(plan)  # two buffers, so this one barrier also frees the older
    wgmma.issue(products.queries_mma(plan), h.part, stage(h.ds_t, buffer.index), stage(h.k_t, 0), True)
    start_keys(ctx, h, q_at)
    warpgroup.wait_group(1)  # dV and dQ
    arrive(ctx.empty["dout"], dout_at)
    leave(ctx, h, turn_at, line + m)
    warpgroup.wait_group(0)  # dK
    free_queries(ctx, q_at)


@cute.jit
def lagged_step(ctx, h, m, places, line, begun):
    """Tensor cores, in order: S, dP, dK of the step before | dQ, dV. exp2, dS beside dP and dK; dQ leaves beside dV.

    `begun`: a step has been before. Else dS is 0 and Q's stage this one's, so that dK stays.
    """
    plan = ctx.plan
    q_at, q_before, dout_at, turn_at, buffer = places
    clear_queries(ctx, h, m, q_at, dout_at)
    start_scores(ctx, h, q_at)
    start_slopes(ctx, h, dout_at)
    start_keys(ctx, h, q_before)
    warpgroup.wait_group(2)  # S
    mask(ctx, h, m)
    weigh(ctx, h, statistics(ctx, h, q_at.index, 0))
    hold(ctx, dout_at)
    warpgroup.wait_group(1)  # dP
    differ(h, statistics(ctx, h, q_at.index, 1))
    hold(ctx, dout_at)
    warpgroup.wait_group(0)  # dK
    if begun:
        free_queries(ctx, q_before)
    round_weights(ctx, h)
    round_slopes(h)
    lay_down(ctx, h, h.s, ctx.ds, buffer)
    meet(plan)
    wgmma.issue(products.queries_mma(plan), h.part, stage(h.ds_t, buffer.index), stage(h.k_t, 0), True)
    start_values(ctx, h, dout_at)
    warpgroup.wait_group(1)  # dQ
    leave(ctx, h, turn_at, line + m)
    warpgroup.wait_group(0)  # dV
    arrive(ctx.empty["dout"], dout_at)


@cute.jit
def await_other(ctx, h):
    """Until the other warpgroup has laid down the dS that comes before this one's, and has passed its own wait.

    So exp2 of the two alternate, and each place of dS is free when its turn comes: whoever arrives here has seen the
    products that read it complete.
    """
    cute.arch.barrier(barrier_id=TURN_BARRIERS + 1 - h.group, number_of_threads=256)


@cute.jit
def let_other(ctx, h):
    """What `await_other` of the other warpgroup waits for. And this warpgroup's own warps wait for one another: dQ of
    the second one reads at once what all four have laid down, and PTX does not say that a wgmma waits for them."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIERS + h.group, number_of_threads=256)
    cute.arch.barrier(barrier_id=OWN_BARRIERS + h.group, number_of_threads=128)


@cute.jit
def start_queries(ctx, h, buffer):
    wgmma.issue(products.queries_mma(ctx.plan), h.part, stage(h.ds_t, buffer.index), stage(h.k_t, 0), True)


@cute.jit
def turn_step(ctx, h, m, places, begun, laid):
    """Tensor cores, in order: S, dP | dQ, dV, dK. Nothing of this warpgroup's runs beside its exp2 and dS: the other
    warpgroup's products do. dQ needs the dS of both: the first warpgroup makes that of the step before.

    begun: the step before was of this tile of keys, or this is the second warpgroup. laid: that step left a part of dQ.
    Returns dQ's next place.
    """
    plan = ctx.plan
    q_at, dout_at, turn_at, buffer = places
    clear_queries(ctx, h, m, q_at, dout_at)
    start_scores(ctx, h, q_at)
    start_slopes(ctx, h, dout_at)
    announce_older(ctx, turn_at, laid)
    if const_expr(plan.early):
        lse = statistics(ctx, h, q_at.index, 0)
    warpgroup.wait_group(0)
    if begun:
        await_other(ctx, h)
    mask(ctx, h, m)
    if const_expr(not plan.early):
        lse = statistics(ctx, h, q_at.index, 0)
    weigh(ctx, h, lse)
    differ(h, statistics(ctx, h, q_at.index, 1))
    round_weights(ctx, h)
    round_slopes(h)
    if const_expr(plan.values_first):
        start_values(ctx, h, dout_at)
    lay_down(ctx, h, h.s, ctx.ds, buffer)
    let_other(ctx, h)
    start_queries(ctx, h, Place(buffer.index ^ (1 - h.group), buffer.phase))
    if const_expr(not plan.values_first):
        start_values(ctx, h, dout_at)
    start_keys(ctx, h, q_at)
    warpgroup.wait_group(1 if plan.values_first else 2)  # dQ
    if begun:
        hand_over(ctx, h, turn_at)
        turn_at = step(turn_at, plan.parts)
    warpgroup.wait_group(0)
    arrive(ctx.empty["dout"], dout_at)
    free_queries(ctx, q_at)
    return turn_at


@cute.jit
def turn_steps(ctx, h, places, item_at):
    """`steps` with turns. item_at: where ctx's tile was told, or None: what it says is read again at each step, since
    the registers are needed for other things."""
    plan = ctx.plan
    q_at, _, turn_at, _ = places  # all rings of two stages but dQ's move together
    first = h.group == 0
    begun, laid = not first, cutlass.Boolean(False)
    m, left, of_group = ctx.first, ctx.group * (ctx.last - ctx.first), Int32(0)
    while left > 0:
        one, mine = ctx, h
        if const_expr(plan.workers > 0):
            one = told(ctx, item_at)
            mine = replace(h, key=h.key + one.tile * plan.keys)
        turn_at = turn_step(one, mine, visit(one, m), (q_at, q_at, turn_at, q_at), begun, laid)
        q_at = step(q_at, 2)
        laid = cutlass.Boolean(begun)
        begun = cutlass.Boolean(True)
        left = left - 1
        if const_expr(plan.alternates):
            of_group = of_group + 1
            if (of_group == one.group) | (not together(one)):
                of_group, m = Int32(0), m + 1
        else:
            m = m + 1
        if m == one.last:
            m = one.first
    announce_older(ctx, turn_at, laid)
    if first & begun:
        await_other(ctx, h)
        start_queries(ctx, h, Place(q_at.index ^ 1, q_at.phase))
        warpgroup.wait_group(0)
        hand_over(ctx, h, turn_at)
        if const_expr(plan.late):
            announce(ctx, turn_at)
        turn_at = step(turn_at, plan.parts)
    return q_at, q_at, turn_at, q_at


@cute.jit
def clear_before(ctx, thread):
    """Zeroes what stands for the dS before the first: its dQ is made, since products do not stand in branches (C7514
    and spills), and dropped."""
    if const_expr(ctx.plan.turns or ctx.plan.apart):
        clear_rows(ctx.ds[None, None, 1], Int32(0), thread, ctx.plan)
        meet(ctx.plan)


def first_line(ctx):
    """The first query tile of the group's first head, counted over all heads and examples."""
    return (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group) * ctx.tiles


@cute.jit
def lagged_steps(ctx, h):
    plan = ctx.plan
    q_at, q_before, dout_at, turn_at, buffer = start(0), start(0), start(0), start(1), start(0)
    h.s[1].fill(0.0)
    m, line = ctx.first, first_line(ctx)
    total = ctx.group * (ctx.last - ctx.first)
    for n in cutlass.range(total, unroll=1):
        lagged_step(ctx, h, m, (q_at, q_before, dout_at, turn_at, buffer), line, n > 0)
        q_before = q_at
        q_at, dout_at = step(q_at, plan.query_stages), step(dout_at, plan.dout_stages)
        turn_at, buffer = step(turn_at, plan.parts), step(buffer, 2)
        m = m + 1
        if m == ctx.last:
            m = ctx.first
            line = line + ctx.tiles
    if total > 0:
        start_keys(ctx, h, q_before)
        warpgroup.wait_group(0)


def alike(plan, places):
    """With `early` the rings of two stages, which move together but for dQ's, are counted once."""
    if plan.early and plan.query_stages == plan.dout_stages == DS_BUFFERS:
        q_at, _, turn_at, _ = places
        return q_at, q_at, turn_at, q_at
    return places


def onward(plan, q_at, dout_at, turn_at, buffer):
    """Each a place further."""
    return (
        step(q_at, plan.query_stages),
        step(dout_at, plan.dout_stages),
        step(turn_at, plan.parts),
        step(buffer, DS_BUFFERS),
    )


@cute.jit
def steps(ctx, h, places):
    """All query tiles of the group's heads; returns the next places of the rings q, dout, dq and of dS."""
    plan = ctx.plan
    q_at, dout_at, turn_at, buffer = places
    line, begun = first_line(ctx), cutlass.Boolean(False)
    if const_expr(plan.alternates):
        outer, inner = nest(ctx)
        for a in cutlass.range(outer, unroll=1):
            for b in cutlass.range(inner, unroll=1):
                _, i = within(ctx, a, b)
                tile_step(ctx, h, visit(ctx, i), alike(plan, (q_at, dout_at, turn_at, buffer)), line, begun)
                begun = cutlass.Boolean(True)
                q_at, dout_at, turn_at, buffer = onward(plan, q_at, dout_at, turn_at, buffer)
    else:
        for _ in cutlass.range(ctx.group, unroll=1):
            for m in cutlass.range(ctx.first, ctx.last, unroll=1):
                tile_step(ctx, h, m, alike(plan, (q_at, dout_at, turn_at, buffer)), line, begun)
                begun = cutlass.Boolean(True)
                q_at, dout_at, turn_at, buffer = onward(plan, q_at, dout_at, turn_at, buffer)
            line = line + ctx.tiles
    announce_older(ctx, turn_at, begun)
    return alike(plan, (q_at, dout_at, turn_at, buffer))


@cute.jit
def await_keys(ctx, h, at):
    """Starts a tile of keys: no gradient yet; K and V are there."""
    for grad in (h.dk, h.dv):
        if const_expr(grad is not None):  # one of them may be another warpgroup's
            grad.fill(0.0)
    if ctx.last > ctx.first:
        wait(ctx.full["k"], at)
        wait(ctx.full["v"], at)
        clear_keys(ctx, h.thread)
        if const_expr(ctx.plan.kept > 0):
            keep_values(ctx, h)


@cute.jit
def grads(ctx):
    """dK and dV of the CTA's keys over all query tiles and heads that see them, and each tile's share of dQ."""
    h = hands(ctx, ctx.thread - 128)
    clear_before(ctx, h.thread)
    await_keys(ctx, h, start(0))
    if const_expr(ctx.plan.lagged):
        lagged_steps(ctx, h)
    elif const_expr(ctx.plan.turns):
        _ = turn_steps(ctx, h, (start(0), start(0), start(1), start(0)), None)
    else:
        _ = steps(ctx, h, (start(0), start(0), start(1), start(0)))
    store_keys(ctx, h)


@cute.jit
def grads_of_items(ctx):
    """`grads` of one tile of keys after the other."""
    plan = ctx.plan
    h = hands(ctx, ctx.thread - 128)
    clear_before(ctx, h.thread)
    at, k_at, q_at, dout_at, turn_at, buffer = start(0), start(0), start(0), start(0), start(1), start(0)
    tile = another(ctx, at)
    while tile >= 0:
        one = told(ctx, at)
        mine = replace(h, key=h.key + one.tile * plan.keys)
        await_keys(one, mine, k_at)
        if const_expr(plan.turns):
            q_at, dout_at, turn_at, buffer = turn_steps(one, h, (q_at, dout_at, turn_at, buffer), at)
        else:
            q_at, dout_at, turn_at, buffer = steps(one, mine, (q_at, dout_at, turn_at, buffer))
        if one.last > one.first:
            arrive(ctx.empty["k"], k_at)
            arrive(ctx.empty["v"], k_at)
            k_at = step(k_at, 1)
        turn_at = hand_keys(one, mine, turn_at)
        cute.arch.sync_warp()
        arrive(ctx.empty["item"], at)
        at = step(at, 2)
        tile = another(ctx, at)
