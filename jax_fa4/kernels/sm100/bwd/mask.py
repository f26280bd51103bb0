"""Who sees whom: an example's band, and -inf for the hidden scores of one thread: one row, consecutive columns, or four
rows of a fragment."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.tiles import all_keys_visible
from jax_fa4.mask import keys_seen, queries_seeing

WORD = 32  # columns whose visibility one register holds
ROWS = 4  # keys of a thread in a fragment, eight lanes apart
FAR = 1 << 30


def soft_cap(plan, floats):
    """(scale / limit, limit), or None without a cap: logits are limit * tanh(q k scale / limit)."""
    if const_expr(not plan.soft_cap):
        return None
    limit = floats[VALUES.soft_cap]
    return floats[VALUES.scale] / limit, limit


def _from(column):
    """Bits of the columns >= column of a word; column may lie on either side of it. PTX shifts clamp at 32."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[Uint32(0xFFFFFFFF), cutlass.max(column, 0)],
    )


def covered(ctx, m, tile=None):
    """Whether every pair of key tile `tile` (the CTA's) and query tile m is seen, but for queries past q_len (LSE
    +inf)."""
    n = ctx.plan.tile
    top, key = m * n, (ctx.tile if tile is None else tile) * n
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
def key_limits(ctx, query, key):
    """[begin, end) of the columns that `query` sees, column 0 being `key`."""
    begin, end = Int32(-FAR), ctx.band.kv_len
    if const_expr(ctx.plan.band):
        begin, end = keys_seen(query, query, ctx.band, cutlass.min, cutlass.max)
    return begin - key, end - key


@cute.jit
def _keep(plan: cutlass.Constexpr, column: cutlass.Constexpr, bounds):
    """Bits of the WORD columns from `column` on that lie inside the bounds."""
    begin, end = bounds
    keep = ~_from(end - column)
    if const_expr(plan.band):
        keep = keep & _from(begin - column)
    return keep


@cute.jit
def hide_fragment(ctx, line, top):
    """-inf for the hidden scores of a thread's fragment. top: (its first key, the first query of its warp)."""
    plan, lane = ctx.plan, ctx.thread % 4
    for j in cutlass.range_constexpr(ROWS):
        bounds = limits(ctx, top[0] + 8 * j, top[1])
        for c in cutlass.range_constexpr(0, cute.size(line), WORD):
            keep = _keep(plan, c, bounds) >> Uint32(2 * lane)
            for n in cutlass.range_constexpr(WORD // ROWS):
                at = c + WORD // 2 * (j // 2) + n // 2 * 4 + 2 * (j % 2) + n % 2
                line[at] = line[at] if (keep & (1 << (n // 2 * 8 + n % 2))) != 0 else -Float32.inf


@cute.jit
def hide(plan: cutlass.Constexpr, line, column: cutlass.Constexpr, bounds):
    """-inf outside the bounds; `line` holds scores from `column` on, WORD at most."""
    keep = _keep(plan, column, bounds)
    for j in cutlass.range_constexpr(cute.size(line)):
        line[j] = line[j] if (keep & (1 << j)) != 0 else -Float32.inf
