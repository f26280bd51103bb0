"""Additions to dQ and the turns in which they are done, see order.py; the same for single CTAs and pairs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.copies import add_bulk, put_bulk
from jax_fa4.kernels.common.tiles import key_tiles, up
from jax_fa4.kernels.sm100.bwd import chain
from jax_fa4.kernels.sm100.bwd.chain import give
from jax_fa4.kernels.sm100.bwd.order import lane, leg, turn, visit, visit_among


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
    if const_expr(ctx.plan.chained):
        return visit_among(i, (ctx.first, ctx.last), ctx.course, ctx.plan.band, cutlass.min, cutlass.max)
    return visit(i, (ctx.first, ctx.last), ctx.course, ctx.plan.band, cutlass.min, cutlass.max)


def later(place, count, places):
    """Slices sent after the last one that had slice `place`'s room, and before it; `count` slices a step."""
    before = place - places if place >= places else max(s for s in range(count) if s % places == place % places) - count
    return place - before - 1


@cute.jit
def give_turn(flag, others: cutlass.Constexpr, name=None):
    """The next key tile may add to this place: all but the thread's last `others` bulk additions are complete, not only
    read. name: the key tile, where turns are told by name."""
    cute.arch.cp_async_bulk_wait_group(others)
    if const_expr(name is not None):
        give(flag, name)
    else:
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


def come(now, wanted, name):
    """Whether a flag that says `now` tells that it is the turn of who waits for `wanted`; name: see `give_turn`."""
    return now == wanted if name is not None else now >= wanted  # more: the other CTA of a pair has added its half


@cute.jit
def add_in_turn(flags, wanted, to, source, nbytes: cutlass.Constexpr, name=None):
    """A step's first addition, when `wanted` CTAs have added to its place; or, as key tile `name`, when the one before
    it has (sm100/bwd/chain.py), whose name `wanted` is.

    flags: (of the place, of the step before or None). The turn of the step before is given up only here, so that its
    additions complete while this step is made: at once if this one must wait, else when it has begun. Waits are for
    lower ranks, which have started earlier, and whoever waits has given up all turns: nobody waits in a circle.
    """
    flag, before = flags
    now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    at_once = come(now, wanted, name)
    if const_expr(before is not None):
        if not at_once:
            give_turn(before, 0, name)
    while not come(now, wanted, name):
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # what was acquired comes before the bulk addition, which is another proxy's
    add(to, source, nbytes, wanted)
    if const_expr(before is not None):
        if at_once:
            give_turn(before, 1, name)


@cute.jit
def place(ctx, tile, m, keys: cutlass.Constexpr):
    """(copy of dQ, rank) of key tile `tile`, of `keys` keys, at query tile m."""
    plan = ctx.plan
    seen = key_tiles(m, (plan.tile, keys), ctx.band, plan.band, cutlass.min, cutlass.max)
    return turn(tile, m, seen, ctx.course, ctx.copies, plan.band, cutlass.min, cutlass.max)


def _leg(ctx):
    """What chain.before asks of a key tile, its range and a query tile: on which leg of its way it comes there."""
    if ctx.plan.band:
        return None
    return lambda tile, visits, m: leg(tile, visits, m, ctx.course, cutlass.min, cutlass.max)


def _way(ctx):
    """From a key tile to the one before it that adds to the same copies of dQ."""
    _, apart = lane(ctx.tile, 0, ctx.copies, ctx.plan.band, cutlass.max)
    return apart * (1 - 2 * ctx.course.rising)


def looked(ctx):
    """Whom the CTA may have to wait for, see chain.reach; by whole warps."""
    after = up(ctx.keys, ctx.plan.tile) - 1 - ctx.tile
    _, apart = lane(ctx.tile, 0, ctx.copies, ctx.plan.band, cutlass.max)
    others = (after + ctx.course.rising * (ctx.tile - after)) // apart
    return chain.reach(ctx.ranges, ctx.tile, (ctx.first, ctx.last), _way(ctx), others)


def place_among(ctx, m, within):
    """(copy of dQ, what its count says at the CTA's turn) at query tile m, among segments. within: what `looked`
    found."""
    again = 0 if ctx.plan.band else _leg(ctx)(ctx.tile, (ctx.first, ctx.last), m)
    copy, _ = lane(ctx.tile, again, ctx.copies, ctx.plan.band, cutlass.max)
    return copy, chain.before(ctx.ranges, ctx.tile, m, _way(ctx), within, _leg(ctx))
