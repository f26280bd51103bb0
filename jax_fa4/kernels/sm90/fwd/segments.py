"""Segment ids of the Hopper forward: key tiles that no segment shares are not visited, uniform ones are not masked."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.sm90.rows import by_row, column_of

LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1


@cute.jit
def across_cta(low, high, space, plan: cutlass.Constexpr):
    """(min of low, max of high) over all threads, through 8 bytes of shared memory a warp. Synchronises the CTA."""
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    warp = cute.arch.warp_idx()
    with cute.arch.elect_one():
        space[2 * warp] = low
        space[2 * warp + 1] = high
    cute.arch.barrier()
    for w in cutlass.range_constexpr(plan.threads // 32):
        low, high = cutlass.min(low, space[2 * w]), cutlass.max(high, space[2 * w + 1])
    return low, high


@cute.jit
def narrow(plan: cutlass.Constexpr, tile, band, trip, segments, space):
    """[first, last) of `trip` without the tiles at either end whose ids are all outside the range of the queries' ids.

    Exact for packed sequences, whose ids never fall. Called by the whole CTA. Reading the ids of 16k keys costs about
    what one tile of scores does.
    """
    first, last = trip
    of_queries, of_keys = segments
    thread = cute.arch.thread_idx()[0]
    low, high = Int32(HIGHEST), Int32(LOWEST)
    row = tile * plan.rows + thread
    if (thread < plan.rows) & (row < band.q_len):
        low = of_queries[row]
        high = low
    low, high = across_cta(low, high, space, plan)
    begin, end = Int32(HIGHEST), Int32(-1)
    stop = cutlass.min(last * plan.keys, band.kv_len)
    for j in cutlass.range(first * plan.keys + thread, stop, plan.threads, unroll=4):
        found = of_keys[j]
        if (found >= low) & (found <= high):
            begin, end = cutlass.min(begin, j), cutlass.max(end, j)
    begin, end = across_cta(begin, end, space + plan.threads // 16, plan)
    if end < 0:
        last = first
    else:
        first, last = begin // plan.keys, end // plan.keys + 1
    return first, last


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
