"""dQ's way out: additions and turns; where each warpgroup makes half of it, pieces through places of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.copies import add_bulk
from jax_fa4.kernels.common.ring import arrive, step, wait
from jax_fa4.kernels.common.tiles import key_tiles
from jax_fa4.kernels.sm90.bwd.chain import before, give
from jax_fa4.kernels.sm90.bwd.items import first_keys_first, visit
from jax_fa4.kernels.sm90.bwd.order import turn


def rank_of(ctx, m):
    """What the count of query tile m is when it is the CTA's turn."""
    plan = ctx.plan
    if plan.chained:
        return before(ctx, m)
    visitors = key_tiles(m, (plan.rows, plan.keys), ctx.band, plan.band, cutlass.min, cutlass.max)
    return turn(ctx.tile, visitors, first_keys_first(ctx))


def end_turn(ctx, flag):
    """Ends the CTA's turn at a query tile."""
    if ctx.plan.chained:
        give(ctx, flag)
    else:
        cute.arch.red(flag, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def columns_of(plan, group, piece):
    """(first column, how many of the true depth) of a piece; none where the depth ends before it."""
    width = plan.inner // (plan.groups * plan.pieces)
    first = (piece * plan.groups + group) * width
    return first, min(max(plan.depth - first, 0), width)


@cute.jit
def hand_over_piece(ctx, part, thread, which: cutlass.Constexpr, at):
    """A piece of dQ from a warpgroup's registers to its reduce warp; 16 bytes a thread, conflict-free. Returns the next
    place. thread: within the warpgroup; which: (warpgroup, piece)."""
    plan = ctx.plan
    name = plan.part_rings[which[0]]
    if const_expr(columns_of(plan, *which)[1] > 0):
        wait(ctx.empty[name], at)
        four = cute.size(part) // 4
        place = (which[0] * plan.parts + at.index) * plan.part_numbers + 4 * thread
        to = cute.make_tensor((ctx.part + place).align(16), cute.make_layout((4, four), stride=(1, 512)))
        cute.autovec_copy(cute.make_tensor(part.iterator, cute.make_layout((4, four))), to)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        arrive(ctx.full[name], at)
        at = step(at, plan.parts)
    return at


@cute.jit
def add_piece(ctx, part, thread, which: cutlass.Constexpr, tile):
    """A piece of dQ from registers onto the workspace's `tile`, 16 bytes a thread, a warp's in one line of 512."""
    plan = ctx.plan
    first, width = columns_of(plan, *which)
    to = ctx.work + (tile * (plan.rows * plan.depth) + plan.rows * first + thread * 4)
    four = cute.make_tensor(part.iterator, cute.make_layout((4, cute.size(part) // 4)))
    for chunk in cutlass.range_constexpr(width // 8):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[(to + chunk * 512).toint(), *(four[i, chunk] for i in range(4))],
        )


@cute.jit
def add_half(ctx, group: cutlass.Constexpr, to, at):
    """Adds a warpgroup's half of dQ, as it comes, to a tile of the workspace. Returns the next place."""
    plan = ctx.plan
    name = plan.part_rings[group]
    for piece in cutlass.range_constexpr(plan.pieces):
        first, width = columns_of(plan, group, piece)
        if const_expr(width > 0):
            wait(ctx.full[name], at)
            source = ctx.part + (group * plan.parts + at.index) * plan.part_numbers
            add_bulk(to + plan.rows * first, source, 4 * plan.rows * width)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.mbarrier_arrive(ctx.empty[name] + at.index)
            at = step(at, plan.parts)
    return at


@cute.jit
def drain_half(ctx, group: cutlass.Constexpr, at):
    """Adds a warpgroup's half of each dQ tile to the workspace; with `ordered`, in its turn. By one thread. Returns the
    next place."""
    plan = ctx.plan
    pieces = sum(columns_of(plan, group, piece)[1] > 0 for piece in range(plan.pieces))
    for g in cutlass.range(ctx.group, unroll=1):
        line = (ctx.batch.to(Int64) * ctx.heads + ctx.kv_head * ctx.group + g) * ctx.tiles
        work = ctx.work + line * (plan.rows * plan.depth)
        flags, given = None, Int32(-1)
        if const_expr(plan.ordered):
            flags = ctx.turns + (line * plan.halves + group)
        for i in cutlass.range(ctx.first, ctx.last, unroll=1):
            m = visit(ctx, i)
            if const_expr(plan.ordered and pieces > 0):
                given = await_half(ctx, group, (flags, m), given, at)
            at = add_half(ctx, group, work + m.to(Int64) * (plan.rows * plan.depth), at)
            if const_expr(plan.ordered and pieces > 0):
                give_up(ctx, flags, given, pieces)
                given = m
        if const_expr(plan.ordered and pieces > 0):
            give_up(ctx, flags, given, 0)
    return at


@cute.jit
def give_up(ctx, flags, m, later: cutlass.Constexpr):
    """Ends the turn at query tile m of a head (negative: at none) when what was added there is complete, not only read:
    the next in turn may add. flags: the head's counts of this half; later: bulk additions that were started after it.
    """
    if m >= 0:
        cute.arch.cp_async_bulk_wait_group(later)
        end_turn(ctx, flags + m * ctx.plan.halves)


@cute.jit
def await_half(ctx, group: cutlass.Constexpr, place, given, at):
    """Waits for the turn of a half at a query tile. place: (its head's counts of this half, it); at: its place in the
    ring. `given`: the tile before, whose turn has not been given up. It is now; with `defers` not if what is to be
    added is there already, and may be. Returns it then, else -1.
    """
    plan = ctx.plan
    flags, m = place
    flag, count = flags + m * plan.halves, rank_of(ctx, m)
    now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    if given >= 0:
        due = cutlass.Boolean(False)
        if const_expr(plan.defers):
            due = cute.arch.mbarrier_test_wait(ctx.full[plan.part_rings[group]] + at.index, at.phase)
        if (now != count) | (not due):
            give_up(ctx, flags, given, 0)
            given = Int32(-1)
    while now != count:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # what was acquired comes before the bulk addition, which is another proxy's
    return given
