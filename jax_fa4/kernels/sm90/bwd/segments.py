"""Segment ids of the Hopper backward: query tiles that no segment shares with the keys are not visited."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.common.segments import HIGHEST, LOWEST, narrowed
from jax_fa4.kernels.sm90.rows import by_row, column_of


@cute.jit
def narrow(plan: cutlass.Constexpr, tile, band, trip, segments, space):
    """[first, last) of the query tiles of `trip` that share a segment with key tile `tile`: common/segments.py."""
    sizes = (plan.rows, plan.keys, plan.threads)
    return narrowed(tile, trip, (band.q_len, band.kv_len), segments, space, sizes)


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
    found = cute.make_rmem_tensor(ctx.plan.rows // 32, Int32)
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
