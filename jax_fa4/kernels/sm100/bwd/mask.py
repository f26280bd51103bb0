"""-inf for the hidden scores of one thread: one key, consecutive queries."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from jax_fa4.kernels.common.tiles import all_keys_visible
from jax_fa4.mask import queries_seeing

WORD = 32  # columns whose visibility one register holds
FAR = 1 << 30


def _from(column):
    """Bits of the columns >= column of a word; column may lie on either side of it. PTX shifts clamp at 32."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[Uint32(0xFFFFFFFF), cutlass.max(column, 0)],
    )


def covered(ctx, m):
    """Whether every pair of the key tile and query tile m is seen, not counting queries past q_len (LSE +inf)."""
    n = ctx.plan.tile
    top, key = m * n, ctx.tile * n
    return all_keys_visible((top, top + n - 1), (key, key + n - 1), ctx.band, ctx.plan.band)


@cute.jit
def limits(ctx, key, query):
    """[begin, end) of the columns that see `key`, column 0 being `query`."""
    begin, end = Int32(-FAR), Int32(FAR)
    if const_expr(ctx.plan.band):
        begin, end = queries_seeing(key, key, ctx.band, cutlass.min, cutlass.max)
        begin, end = begin - query, end - query
    if key >= ctx.band.kv_len:
        end = Int32(-FAR)
    return begin, end


@cute.jit
def hide(plan: cutlass.Constexpr, line, column: cutlass.Constexpr, bounds):
    """-inf outside the bounds; `line` holds scores from `column` on, WORD at most."""
    begin, end = bounds
    keep = ~_from(end - column)
    if const_expr(plan.band):
        keep = keep & _from(begin - column)
    for j in cutlass.range_constexpr(cute.size(line)):
        line[j] = line[j] if (keep & (1 << j)) != 0 else -Float32.inf
