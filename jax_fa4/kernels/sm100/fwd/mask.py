"""Which key blocks a CTA visits, and -inf for what a row does not see. Every role has its trip count from `visited`."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from jax_fa4.kernels.common.segments import narrow
from jax_fa4.kernels.common.tiles import all_keys_visible, key_tiles, queries_of
from jax_fa4.kernels.sm100.fwd.context import query_of, query_tile

WORD = 32  # columns whose visibility one register holds


@cute.jit
def visited(ctx, tile, band, segments, space, share):
    """(last, how many, band): blocks last - how many ... last - 1 cover every key that any row of the tiles sees.

    At least one block, even where nothing is seen: wholly masked it leaves out = 0 and lse = -inf, so no role has an
    empty path. With segments the whole CTA calls it; space: see `narrow`. share: (this part, of so many); a part
    without blocks takes one and, by a band without queries, counts nothing of it.
    """
    plan = ctx.plan
    first, last = key_tiles(tile, (plan.span, plan.tile), band, plan.band, cutlass.min, cutlass.max, ctx.each)
    first, last = Int32(first), Int32(last)
    if const_expr(plan.segments):
        own = (plan.span * tile, cutlass.min(plan.span * (tile + 1), band.q_len))
        first, last = narrow((plan.threads, plan.tile), own, (first, last), band.kv_len, segments, space)
    if const_expr(plan.splits):
        this, parts = share
        first, last = first + (last - first) * this // parts, first + (last - first) * (this + 1) // parts
        band = band._replace(q_len=band.q_len if last > first else Int32(0))
    blocks = cutlass.max(last - first, 1)
    return first + blocks, blocks, band


@cute.jit
def halves(ctx, tile, band, last, blocks):
    """(lead, trail): of the pair's blocks the first query tile leaves out the `lead` first ones, the second the `trail`
    last ones, as none of their rows sees a key there. Each keeps at least one.

    Causal: the last block is past the diagonal of the first 128 rows. At 2048 queries that is 1 in 18 half-blocks.
    """
    plan = ctx.plan
    if const_expr(plan.pair or not plan.skips):  # a product of a pair is of 256 rows, and its commits are counted
        return 0, 0
    n = plan.tile
    first = last - blocks
    _, upper_last = key_tiles(2 * tile, (n, n), band, plan.band, cutlass.min, cutlass.max, ctx.each)
    lower_first, lower_last = key_tiles(2 * tile + 1, (n, n), band, plan.band, cutlass.min, cutlass.max, ctx.each)
    most = blocks - 1
    lead = cutlass.min(cutlass.min(cutlass.max(last - upper_last, 0), 1), most)
    trail = cutlass.min(cutlass.max(lower_first - first, 0), most)
    if lower_last <= lower_first:  # nobody there, or nobody who sees a key
        trail = most
    return lead, trail


def _from(column):
    """Bits of the columns >= column of a word; column may lie on either side of it. PTX shifts clamp at 32."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[Uint32(0xFFFFFFFF), cutlass.max(column, 0)],
    )


@cute.jit
def hide(ctx, s, thread, which, line):
    """-inf in the hidden columns of this thread's row of scores against key block `which`. Only edge blocks pay.

    A row at or past the query length is not hidden here: its result is dropped at the end.
    """
    plan, band = ctx.plan, ctx.band
    n = plan.tile
    top, key = query_tile(ctx, s) * n, which * n
    query, after = queries_of((top, top + n), ctx.each)
    inside = all_keys_visible((query, after - 1), (key, key + n - 1), band, plan.band)
    if not inside:
        end, begin = band.kv_len - key, None
        if const_expr(plan.band):
            middle = query_of(ctx, top + thread) + band.offset - key
            end, begin = cutlass.min(end, middle + band.right + 1), middle - band.left
        for c in cutlass.range_constexpr(0, n, WORD):
            keep = ~_from(end - c)
            if const_expr(begin is not None):
                keep = keep & _from(begin - c)
            for j in cutlass.range_constexpr(WORD):
                line[c + j] = line[c + j] if (keep & (1 << j)) != 0 else -Float32.inf
