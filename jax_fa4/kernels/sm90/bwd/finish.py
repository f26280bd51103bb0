"""The finishing warps: complete query tiles of dQ, as counts.py tells of them, to the caller's dtype."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.ring import arrive, start, step, wait
from jax_fa4.kernels.sm90.bwd.convert import convert
from jax_fa4.kernels.sm90.bwd.plan import DONE

FINISH_BARRIER = 4  # named barrier of the finishing warps


@cute.jit
def fetch_sums(ctx, tile):
    """Starts the copy of a tile of the workspace to shared memory. By one thread."""
    plan = ctx.plan
    nbytes = 4 * plan.rows * plan.depth
    cute.arch.fence_proxy("async.global")  # the count was read by ordinary means; the additions and this copy are not
    cute.arch.mbarrier_arrive_and_expect_tx(ctx.full["landed"], nbytes)
    source = ctx.work + tile.to(Int64) * (plan.rows * plan.depth)
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[ctx.sums.toint(), source.toint(), Int32(nbytes), ctx.full["landed"].toint()],
    )


@cute.jit
def finish(ctx, mine: cutlass.Constexpr):
    """The role of finishing warp `mine`: complete query tiles of dQ to the caller's dtype."""
    plan = ctx.plan
    done_at, landed = start(0), start(0)
    wait(ctx.full["done"], done_at)
    number = ctx.done[done_at.index]
    while number >= 0:
        if const_expr(mine == 0):
            if cute.arch.lane_idx() == 0:
                fetch_sums(ctx, number)
            cute.arch.sync_warp()
        m, line = number % ctx.tiles, number // ctx.tiles
        place = (m, line % ctx.heads, line // ctx.heads)
        wait(ctx.full["landed"], landed)
        for n in cutlass.range(mine, plan.rows // 8, plan.finishers, unroll=1):
            convert((n, *place), (ctx.queries, ctx.heads), ctx.sums, ctx.dq, ctx.scale, plan)
        landed = step(landed, 1)
        cute.arch.barrier(barrier_id=FINISH_BARRIER, number_of_threads=32 * plan.finishers)  # `sums` is free
        arrive(ctx.empty["done"], done_at)
        done_at = step(done_at, DONE)
        wait(ctx.full["done"], done_at)
        number = ctx.done[done_at.index]
