"""Segment ids of a backward CTA: query tiles that no segment shares with its keys are not visited."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1


@cute.jit
def across_cta(low, high, space, threads: cutlass.Constexpr):
    """(min of low, max of high) over all threads, through 8 bytes of shared memory a warp. Synchronises the CTA."""
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    warp = cute.arch.warp_idx()
    with cute.arch.elect_one():
        space[2 * warp] = low
        space[2 * warp + 1] = high
    cute.arch.barrier()
    for w in cutlass.range_constexpr(threads // 32):
        low, high = cutlass.min(low, space[2 * w]), cutlass.max(high, space[2 * w + 1])
    return low, high


@cute.jit
def narrowed(tile, trip, lengths, ids, space, sizes: cutlass.Constexpr):
    """[first, last) of `trip` without the query tiles at either end whose ids all lie outside the range of the keys'.

    lengths: real queries and keys. ids: pointers to those of the example's queries and keys. space: 16 bytes a warp.
    sizes: queries and keys of a tile, threads of the CTA. Exact for packed sequences, whose ids never fall. Called by
    the whole CTA.
    """
    rows, keys, threads = sizes
    first, last = trip
    of_queries, of_keys = ids
    thread = cute.arch.thread_idx()[0]
    low, high = Int32(HIGHEST), Int32(LOWEST)
    key = tile * keys + thread
    if (thread < keys) & (key < lengths[1]):
        low = of_keys[key]
        high = low
    low, high = across_cta(low, high, space, threads)
    begin, end = Int32(HIGHEST), Int32(-1)
    stop = cutlass.min(last * rows, lengths[0])
    for i in cutlass.range(first * rows + thread, stop, threads, unroll=4):
        found = of_queries[i]
        if (found >= low) & (found <= high):
            begin, end = cutlass.min(begin, i), cutlass.max(end, i)
    begin, end = across_cta(begin, end, space + threads // 16, threads)
    if end < 0:
        last = first
    else:
        first, last = begin // rows, end // rows + 1
    return first, last
