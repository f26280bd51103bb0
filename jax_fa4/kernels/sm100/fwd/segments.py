"""Segment ids of the Blackwell forward: hides keys of other segments; tiles of a single segment are not masked."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.common.segments import HIGHEST, LOWEST

LANES = 32


@cute.jit
def own_ids(ctx, query):
    """(this thread's id, lowest, highest of the warp's); query: of its row. Past T the last id stands in."""
    of_queries, _ = ctx.segments
    mine = of_queries[cutlass.min(query, ctx.queries - 1)]
    return mine, cute.arch.warp_redux_sync(mine, "min"), cute.arch.warp_redux_sync(mine, "max")


@cute.jit
def hide_others(ctx, which, line, own):
    """-inf where row and key are of different segments. which: the key block; own: own_ids.

    Each lane reads every 32nd id of the block, the others' come by shuffle. Past S the last id stands in.
    """
    _, of_keys = ctx.segments
    mine, lowest, highest = own
    key, lane = which * ctx.plan.tile, ctx.thread % LANES
    found = cute.make_rmem_tensor(ctx.plan.tile // LANES, Int32)
    low, high = Int32(HIGHEST), Int32(LOWEST)
    for n in cutlass.range_constexpr(cute.size(found)):
        found[n] = of_keys[cutlass.min(key + LANES * n + lane, ctx.keys - 1)]
        low, high = cutlass.min(low, found[n]), cutlass.max(high, found[n])
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    if (low != high) | (lowest != highest) | (low != lowest):
        for c in cutlass.range_constexpr(cute.size(line)):
            other = cute.arch.shuffle_sync(found[c // LANES], c % LANES)
            line[c] = line[c] if mine == other else -Float32.inf
