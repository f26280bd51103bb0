"""Additions to dQ and the turns in which they are done, see order.py; the same for single CTAs and pairs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.copies import add_bulk, put_bulk
from jax_fa4.kernels.common.tiles import key_tiles
from jax_fa4.kernels.sm100.bwd.order import turn, visit


@cute.jit
def after(path, m):
    """The query tile behind m."""
    m = m + path.way
    if m == path.edge:
        m = Int32(path.back)
    return m


def visited(ctx, i):
    """The query tile that the CTA visits in place of i, of [first, last); the same that `after` leads to."""
    if const_expr(not ctx.plan.ordered):
        return i
    return visit(i, (ctx.first, ctx.last), ctx.course, ctx.plan.band, cutlass.min, cutlass.max)


def later(place, count, places):
    """Slices sent after the last one that had slice `place`'s room, and before it; `count` slices a step."""
    before = place - places if place >= places else max(s for s in range(count) if s % places == place % places) - count
    return place - before - 1


@cute.jit
def give_turn(flag, others: cutlass.Constexpr):
    """The next key tile may add to this place: all but the thread's last `others` bulk additions are complete, not only
    read."""
    cute.arch.cp_async_bulk_wait_group(others)
    cute.arch.red(flag, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


@cute.jit
def add(to, source, nbytes: cutlass.Constexpr, rank):
    """One of a step's bulk additions. Who is first in turn stores: so nobody has to zero the workspace before, and what
    nobody has visited the postprocess leaves out. rank: None without turns."""
    if const_expr(rank is None):
        add_bulk(to, source, nbytes)
    elif rank == 0:
        put_bulk(to, source, nbytes)
    else:
        add_bulk(to, source, nbytes)


@cute.jit
def add_in_turn(flags, wanted, to, source, nbytes: cutlass.Constexpr):
    """A step's first addition, when `wanted` CTAs have added to its place.

    flags: (of the place, of the step before or None). The turn of the step before is given up only here, so that its
    additions complete while this step is made: at once if this one must wait, else when it has begun. Waits are for
    lower ranks, which have started earlier, and whoever waits has given up all turns: nobody waits in a circle.
    """
    flag, before = flags
    now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    at_once = now >= wanted  # more: the other CTA of a pair has added its half
    if const_expr(before is not None):
        if not at_once:
            give_turn(before, 0)
    while now < wanted:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # what was acquired comes before the bulk addition, which is another proxy's
    add(to, source, nbytes, wanted)
    if const_expr(before is not None):
        if at_once:
            give_turn(before, 1)


@cute.jit
def place(ctx, tile, m, keys: cutlass.Constexpr):
    """(copy of dQ, rank) of key tile `tile`, of `keys` keys, at query tile m."""
    plan = ctx.plan
    seen = key_tiles(m, (plan.tile, keys), ctx.band, plan.band, cutlass.min, cutlass.max)
    return turn(tile, m, seen, ctx.course, ctx.copies, plan.band, cutlass.min, cutlass.max)
