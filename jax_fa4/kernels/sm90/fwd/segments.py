"""Segment ids of the Hopper forward: hides pairs of different ones; tiles of a single segment are not masked."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.common.segments import HIGHEST, LOWEST
from jax_fa4.kernels.sm90.rows import by_row, column_of


@cute.jit
def warp_ids(ctx, row):
    """(lowest, highest) id of the warp's 16 queries; row is the thread's first. Past T the last id stands in."""
    of_queries, _ = ctx.segments
    one = of_queries[cutlass.min(row, ctx.queries - 1)]
    two = of_queries[cutlass.min(row + 8, ctx.queries - 1)]
    low, high = cutlass.min(one, two), cutlass.max(one, two)
    return cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")


@cute.jit
def hide_others(ctx, scores, row, key, own):
    """-inf where query and key are of different segments. row: the thread's first; key: the tile's; own: warp_ids.

    Each lane reads every 32nd id of the tile, the others' come by shuffle. Past S the last id stands in.
    """
    of_queries, of_keys = ctx.segments
    lane = ctx.thread % 32
    found = cute.make_rmem_tensor(-(-ctx.plan.keys // 32), Int32)
    low, high = Int32(HIGHEST), Int32(LOWEST)
    for n in cutlass.range_constexpr(cute.size(found)):
        found[n] = of_keys[cutlass.min(key + 32 * n + lane, ctx.keys - 1)]
        low, high = cutlass.min(low, found[n]), cutlass.max(high, found[n])
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    if (low != high) | (own[0] != own[1]) | (low != own[0]):
        view = by_row(scores)
        mine = [of_queries[cutlass.min(row + 8 * r, ctx.queries - 1)] for r in (0, 1)]
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            source = column_of(c) % 32 + 2 * (lane % 4)  # stays inside the 32: a thread's columns come in eights
            other = cute.arch.shuffle_sync(found[column_of(c) // 32], source)
            for r in cutlass.range_constexpr(2):
                view[r, c] = view[r, c] if mine[r] == other else -Float32.inf
