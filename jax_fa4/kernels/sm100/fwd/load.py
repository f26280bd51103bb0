"""The load warp: both query tiles of a pair once, then K and V blocks from the last to the first through one ring."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.common.ring import step, wait
from jax_fa4.kernels.sm100.fwd import operands
from jax_fa4.kernels.sm100.fwd.work import place_of


def tiles(operand, mine, head, batch, shape, rest):
    """(atom, shared tiles, global tiles) of one head for `cute.copy`."""
    atom, coords, shared = operand
    pieces = mine(cute.local_tile(coords[None, None, head, batch], shape, rest))
    to, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(pieces, 0, 3)
    )
    return atom, to, source


@cute.jit
def fetch(rank, tiles, which, stage, barrier, size: cutlass.Constexpr):
    """Starts bringing one tile; `barrier` completes when its bytes are there. The copy elects a lane itself.

    In a pair each CTA brings its part, and all bytes count on the leader's barrier: the copy turns to that one itself.
    """
    atom, to, source = tiles
    if const_expr(rank is None):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
    elif rank == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * size)
    cute.copy(atom, source[None, which], to[None, stage], tma_bar_ptr=barrier)


@cute.jit
def load(ctx):
    plan = ctx.plan
    n, d, dv = plan.tile, plan.inner, plan.inner_value
    rank = ctx.rank
    mine = 0 if rank is None else rank
    scores, output = operands.scores(plan).get_slice(mine), operands.output(plan).get_slice(mine)
    q = None if plan.packed else tiles(ctx.q, scores.partition_A, ctx.head, ctx.batch, (plan.rows, d), (None, 0))
    k = tiles(ctx.k, scores.partition_B, ctx.kv_head, ctx.batch, (n, d), (None, 0))
    v = tiles(ctx.v, output.partition_B, ctx.kv_head, ctx.batch, (dv, n), (0, None))
    full, empty = ctx.full["kv"], ctx.empty["kv"]
    at = place_of(ctx, 0, 1)
    for i in cutlass.range(ctx.blocks, unroll=1):
        which = ctx.last - 1 - i
        wait(empty, at)
        fetch(rank, k, which, at.index, full + at.index, plan.key_bytes)
        if const_expr(plan.packed):
            pass  # the softmax groups bring their rows
        elif i == 0:
            for s in cutlass.range_constexpr(2):
                if const_expr(plan.workers > 0):
                    cute.arch.mbarrier_wait(ctx.empty["q"] + s, (ctx.turn & 1) ^ 1)
                fetch(rank, q, 2 * ctx.tile + s, s, ctx.full["q"] + s, plan.q_bytes)
        at = step(at, plan.stages)
        wait(empty, at)
        fetch(rank, v, which, at.index, full + at.index, plan.value_bytes)
        at = step(at, plan.stages)
    if const_expr(plan.workers > 0):
        at = _drain(ctx, at)
    if const_expr(plan.pair):
        # No signal of the leader is under way to a CTA that has gone; the last K and V are not freed.
        for _ in cutlass.range(plan.stages - 2, unroll=1):
            wait(empty, at)
            at = step(at, plan.stages)


@cute.jit
def _drain(ctx, at):
    """After the last pair: commits that free stages arrive on their own, and must not find the CTA gone."""
    if ctx.turn + 1 == ctx.turns:
        for _ in cutlass.range(ctx.plan.stages, unroll=1):
            wait(ctx.empty["kv"], at)
            at = step(at, ctx.plan.stages)
        for s in cutlass.range_constexpr(2):
            cute.arch.mbarrier_wait(ctx.empty["q"] + s, ctx.turn & 1)
    return at
