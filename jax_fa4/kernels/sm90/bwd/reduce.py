"""The reduce warp: adds each finished float32 tile of dQ to the workspace; with `ordered`, in its turn."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.copies import add_bulk, views
from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.sm90.bwd.chain import reach
from jax_fa4.kernels.sm90.bwd.counts import count, hand_on, post
from jax_fa4.kernels.sm90.bwd.items import another, nest, told, visit, within
from jax_fa4.kernels.sm90.bwd.pieces import drain_half, end_turn, rank_of


@cute.jit
def await_turn(flag, rank):
    """Spins until a count is `rank`: of key tiles that added to a query tile (or see chain.py), or zeroed shares of a
    head."""
    now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    while now != rank:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # what was acquired comes before the bulk addition, which is another proxy's


@cute.jit
def add(ctx, mine: cutlass.Constexpr, line, m, at):
    """Adds dQ of query tile m of the head whose tiles are counted from `line`; returns the next place."""
    plan = ctx.plan
    size, nbytes = plan.rows * plan.depth, 4 * plan.rows * plan.depth
    work, turns, free = ctx.work, ctx.turns, ctx.empty["dq"]
    if const_expr(plan.reducers == 1) or at.index == mine:
        if const_expr(plan.ordered):  # mostly it has come before dQ is made
            await_turn(turns + (line + m), rank_of(ctx, m))
        wait(ctx.full["dq"], at)
        add_bulk(work + (line + m) * size, ctx.part + at.index * plan.part_numbers, nbytes)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.mbarrier_arrive(free + at.index)
        if const_expr(plan.ordered):
            cute.arch.cp_async_bulk_wait_group(0)  # complete, not only read: the next in turn may add
            end_turn(ctx, turns + (line + m))
    return step(at, plan.parts)


@cute.jit
def drain(ctx, mine: cutlass.Constexpr, at):
    """Adds every dQ tile, or with several reduce warps those of part `mine`, and frees its place in the ring dq, whose
    next one is returned. By one thread.
    """
    first_line = (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group) * ctx.tiles
    if const_expr(ctx.plan.alternates):
        outer, inner = nest(ctx)
        for a in cutlass.range(outer, unroll=1):
            for b in cutlass.range(inner, unroll=1):
                g, i = within(ctx, a, b)
                at = add(ctx, mine, first_line + g * ctx.tiles, visit(ctx, i), at)
    else:
        for g in cutlass.range(ctx.group, unroll=1):
            for i in cutlass.range(ctx.first, ctx.last, unroll=1):
                at = add(ctx, mine, first_line + g * ctx.tiles, visit(ctx, i), at)
    return at


@cute.jit
def drain_keys(ctx, mine: cutlass.Constexpr, at):
    """Stores dK and dV from their places in the ring dq, whose next one is returned. By one thread."""
    plan = ctx.plan
    box = (plan.keys, plan.inner)
    copies = [views(x, box, ctx.kv_head, ctx.batch) for x in (ctx.dk, ctx.dv)]
    for n in cutlass.range_constexpr(0, 2, plan.places):
        if const_expr(plan.reducers == 1) or at.index == mine:
            wait(ctx.full["dq"], at)
            for p in cutlass.range_constexpr(plan.places):
                atom, inside, outside = copies[n + p]
                cute.copy(atom, inside[None, at.index * plan.places + p], outside[None, ctx.tile])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.mbarrier_arrive(ctx.empty["dq"] + at.index)
        at = step(at, plan.parts)
    return at


@cute.jit
def drain_counted(ctx, at, done_at):
    """`drain` and `drain_keys`, counting each addition that is complete: whoever counts last hands the tile on.

    Nothing is waited for where it is made: an addition is complete a step later, its count is known another step later.
    """
    plan = ctx.plan
    nbytes = 4 * plan.rows * plan.depth
    added, counted = Int32(-1), (Int32(-1), Int32(0))
    if const_expr(plan.clears):
        await_turn(ctx.cleared + (ctx.batch * (ctx.heads // ctx.group) + ctx.kv_head), up(ctx.keys, plan.keys))
    for g in cutlass.range(ctx.group, unroll=1):
        line = (ctx.batch * ctx.heads + ctx.kv_head * ctx.group + g) * ctx.tiles
        for m in cutlass.range(ctx.first, ctx.last, unroll=1):
            wait(ctx.full["dq"], at)
            to = ctx.work + (line + m).to(Int64) * (plan.rows * plan.depth)
            add_bulk(to, ctx.part + at.index * plan.part_numbers, nbytes)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.mbarrier_arrive(ctx.empty["dq"] + at.index)
            at = step(at, plan.parts)
            done_at = hand_on(ctx, counted, done_at)
            cute.arch.cp_async_bulk_wait_group(1)
            counted = count(ctx, added)
            added = line + m
    at = drain_keys(ctx, 0, at)
    done_at = hand_on(ctx, counted, done_at)
    cute.arch.cp_async_bulk_wait_group(0)
    return at, hand_on(ctx, count(ctx, added), done_at)


@cute.jit
def drain_items(ctx, mine: cutlass.Constexpr):
    """`drain` and `drain_keys` of one tile of keys after the other."""
    at, dq_at, done_at = start(0), start(0), start(1)
    tile = another(ctx, at, False)
    while tile >= 0:
        one = told(ctx, at, False)
        cute.arch.mbarrier_arrive(ctx.empty["item"] + at.index)
        if const_expr(ctx.plan.finishes):
            dq_at, done_at = drain_counted(one, dq_at, done_at)
        else:
            dq_at = drain_keys(one, mine, drain(one, mine, dq_at))
        at = step(at, 2)
        tile = another(ctx, at, False)
    if const_expr(ctx.plan.finishes):
        post(ctx, done_at, Int32(-1))
    return dq_at, done_at


@cute.jit
def reduce(ctx, mine: cutlass.Constexpr):
    """The role of reduce warp `mine`. One thread is the role: no other lane may stand at a barrier that this one frees.

    A lane that waits for a phase which another lane's arrival lets go by may miss it and wait for one that never comes.
    """
    if const_expr(ctx.plan.chained):
        ctx = reach(ctx, mine)
    if cute.arch.lane_idx() == 0:
        if const_expr(ctx.plan.apart):
            _ = drain_half(ctx, mine, start(0))
        elif const_expr(ctx.plan.workers > 0):
            _ = drain_items(ctx, mine)
        else:
            _ = drain(ctx, mine, start(0))
        cute.arch.cp_async_bulk_wait_group(0)
