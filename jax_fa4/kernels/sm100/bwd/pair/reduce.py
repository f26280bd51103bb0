"""The reduce warpgroup: its CTA's half of each dQ goes through shared memory, and is added to the workspace.

A lane has one query and half of its columns, as the product leaves it: lanes 0..63 the first, lanes 64..127 the rest.
In the workspace a tile is [CTA of the pair][block of 4 columns][lane][4], so that a warp's 16-byte stores to shared
memory do not collide and slices are consecutive; the postprocess undoes it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.tiles import key_tiles
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.pair.plan import GROUP, turn
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive

MEET = 2  # named barrier of the reduce warps


@cute.jit
def _add(to, source, nbytes: cutlass.Constexpr):
    """Starts and commits one bulk addition; by one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint(), Int32(nbytes)],
    )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _await_turn(flag, rank):
    """Spins until `rank` pairs have added to this query tile; each of their CTAs counts, for its own half."""
    now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    while now < 2 * rank:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # what was acquired comes before the bulk addition, which is another proxy's


@cute.jit
def _rank(ctx, m):
    """The pair's turn at query tile m."""
    plan = ctx.plan
    _, last = key_tiles(m, (plan.tile, 2 * plan.tile), ctx.band, plan.band, cutlass.min, cutlass.max)
    return turn(ctx.pair, last)


def _later(place, count, places):
    """Slices sent after the last one that had slice `place`'s room, and before it; `count` slices a step."""
    before = place - places if place >= places else max(s for s in range(count) if s % places == place % places) - count
    return place - before - 1


@cute.jit
def _send(ctx, slot, m):
    """Adds a thread's part of dQ to the workspace, slice by slice. slot: of query tile m in workspace and turns."""
    plan, thread, part = ctx.plan, ctx.thread, ctx.part
    count, width = plan.half // plan.slice, plan.slice
    line = tmem.read(ctx.tmem + plan.at("dq"), plan.half, thread)
    tmem.loaded()
    before_arrive()
    arrive_warp(ctx.empty["dq"], plan.leader)
    to = ctx.work + (slot * (plan.tile * plan.inner) + ctx.rank * (GROUP * plan.half))
    flag = ctx.turns + slot if const_expr(plan.ordered) else None
    for s in cutlass.range_constexpr(count):
        place = part + s % plan.slices * plan.slice_numbers
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(_later(s, count, plan.slices), read=True)
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        for c in cutlass.range_constexpr(0, width, 4):
            at = (place + (c * GROUP + 4 * thread)).align(16)
            source = cute.make_tensor(line.iterator + (width * s + c), cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(at, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        if thread == 0:
            if const_expr(plan.ordered and s == 0):
                _await_turn(flag, _rank(ctx, m))
            _add(to + s * plan.slice_numbers, place, 4 * plan.slice_numbers)
            if const_expr(plan.ordered and s == count - 1):
                cute.arch.cp_async_bulk_wait_group(0)  # complete, not only read: the next in turn may add
                cute.arch.red(flag, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


@cute.jit
def reduce(ctx):
    n = Int32(0)
    for g in cutlass.range(ctx.group, unroll=1):
        line = (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group + g) * ctx.tiles
        for m in cutlass.range(ctx.first, ctx.last, unroll=1):
            cute.arch.mbarrier_wait(ctx.full["dq"], n & 1)
            after_wait()
            _send(ctx, line + m, m)
            n = n + 1
    if ctx.thread == 0:
        cute.arch.cp_async_bulk_wait_group(0)
