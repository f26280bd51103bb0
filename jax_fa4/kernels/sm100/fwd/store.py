"""The store warp: each finished tile of O leaves by TMA, clipped at T by the descriptor."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.sm100.fwd.context import query_tile


@cute.jit
def store(ctx):
    plan = ctx.plan
    atom, coords, shared = ctx.out
    tiles = cute.local_tile(coords[None, None, ctx.head, ctx.batch], (plan.tile, plan.inner_value), (None, 0))
    source, to = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    with cute.arch.elect_one():  # unlike a load, a store through cute.copy does not elect: 32 lanes would store
        for s in cutlass.range_constexpr(plan.queries):
            cute.arch.mbarrier_wait(ctx.full["final"] + s, ctx.turn & 1)
            cute.copy(atom, source[None, s], to[None, query_tile(ctx, s)])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(plan.workers > 0):
            for s in cutlass.range_constexpr(2):
                cute.arch.mbarrier_arrive(ctx.empty["final"] + s)
