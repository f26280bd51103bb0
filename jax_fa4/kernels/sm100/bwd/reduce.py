"""The reduce warpgroup: each dQ of a step goes from tensor memory to shared memory, and is added to the workspace.

A thread has one query, its lane. In the workspace a tile is [column block of 4][query][4], so that a warp's 16-byte
stores to shared memory do not collide; the postprocess undoes it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.plan import GROUP, SLICE
from jax_fa4.kernels.sm100.bwd.turns import add, add_in_turn, give_turn, later, looked, place, place_among, visited
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive

MEET = 2  # named barrier of the reduce warps


@cute.jit
def _read(ctx, first: cutlass.Constexpr, width: cutlass.Constexpr, last: cutlass.Constexpr):
    """`width` columns of the thread's row of dQ; with the last ones tensor memory is free for the next."""
    line = tmem.read(ctx.tmem + (ctx.plan.at("dq") + first), width, ctx.thread)
    tmem.loaded()
    if const_expr(last):
        before_arrive()
        arrive_warp(ctx.empty["dq"])
    return line


@cute.jit
def _send(ctx, slot, rank, before):
    """Adds a thread's row of dQ to the workspace, slice by slice. slot: of the tile in workspace and turns, where
    `rank` others come before; before: of the step before, -1 where there was none."""
    plan, thread, part = ctx.plan, ctx.thread, ctx.part
    count = -(-plan.depth // SLICE)
    if const_expr(plan.at_once):
        line = _read(ctx, 0, SLICE * count, True)
    to = ctx.work + slot * (plan.tile * plan.depth)
    for s in cutlass.range_constexpr(count):
        width = min(SLICE, plan.depth - SLICE * s)
        room = part + s % plan.slices * plan.slice_numbers
        if const_expr(plan.at_once):
            mine = cute.make_tensor(line.iterator + SLICE * s, cute.make_layout(SLICE))
        else:
            mine = _read(ctx, SLICE * s, SLICE, s == count - 1)
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(later(s, count, plan.slices), read=True)
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        for c in cutlass.range_constexpr(0, width, 4):
            at = (room + (c * GROUP + 4 * thread)).align(16)
            source = cute.make_tensor(mine.iterator + c, cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(at, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        if thread == 0:
            to_slice, nbytes = to + s * plan.slice_numbers, 4 * GROUP * width
            if const_expr(plan.ordered and s == 0):
                flag = ctx.turns + slot
                if before >= 0:
                    add_in_turn((flag, ctx.turns + before), rank, to_slice, room, nbytes, name_of(ctx))
                else:
                    add_in_turn((flag, None), rank, to_slice, room, nbytes, name_of(ctx))
            else:
                add(to_slice, room, nbytes, rank)


def name_of(ctx):
    """The CTA's name where turns are told by name, else None."""
    return ctx.tile if ctx.plan.chained else None


def place_of(ctx, m, within):
    """(copy of dQ, what its count says at the CTA's turn) at query tile m."""
    return place_among(ctx, m, within) if ctx.plan.chained else place(ctx, ctx.tile, m, ctx.plan.tile)


@cute.jit
def reduce(ctx):
    plan = ctx.plan
    n, before, within = Int32(0), Int64(-1), None
    if const_expr(plan.chained):
        within = looked(ctx)
    for g in cutlass.range(ctx.group, unroll=1):
        line = (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group + g) * ctx.tiles
        for i in cutlass.range(ctx.first, ctx.last, unroll=1):
            m, rank = visited(ctx, i), None
            slot = line + m
            if const_expr(plan.ordered):
                copy, rank = place_of(ctx, m, within)
                slot = slot * ctx.copies + copy
            cute.arch.mbarrier_wait(ctx.full["dq"], n & 1)
            after_wait()
            _send(ctx, slot, rank, before)
            n, before = n + 1, slot
    if ctx.thread == 0:
        if const_expr(plan.ordered):
            if before >= 0:
                give_turn(ctx.turns + before, 0, name_of(ctx))
        else:
            cute.arch.cp_async_bulk_wait_group(0)
