"""The math role where warpgroups have duties apart: one exp2, P and dV, the other dS and dK, each half of dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from jax_fa4.kernels.common.copies import put, views
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.ring import Place, arrive, start, step, wait
from jax_fa4.kernels.sm90 import wgmma
from jax_fa4.kernels.sm90.bwd import products
from jax_fa4.kernels.sm90.bwd.grads import (
    Hands,
    await_keys,
    clear_before,
    clear_queries,
    first_line,
    lay_down,
    stage,
    start_keys,
    start_scores,
    start_slopes,
    start_values,
)
from jax_fa4.kernels.sm90.bwd.items import visit
from jax_fa4.kernels.sm90.bwd.pieces import add_piece, hand_over_piece
from jax_fa4.kernels.sm90.bwd.scores import free_queries, mask, round_slopes, round_weights, statistics, weigh
from jax_fa4.kernels.sm90.bwd.segments import key_ids
from jax_fa4.kernels.sm90.bwd.store import MATH_BARRIER, lay_rounded
from jax_fa4.kernels.sm90.rows import LOG2_E, by_row, first_row

WEIGHTS, SLOPES = 0, 1  # the warpgroups
WEIGHTS_BARRIER = 2  # named: P of a step is in shared memory
SLOPES_BARRIER = 3  # dS is, and P has been read
OWN_BARRIER = 5  # the second warpgroup alone: all of its dS


def key_pieces(ctx):
    """K^T (depth, keys) by the columns that the warpgroups make at once of dQ."""
    plan = ctx.plan
    whole = wgmma.turned(ctx.k[2])[None, None, 0]
    return [cute.local_tile(whole, (plan.inner // plan.pieces, plan.keys), (n, 0)) for n in range(plan.pieces)]


def duty_hands(ctx, thread, group: cutlass.Constexpr):
    """What warpgroup `group` holds; what is the other's is None. thread: within the math role."""
    plan, dtype, own = ctx.plan, DTYPES[ctx.plan.dtype], thread % 128
    weighs = group == WEIGHTS
    first, third = products.scores_mma(plan), products.queries_mma(plan)
    depth = plan.inner_value if weighs else plan.inner
    second = products.keys_mma(plan, depth)
    # Of a warpgroup, not of a thread: see grads.hands.
    one, two, three = first.get_slice(0), second.get_slice(0), third.get_slice(128 * group)
    square = cute.make_rmem_tensor(one.partition_shape_C((plan.keys, plan.rows)), Float32)
    grad = cute.make_rmem_tensor(two.partition_shape_C((plan.keys, depth)), Float32)
    width = plan.inner // plan.pieces
    part = cute.make_rmem_tensor(three.partition_shape_C((plan.rows, width)), Float32)
    half = wgmma.as_operand(square, dtype)
    keys, queries = (ctx.k, ctx.q) if weighs else (ctx.v, ctx.dout)
    a, b = first.make_fragment_A(one.partition_A(keys[2])), first.make_fragment_B(one.partition_B(queries[2]))
    turned = second.make_fragment_B(two.partition_B(wgmma.turned((ctx.dout if weighs else ctx.q)[2])))
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    key = ctx.tile * plan.keys + first_row(own)
    names = dict.fromkeys(Hands.__dataclass_fields__)
    names |= {"thread": thread, "group": group, "key": key, "key_offset": Int32(0), "part": part}
    names |= {
        "ds_t": third.make_fragment_A(three.partition_A(wgmma.turned(ctx.ds))),
        "k_t": [third.make_fragment_B(three.partition_B(piece)) for piece in key_pieces(ctx)],
    }
    if weighs:
        names |= {"scores": square, "dv": grad, "dv_mma": second, "p": half, "k": a, "q": b, "dout_t": turned}
        names["scale"] = LOG2_E if plan.soft_cap else ctx.scale * LOG2_E
        names["own"] = key_ids(ctx, key) if plan.segments else None
    else:
        names |= {"slopes": square, "dk": grad, "dk_mma": second, "s": half, "v": a, "dout": b, "q_t": turned}
        names["put"] = cute.make_tiled_copy_C(matrix, first).get_slice(own)
    return Hands(**names)


def sent(ctx, h):
    """The thread's numbers of P in shared memory, (4, chunks): both warpgroups have S and dP in the same order."""
    count = ctx.plan.keys * ctx.plan.rows // 512
    at = (ctx.weights + 4 * (h.thread % 128)).align(16)
    return cute.make_tensor(at, cute.make_layout((4, count), stride=(1, 512)))


@cute.jit
def differ_from(ctx, h, delta):
    """dP^T becomes dS^T = P (dP - delta), with P from the other warpgroup, four numbers at a time."""
    found, of = cute.make_rmem_tensor(4, Float32), sent(ctx, h)
    view = by_row(h.slopes)
    for chunk in cutlass.range_constexpr(cute.size(of, mode=[1])):
        cute.autovec_copy(of[None, chunk], found)
        for n in cutlass.range_constexpr(4):
            r, c = n // 2, 2 * chunk + n % 2
            view[r, c] = found[n] * (view[r, c] - delta[c])


@cute.jit
def leave_piece(ctx, h, which: cutlass.Constexpr, at, tile):
    """A piece of dQ on its way to the workspace's `tile`; which: (warpgroup, piece). Returns the next place."""
    if const_expr(ctx.plan.direct):
        add_piece(ctx, h.part, h.thread % 128, which, tile)
    else:
        at = hand_over_piece(ctx, h.part, h.thread % 128, which, at)
    return at


@cute.jit
def start_piece(ctx, h, piece: cutlass.Constexpr, buffer):
    """Starts the product of a piece of this warpgroup's half of dQ."""
    wgmma.issue(products.queries_mma(ctx.plan), h.part, stage(h.ds_t, buffer.index), h.k_t[piece], True)


@cute.jit
def weights_step(ctx, h, m, places, before, begun):
    """Tensor cores, in order: S | dQ of the step before, dV. exp2 runs beside the other warpgroup's products.

    before: the workspace's tile of the step before, where `begun`. Returns dQ's next place.
    """
    q_at, dout_at, dq_at, buffer = places
    clear_queries(ctx, h, m, q_at, dout_at)
    start_scores(ctx, h, q_at)
    late = ctx.plan.segments or ctx.plan.soft_cap  # read ahead they make 16 bytes spill there (float16)
    if const_expr(not late):
        lse = statistics(ctx, h, q_at.index, 0)
    warpgroup.wait_group(0)
    if begun:  # long since, when S is complete
        cute.arch.barrier(barrier_id=SLOPES_BARRIER, number_of_threads=256)
    mask(ctx, h, m)
    if const_expr(late):
        lse = statistics(ctx, h, q_at.index, 0)
    free_queries(ctx, q_at)
    if const_expr(ctx.plan.soft_cap):  # no branch between P's rounding and its product: C7520 (float16)
        wait(ctx.full["dout"], dout_at)
    weigh(ctx, h, lse)
    round_weights(ctx, h)
    to = sent(ctx, h)
    cute.autovec_copy(cute.make_tensor(h.scores.iterator, cute.make_layout(to.shape)), to)
    cute.arch.barrier_arrive(barrier_id=WEIGHTS_BARRIER, number_of_threads=256)
    older = Place(buffer.index ^ 1, buffer.phase)
    start_piece(ctx, h, 0, older)
    if const_expr(not ctx.plan.soft_cap):
        wait(ctx.full["dout"], dout_at)
    start_values(ctx, h, dout_at)
    warpgroup.wait_group(1)  # the first piece of dQ
    if begun:
        dq_at = leave_piece(ctx, h, (WEIGHTS, 0), dq_at, before)
    for piece in cutlass.range_constexpr(1, ctx.plan.pieces):
        start_piece(ctx, h, piece, older)
        warpgroup.wait_group(1 if piece == 1 else 0)
        if const_expr(piece == 1):
            arrive(ctx.empty["dout"], dout_at)
            warpgroup.wait_group(0)
        if begun:
            dq_at = leave_piece(ctx, h, (WEIGHTS, piece), dq_at, before)
    if const_expr(ctx.plan.pieces == 1):
        warpgroup.wait_group(0)
        arrive(ctx.empty["dout"], dout_at)
    return dq_at


@cute.jit
def slopes_step(ctx, h, m, places, tile):
    """Tensor cores, in order: dP | dQ, dK. Returns dQ's next place."""
    q_at, dout_at, dq_at, buffer = places
    clear_queries(ctx, h, m, q_at, dout_at)
    start_slopes(ctx, h, dout_at)
    wait(ctx.full["q"], q_at)
    delta = statistics(ctx, h, q_at.index, 1)
    warpgroup.wait_group(0)
    arrive(ctx.empty["dout"], dout_at)
    cute.arch.barrier(barrier_id=WEIGHTS_BARRIER, number_of_threads=256)
    differ_from(ctx, h, delta)
    round_slopes(h)
    lay_down(ctx, h, h.s, ctx.ds, buffer)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=OWN_BARRIER, number_of_threads=128)
    cute.arch.barrier_arrive(barrier_id=SLOPES_BARRIER, number_of_threads=256)
    start_piece(ctx, h, 0, buffer)
    start_keys(ctx, h, q_at)
    warpgroup.wait_group(1)  # the first piece of dQ
    dq_at = leave_piece(ctx, h, (SLOPES, 0), dq_at, tile)
    for piece in cutlass.range_constexpr(1, ctx.plan.pieces):
        start_piece(ctx, h, piece, buffer)
        if const_expr(piece == 1):
            warpgroup.wait_group(1)
            free_queries(ctx, q_at)
        warpgroup.wait_group(0)
        dq_at = leave_piece(ctx, h, (SLOPES, piece), dq_at, tile)
    if const_expr(ctx.plan.pieces == 1):
        warpgroup.wait_group(0)
        free_queries(ctx, q_at)
    return dq_at


@cute.jit
def duty_steps(ctx, h, group: cutlass.Constexpr):
    """All query tiles of the group's heads, by one warpgroup. Returns dQ's next place."""
    plan = ctx.plan
    q_at, dout_at, dq_at, buffer = start(0), start(0), start(1), start(0)
    line = first_line(ctx)
    before, begun = line, cutlass.Boolean(False)
    for _ in cutlass.range(ctx.group, unroll=1):
        for i in cutlass.range(ctx.first, ctx.last, unroll=1):
            m = visit(ctx, i)
            places = (q_at, dout_at, dq_at, buffer)
            if const_expr(group == WEIGHTS):
                dq_at = weights_step(ctx, h, m, places, before, begun)
                before, begun = line + m, cutlass.Boolean(True)
            else:
                dq_at = slopes_step(ctx, h, m, places, line + m)
            q_at, dout_at = step(q_at, plan.query_stages), step(dout_at, plan.dout_stages)
            buffer = step(buffer, 2)
        line = line + ctx.tiles
    if const_expr(group == WEIGHTS):
        if begun:
            cute.arch.barrier(barrier_id=SLOPES_BARRIER, number_of_threads=256)
            for piece in cutlass.range_constexpr(plan.pieces):
                start_piece(ctx, h, piece, Place(buffer.index ^ 1, buffer.phase))
                warpgroup.wait_group(0)
                dq_at = leave_piece(ctx, h, (WEIGHTS, piece), dq_at, before)
    return dq_at


@cute.jit
def store_grad(ctx, grad, mma, target, rows_columns: cutlass.Constexpr, group: cutlass.Constexpr):
    """dV over V or dK over K, in the caller's dtype, then by TMA, clipped at S. By one warpgroup."""
    own = ctx.thread % 128
    lay_rounded(grad, mma, target[2][None, None, 0], own)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=WEIGHTS_BARRIER + group, number_of_threads=128)
    if ctx.warp == 4 + 4 * group:
        put(views(target, rows_columns, ctx.kv_head, ctx.batch), ctx.tile)


@cute.jit
def duty(ctx, group: cutlass.Constexpr):
    """The role of one warpgroup."""
    plan = ctx.plan
    h = duty_hands(ctx, ctx.thread - 128, group)
    clear_before(ctx, h.thread)
    await_keys(ctx, h, start(0))
    _ = duty_steps(ctx, h, group)
    if const_expr(group == SLOPES):
        h.dk.store(h.dk.load() * ctx.scale)
    cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=256)  # the other may still read K for dQ
    if const_expr(group == WEIGHTS):
        store_grad(ctx, h.dv, h.dv_mma, ctx.dv, (plan.keys, plan.inner_value), group)
    else:
        store_grad(ctx, h.dk, h.dk_mma, ctx.dk, (plan.keys, plan.inner), group)


@cute.jit
def grads_apart(ctx):
    """dK and dV of the CTA's keys over all query tiles and heads that see them, and each tile's share of dQ."""
    if ctx.warp < 8:
        duty(ctx, WEIGHTS)
    else:
        duty(ctx, SLOPES)
