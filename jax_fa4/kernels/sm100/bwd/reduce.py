"""The reduce warpgroup: each dQ of a step goes from tensor memory to shared memory, and is added to the workspace.

A thread has one query, its lane. In the workspace a tile is [column block of 4][query][4], so that a warp's 16-byte
stores to shared memory do not collide; the postprocess undoes it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.tiles import key_tiles
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.plan import GROUP, SLICE, turn
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
def _give_turn(flag, others: cutlass.Constexpr):
    """The next key tile may add to this query tile: all but the thread's last `others` bulk additions are complete, not
    only read."""
    cute.arch.cp_async_bulk_wait_group(others)
    cute.arch.red(flag, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


@cute.jit
def _add_in_turn(flags, rank, to, source, nbytes: cutlass.Constexpr):
    """A step's first addition, when `rank` key tiles have added to its query tile.

    flags: (of the query tile, of the step before or None). The turn of the step before is given up only here, so that
    its additions complete while this step is made: at once if this one must wait, else when it has begun. Waits are for
    lower ranks, which have started earlier, and whoever waits has given up all turns: nobody waits in a circle.
    """
    flag, before = flags
    now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    at_once = now == rank
    if const_expr(before is not None):
        if not at_once:
            _give_turn(before, 0)
    while now != rank:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # what was acquired comes before the bulk addition, which is another proxy's
    _add(to, source, nbytes)
    if const_expr(before is not None):
        if at_once:
            _give_turn(before, 1)


@cute.jit
def _rank(ctx, m):
    """The CTA's turn at query tile m."""
    plan = ctx.plan
    _, last = key_tiles(m, (plan.tile, plan.tile), ctx.band, plan.band, cutlass.min, cutlass.max)
    return turn(ctx.tile, last)


def _later(place, count, places):
    """Slices sent after the last one that had slice `place`'s room, and before it; `count` slices a step."""
    before = place - places if place >= places else max(s for s in range(count) if s % places == place % places) - count
    return place - before - 1


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
def _send(ctx, slot, m, before):
    """Adds a thread's row of dQ to the workspace, slice by slice. slot: of query tile m in workspace and turns; before:
    of the step before, -1 where there was none."""
    plan, thread, part = ctx.plan, ctx.thread, ctx.part
    count = -(-plan.depth // SLICE)
    if const_expr(plan.at_once):
        line = _read(ctx, 0, SLICE * count, True)
    to = ctx.work + slot * (plan.tile * plan.depth)
    for s in cutlass.range_constexpr(count):
        width = min(SLICE, plan.depth - SLICE * s)
        place = part + s % plan.slices * plan.slice_numbers
        if const_expr(plan.at_once):
            mine = cute.make_tensor(line.iterator + SLICE * s, cute.make_layout(SLICE))
        else:
            mine = _read(ctx, SLICE * s, SLICE, s == count - 1)
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(_later(s, count, plan.slices), read=True)
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        for c in cutlass.range_constexpr(0, width, 4):
            at = (place + (c * GROUP + 4 * thread)).align(16)
            source = cute.make_tensor(mine.iterator + c, cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(at, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=MEET, number_of_threads=GROUP)
        if thread == 0:
            to_slice, nbytes = to + s * plan.slice_numbers, 4 * GROUP * width
            if const_expr(plan.ordered and s == 0):
                flag, rank = ctx.turns + slot, _rank(ctx, m)
                if before >= 0:
                    _add_in_turn((flag, ctx.turns + before), rank, to_slice, place, nbytes)
                else:
                    _add_in_turn((flag, None), rank, to_slice, place, nbytes)
            else:
                _add(to_slice, place, nbytes)


@cute.jit
def reduce(ctx):
    n, before = Int32(0), Int64(-1)
    for g in cutlass.range(ctx.group, unroll=1):
        line = (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group + g) * ctx.tiles
        for m in cutlass.range(ctx.first, ctx.last, unroll=1):
            cute.arch.mbarrier_wait(ctx.full["dq"], n & 1)
            after_wait()
            _send(ctx, line + m, m, before)
            n, before = n + 1, line + m
    if ctx.thread == 0:
        if const_expr(ctx.plan.ordered):
            if before >= 0:
                _give_turn(ctx.turns + before, 0)
        else:
            cute.arch.cp_async_bulk_wait_group(0)
