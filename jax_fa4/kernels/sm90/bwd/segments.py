"""Segment ids of the Hopper backward: query tiles that no segment shares with the keys are not visited."""

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
    """[first, last) of `trip` without the query tiles at either end whose ids all lie outside the range of the keys'.

    Exact for packed sequences, whose ids never fall. Called by the whole CTA.
    """
    first, last = trip
    of_queries, of_keys = segments
    thread = cute.arch.thread_idx()[0]
    low, high = Int32(HIGHEST), Int32(LOWEST)
    key = tile * plan.keys + thread
    if (thread < plan.keys) & (key < band.kv_len):
        low = of_keys[key]
        high = low
    low, high = across_cta(low, high, space, plan)
    begin, end = Int32(HIGHEST), Int32(-1)
    stop = cutlass.min(last * plan.rows, band.q_len)
    for i in cutlass.range(first * plan.rows + thread, stop, plan.threads, unroll=4):
        found = of_queries[i]
        if (found >= low) & (found <= high):
            begin, end = cutlass.min(begin, i), cutlass.max(end, i)
    begin, end = across_cta(begin, end, space + plan.threads // 16, plan)
    if end < 0:
        last = first
    else:
        first, last = begin // plan.rows, end // plan.rows + 1
    return first, last


@cute.jit
def two_ids(ctx, key):
    """Ids of keys `key` and key + 8. Past S the last id stands in."""
    _, of_keys = ctx.segments
    return of_keys[cutlass.min(key, ctx.keys - 1)], of_keys[cutlass.min(key + 8, ctx.keys - 1)]


@cute.jit
def key_ids(ctx, key):
    """(lowest, highest) id of the warp's 16 keys; key is the thread's first."""
    one, two = two_ids(ctx, key)
    low, high = cutlass.min(one, two), cutlass.max(one, two)
    return cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")


@cute.jit
def hide_others(ctx, scores, key, top, own):
    """-inf where query and key are of different segments. key: the thread's first; top: the first query; own: key_ids.

    Each lane reads every 32nd id of the queries, the others' come by shuffle. Past T the last id stands in.
    """
    of_queries, _ = ctx.segments
    lane = ctx.thread % 32
    found = cute.make_rmem_tensor(ctx.plan.columns // 32, Int32)
    low, high = Int32(HIGHEST), Int32(LOWEST)
    for n in cutlass.range_constexpr(cute.size(found)):
        found[n] = of_queries[cutlass.min(top + 32 * n + lane, ctx.queries - 1)]
        low, high = cutlass.min(low, found[n]), cutlass.max(high, found[n])
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    if (low != high) | (own[0] != own[1]) | (low != own[0]):
        view = by_row(scores)
        mine = two_ids(ctx, key)  # read again: kept in registers they made 8 bytes spill
        for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
            source = column_of(c) % 32 + 2 * (lane % 4)  # stays inside the 32: a thread's columns come in eights
            other = cute.arch.shuffle_sync(found[column_of(c) // 32], source)
            for r in cutlass.range_constexpr(2):
                view[r, c] = view[r, c] if mine[r] == other else -Float32.inf
