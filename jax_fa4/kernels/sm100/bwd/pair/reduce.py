"""The reduce warpgroup: its CTA's half of each dQ goes through shared memory, and is added to the workspace.

A lane has one query and half of its columns, as the product leaves it: lanes 0..63 the first, lanes 64..127 the rest.
In the workspace a tile is [CTA of the pair][block of 4 columns][lane][4], so that a warp's 16-byte stores to shared
memory do not collide and slices are consecutive; the postprocess undoes it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.pair.plan import GROUP
from jax_fa4.kernels.sm100.bwd.turns import add, add_in_turn, give_turn, later, place, visited
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive

MEET = 2  # named barrier of the reduce warps


@cute.jit
def _send(ctx, slot, rank, before):
    """Adds a thread's part of dQ to the workspace, slice by slice. slot: of the tile in workspace and turns, where
    `rank` pairs come before; before: of the step before, -1 where there was none."""
    plan, thread, part = ctx.plan, ctx.thread, ctx.part
    count, width = plan.half // plan.slice, plan.slice
    line = tmem.read(ctx.tmem + plan.at("dq"), plan.half, thread)
    tmem.loaded()
    before_arrive()
    arrive_warp(ctx.empty["dq"], plan.leader)
    to = ctx.work + (slot * (plan.tile * plan.inner) + ctx.rank * (GROUP * plan.half))
    for s in cutlass.range_constexpr(count):
        room = part + s % plan.slices * plan.slice_numbers
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(later(s, count, plan.slices), read=True)
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        for c in cutlass.range_constexpr(0, width, 4):
            at = (room + (c * GROUP + 4 * thread)).align(16)
            source = cute.make_tensor(line.iterator + (width * s + c), cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(at, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        if thread == 0:
            to_slice, nbytes = to + s * plan.slice_numbers, 4 * plan.slice_numbers
            if const_expr(plan.ordered and s == 0):
                flag, wanted = ctx.turns + slot, plan.ctas * rank  # each CTA of a pair counts, for its own half
                if before >= 0:
                    add_in_turn((flag, ctx.turns + before), wanted, to_slice, room, nbytes)
                else:
                    add_in_turn((flag, None), wanted, to_slice, room, nbytes)
            else:
                add(to_slice, room, nbytes, rank)


@cute.jit
def reduce(ctx):
    plan = ctx.plan
    n, before = Int32(0), Int64(-1)
    for g in cutlass.range(ctx.group, unroll=1):
        line = (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group + g) * ctx.tiles
        for i in cutlass.range(ctx.first, ctx.last, unroll=1):
            m, rank = visited(ctx, i), None
            slot = line + m
            if const_expr(plan.ordered):
                copy, rank = place(ctx, ctx.pair, m, plan.ctas * plan.tile)
                slot = slot * ctx.copies + copy
            cute.arch.mbarrier_wait(ctx.full["dq"], n & 1)
            after_wait()
            _send(ctx, slot, rank, before)
            n, before = n + 1, slot
    if ctx.thread == 0:
        if const_expr(plan.ordered):
            if before >= 0:
                give_turn(ctx.turns + before, 0)
        else:
            cute.arch.cp_async_bulk_wait_group(0)
