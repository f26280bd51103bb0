"""Segment ids of a CTA's tile: the tiles of the other side that no segment shares with it are not visited."""

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
def narrow(size: cutlass.Constexpr, own, trip, end_of_others, ids, space):
    """[first, last) of `trip` without the tiles at either end whose ids all lie outside the range of the tile's own.

    size: (threads of the CTA, length of the other side's tiles). own: [begin, end) of the tile's rows, no more than
    threads. ids: pointers to those of its side and of the other. space: int32, 4 a warp. Exact for packed sequences,
    whose ids never fall. Called by the whole CTA. Reading 16k ids costs about what one tile of scores does.
    """
    threads, length = size
    first, last = trip
    of_own, of_others = ids
    thread = cute.arch.thread_idx()[0]
    low, high = Int32(HIGHEST), Int32(LOWEST)
    row = own[0] + thread
    if row < own[1]:
        low = of_own[row]
        high = low
    low, high = across_cta(low, high, space, threads)
    begin, end = Int32(HIGHEST), Int32(-1)
    stop = cutlass.min(last * length, end_of_others)
    for i in cutlass.range(first * length + thread, stop, threads, unroll=4):
        found = of_others[i]
        if (found >= low) & (found <= high):
            begin, end = cutlass.min(begin, i), cutlass.max(end, i)
    begin, end = across_cta(begin, end, space + threads // 16, threads)
    if end < 0:
        last = first
    else:
        first, last = begin // length, end // length + 1
    return first, last


@cute.jit
def narrowed(tile, trip, lengths, ids, space, sizes: cutlass.Constexpr):
    """`narrow` of a backward: the query tiles of a key tile. lengths: real queries and keys. ids: of both.

    sizes: queries and keys of a tile, threads of the CTA.
    """
    rows, keys, threads = sizes
    own = (tile * keys, cutlass.min((tile + 1) * keys, lengths[1]))
    return narrow((threads, rows), own, trip, lengths[0], (ids[1], ids[0]), space)
