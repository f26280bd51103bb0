"""Segment ids of the Blackwell backward: -inf where a thread's key and a query are of different segments."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LANES = 32


@cute.jit
def key_id(ctx, key):
    """The key's id. Past S the last id stands in: such keys are hidden by their length."""
    _, of_keys = ctx.segments
    return of_keys[cutlass.min(key, ctx.keys - 1)]


@cute.jit
def ids_from(ids, first, length, count: cutlass.Constexpr):
    """Every 32nd of `count` ids from `first` on; past `length` the last one."""
    found = cute.make_rmem_tensor(count // LANES, Int32)
    for n in cutlass.range_constexpr(cute.size(found)):
        found[n] = ids[cutlass.min(first + LANES * n, length - 1)]
    return found


@cute.jit
def query_ids(ctx, first, count: cutlass.Constexpr):
    """Ids of the queries first + lane + 32 n, before they are wanted. Past T the last id stands in."""
    of_queries, _ = ctx.segments
    return ids_from(of_queries, first + ctx.thread % LANES, ctx.queries, count)


@cute.jit
def hide_others(line, own, found):
    """`line` holds the key's scores with the queries whose ids the warp's lanes hold in `found`; own: the key's id.

    Where warp and queries are of one segment, which is most tiles of long ones, nothing is compared.
    """
    low, high = own, own
    for n in cutlass.range_constexpr(cute.size(found)):
        low, high = cutlass.min(low, found[n]), cutlass.max(high, found[n])
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    if low != high:
        for n in cutlass.range_constexpr(cute.size(found)):
            for lane in cutlass.range_constexpr(LANES):
                other = cute.arch.shuffle_sync(found[n], lane)
                c = LANES * n + lane
                line[c] = line[c] if own == other else -Float32.inf


@cute.jit
def hide_others_fragment(line, own, found):
    """Likewise of a fragment, see mask.hide_fragment; own: of the thread's four keys."""
    low, high = own[0], own[0]
    for j in cutlass.range_constexpr(1, len(own)):
        low, high = cutlass.min(low, own[j]), cutlass.max(high, own[j])
    for n in cutlass.range_constexpr(cute.size(found)):
        low, high = cutlass.min(low, found[n]), cutlass.max(high, found[n])
    low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
    if low != high:
        lane = cute.arch.lane_idx() % 4 * 2
        for n in cutlass.range_constexpr(cute.size(found)):
            for i in cutlass.range_constexpr(LANES // len(own)):
                other = cute.arch.shuffle_sync(found[n], lane + (i // 2 * 8 + i % 2))
                for j in cutlass.range_constexpr(len(own)):
                    at = LANES * n + LANES // 2 * (j // 2) + i // 2 * 4 + 2 * (j % 2) + i % 2
                    line[at] = line[at] if own[j] == other else -Float32.inf
