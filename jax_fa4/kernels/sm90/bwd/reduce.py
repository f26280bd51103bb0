"""The reduce warp: adds each finished float32 tile of dQ to the workspace; with `ordered`, in its turn."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.common.tiles import key_tiles
from jax_fa4.kernels.sm90.bwd.plan import turn


@cute.jit
def add_bulk(to, source, nbytes: cutlass.Constexpr):
    """Starts and commits one bulk addition; by one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint(), Int32(nbytes)],
    )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def await_turn(flag, rank):
    """Spins until `rank` key tiles have added to this query tile."""
    now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    while now != rank:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # what was acquired comes before the bulk addition, which is another proxy's


def rank_of(ctx, m):
    """The CTA's turn at query tile m."""
    plan = ctx.plan
    _, last = key_tiles(m, (plan.rows, plan.keys), ctx.band, plan.band, cutlass.min, cutlass.max)
    return turn(plan, ctx.tile, last)


@cute.jit
def drain(ctx, mine: cutlass.Constexpr):
    """Adds every dQ tile, or with several reduce warps those of part `mine`, and frees its place. By one thread."""
    plan = ctx.plan
    size, nbytes = plan.rows * plan.depth, 4 * plan.rows * plan.depth
    work, turns, free = ctx.work, ctx.turns, ctx.empty["dq"]
    at = start(0)
    for g in cutlass.range(ctx.group, unroll=1):
        line = (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group + g) * ctx.tiles
        for m in cutlass.range(ctx.first, ctx.last, unroll=1):
            if const_expr(plan.reducers == 1) or at.index == mine:
                wait(ctx.full["dq"], at)
                if const_expr(plan.ordered):
                    await_turn(turns + (line + m), rank_of(ctx, m))
                add_bulk(work + (line + m) * size, ctx.part + at.index * plan.part_numbers, nbytes)
                if const_expr(plan.ordered):
                    cute.arch.cp_async_bulk_wait_group(0)  # complete, not only read: the next in turn may add
                    cute.arch.red(turns + (line + m), Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")
                else:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(free + at.index)
            at = step(at, plan.parts)
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def reduce(ctx, mine: cutlass.Constexpr):
    """The role of reduce warp `mine`. One thread is the role: no other lane may stand at a barrier that this one frees.

    A lane that waits for a phase which another lane's arrival lets go by may miss it and wait for one that never comes.
    """
    if cute.arch.lane_idx() == 0:
        drain(ctx, mine)
