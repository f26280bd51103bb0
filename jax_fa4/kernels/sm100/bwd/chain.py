"""Turns at dQ where segments decide who adds: each key tile waits for the one before it at that query tile, by name.

The preprocess has written [first, last) of the query tiles that each key tile visits. So the one before is the nearest
on the side that comes first in the order of work whose range has the query tile in it: nearly always the neighbour. The
count of a place of dQ is then no count: 0 before the first addition, afterwards 1 + the key tile that added last.

Ranges are read for each step anew: whoever acquires a turn drops what L1 holds, but that is L2's latency once a step.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.segments import HIGHEST

AT_ONCE = 2  # ranges that are read together; nearly always the first is the one


def ranges_of(ranges, batch, tiles):
    """Pointer to an example's ranges, of `tiles` key tiles."""
    return ranges + cute.assume(2 * (batch * tiles), divby=2)


def range_of(ranges, tile):
    """[first, last) of the query tiles that a key tile visits. ranges: of its example."""
    found = cute.make_rmem_tensor(2, Int32)
    # Not rounded up to 8 bytes, as `align` would: the verifier loses track of such an address.
    at = ranges + cute.assume(2 * Int32(tile), divby=2)
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(2)), found)
    return found[0], found[1]


@cute.jit
def reach(ranges, tile, visits, way, others):
    """Whom key tile `tile`, which visits [first, last) = `visits`, may have to wait for: (how many steps of `way` off
    the last of them is, [first, last) of query tiles outside of which there is nobody). others: steps there are. By a
    whole warp."""
    far, begin, end = Int32(0), Int32(HIGHEST), Int32(0)
    if others > 0:  # of the first in the order of work the verifier then knows that it waits for nobody
        for c in cutlass.range(1 + cute.arch.lane_idx(), others + 1, 32, unroll=1):
            first, last = range_of(ranges, tile + way * c)
            if cutlass.max(first, visits[0]) < cutlass.min(last, visits[1]):
                far, begin, end = c, cutlass.min(begin, first), cutlass.max(end, last)
        begin = cute.arch.warp_redux_sync(begin, "min")
        far = cute.arch.warp_redux_sync(far, "max")
        end = cute.arch.warp_redux_sync(end, "max")
    return far, begin, end


@cute.jit
def before(ranges, tile, m, way, within, leg: cutlass.Constexpr = None):
    """What the count of query tile m is when it is the turn of key tile `tile`. within: what `reach` found.

    leg: None, or a function of (key tile, its range, m): on which leg of its way it visits m; others on another leg add
    elsewhere.
    """
    far, begin, end = within
    if (m < begin) | (m >= end):  # between two sequences; else all key tiles of the one would be gone through
        far = Int32(0)
    mine = None
    if const_expr(leg is not None):
        mine = leg(tile, range_of(ranges, tile), m)
    found, c = Int32(0), Int32(1)
    while (found == 0) & (c <= far):
        for n in cutlass.range_constexpr(AT_ONCE - 1, -1, -1):  # the nearest last: it stands
            other = tile + way * cutlass.min(c + n, far)
            first, last = range_of(ranges, other)
            meets = (first <= m) & (m < last)
            if const_expr(leg is not None):
                meets = meets & (leg(other, (first, last), m) == mine)
            if meets:
                found = other + 1
        c = c + AT_ONCE
    return found


def give(flag, tile):
    """Ends the turn of key tile `tile` at a place of dQ."""
    cute.arch.store(flag.llvm_ptr, Int32(tile + 1), sem="release", scope="gpu")
