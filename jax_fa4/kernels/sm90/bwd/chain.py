"""Turns at dQ where segments decide who adds: each key tile waits for the one before it at that query tile, by name.

The preprocess has written [first, last) of the query tiles that each key tile visits. So the one before is the nearest
on the side that comes first (order.py) whose range has the query tile in it: nearly always the neighbour. The count of
a query tile is then no count: 0 before the first addition, afterwards 1 + the key tile that added last.

Ranges are read for each step anew, from L2, since whoever acquires a turn drops what L1 holds; registers, of which this
role has 24, do not hold them, and not even how far to look: with two duties apart (D256, full) 4 to 20 bytes spilled.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common.segments import HIGHEST
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.sm90.bwd.plan import REACH

AT_ONCE = 2  # ranges that are read together; nearly always the first is the one


def range_of(ctx, tile):
    """[first, last) of the query tiles that key tile `tile` of the CTA's example visits."""
    found = cute.make_rmem_tensor(2, Int32)
    cute.autovec_copy(cute.make_tensor((ctx.ranges + 2 * tile).align(8), cute.make_layout(2)), found)
    return found[0], found[1]


def way(ctx):
    """From a key tile to the one that comes before it in the order of work."""
    return 1 - 2 * ctx.rising if ctx.plan.mirrored else Int32(1)


@cute.jit
def reach(ctx, mine: cutlass.Constexpr):
    """The context with the place of reduce warp `mine` in `reach`, filled: how far off the last key tile is that this
    one may have to wait for, and [first, last) of query tiles outside of which it need not. By a whole warp."""
    tiles = up(ctx.keys, ctx.plan.keys)
    after = tiles - 1 - ctx.tile
    others = after + ctx.rising * (ctx.tile - after) if ctx.plan.mirrored else after
    far, begin, end = Int32(0), Int32(HIGHEST), Int32(0)
    for c in cutlass.range(1 + cute.arch.lane_idx(), others + 1, 32, unroll=1):
        first, last = range_of(ctx, ctx.tile + way(ctx) * c)
        if cutlass.max(first, ctx.first) < cutlass.min(last, ctx.last):
            far, begin, end = c, cutlass.min(begin, first), cutlass.max(end, last)
    begin = cute.arch.warp_redux_sync(begin, "min")
    far, end = (cute.arch.warp_redux_sync(x, "max") for x in (far, end))
    to = ctx.reach + REACH * mine
    if cute.arch.lane_idx() == 0:
        to[0], to[1], to[2], to[3] = far, begin, end, Int32(0)  # read by one instruction of all four
    return replace(ctx, reach=to)


@cute.jit
def before(ctx, m):
    """What the count of query tile m is when it is the CTA's turn."""
    far, begin, end = ctx.reach[0], ctx.reach[1], ctx.reach[2]
    if (m < begin) | (m >= end):  # between two sequences; else all key tiles of the one would be gone through
        far = Int32(0)
    found, c = Int32(0), Int32(1)
    while (found == 0) & (c <= far):
        for n in cutlass.range_constexpr(AT_ONCE - 1, -1, -1):  # the nearest last: it stands
            tile = ctx.tile + way(ctx) * cutlass.min(c + n, far)
            first, last = range_of(ctx, tile)
            if (first <= m) & (m < last):
                found = tile + 1
        c = c + AT_ONCE
    return found


def give(ctx, flag):
    """Ends the CTA's turn at a query tile."""
    cute.arch.store(flag.llvm_ptr, Int32(ctx.tile + 1), sem="release", scope="gpu")
