"""The second kernel of a split forward: outputs and LSE of the parts of a row's keys become those of all of them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.splits import COMBINE_ROWS

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


def place_of(row, queries, heads, kv_heads, plan):
    """(batch, head, query) of a row of the parts: lines of queries, or of the heads of one query after the other's."""
    if plan.packed:
        group = heads // kv_heads
        line, inside = row // (queries * group), row % (queries * group)
        return line // kv_heads, line % kv_heads * group + inside % group, inside // group
    return row // queries // heads, row // queries % heads, row % queries


@cute.kernel
def combine(
    part: cute.Pointer,
    part_lse: cute.Pointer,
    out: cute.Pointer,
    lse: cute.Pointer,
    batches: Int32,
    heads: Int32,
    queries: Int32,
    kv_heads: Int32,
    parts: Int32,
    plan: cutlass.Constexpr,
):
    """A warp for one row: out = sum_p w_p out_p / sum_p w_p with w_p = exp(lse_p - max lse); 0 and -inf without keys.

    A part that met no key has out_p = 0 and lse_p = -inf.
    """
    thread = cute.arch.thread_idx()[0]
    row = cute.arch.block_idx()[0] * COMBINE_ROWS + thread // 32
    lane, depth = thread % 32, plan.value_depth
    rows = batches * heads * queries
    if row < rows:
        top = -Float32.inf
        for p in cutlass.range(parts, unroll=4):
            top = cute.arch.fmax(top, part_lse[p.to(Int64) * rows + row])
        base = Float32(0.0) if top == -Float32.inf else top
        columns = -(-depth // 32)
        total = Float32(0.0)
        sums = cute.make_rmem_tensor(columns, Float32)
        sums.fill(0.0)
        for p in cutlass.range(parts, unroll=2):
            at = p.to(Int64) * rows + row
            weight = cute.math.exp2((part_lse[at] - base) * LOG2_E, fastmath=True)
            total = total + weight
            of = part + at * depth
            for c in cutlass.range_constexpr(columns):
                if lane + 32 * c < depth:
                    sums[c] = sums[c] + weight * of[lane + 32 * c]
        inverse = Float32(0.0) if total == 0.0 else 1.0 / total
        batch, head, query = place_of(row, queries, heads, kv_heads, plan)
        to = out + (batch.to(Int64) * queries + query) * heads * depth + head * depth
        for c in cutlass.range_constexpr(columns):
            if lane + 32 * c < depth:
                to[lane + 32 * c] = (sums[c] * inverse).to(DTYPES[plan.dtype])
        if lane == 0:
            at = (batch.to(Int64) * heads + head) * queries + query
            lse[at] = base + cute.math.log2(total, fastmath=True) * LN_2 if total != 0.0 else -Float32.inf
