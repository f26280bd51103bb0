"""The math role's helpers at the end of a tile: rows normalised, O out through TMA, LSE from registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common.copies import put, send, settle, views
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm90 import wgmma
from jax_fa4.kernels.sm90.fwd.packed import query_of, sink_of
from jax_fa4.kernels.sm90.rows import LN_2, LOG2_E, by_row, column_of, product, quad_sum

STORE_BARRIER = 1  # named barrier of the math warps
ROWS_BARRIER = 7  # and the next: one for each warpgroup


@cute.jit
def finish(ctx, row, peak, total):
    """(factor for O, lse) of the thread's two rows, sink included; both clear for rows that see nothing."""
    inverse, lse = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        whole = quad_sum(total[r])
        top = product(peak[r], ctx.scale[0])
        lives = (query_of(ctx, row + 8 * r) < ctx.band.q_len) & (whole != 0.0)
        if not lives:  # also what NaN in a query past q_len left behind
            whole, top = Float32(0.0), -Float32.inf
        if const_expr(ctx.plan.sinks):
            sink = sink_of(ctx, row + 8 * r) * LOG2_E
            base = cute.arch.fmax(top, sink)
            if base == -Float32.inf:
                base = Float32(0.0)
            share = cute.math.exp2(top - base, fastmath=True)
            whole = whole * share + cute.math.exp2(sink - base, fastmath=True)
            inverse[r] = share / whole if lives else 0.0
            lse[r] = (base + cute.math.log2(whole, fastmath=True)) * LN_2
        else:
            if const_expr(ctx.plan.quick):
                inverse[r] = cute.arch.rcp_approx(whole) if lives else 0.0
            else:
                inverse[r] = 1.0 / whole if lives else 0.0
            lse[r] = (top + cute.math.log2(whole, fastmath=True)) * LN_2
    return inverse, lse


@cute.jit
def normalise(out, inverse):
    """Rows times their factor; a factor of 0 clears the row whatever it holds."""
    view = by_row(out)
    for r in cutlass.range_constexpr(2):
        for block in cutlass.range_constexpr(cute.size(view, mode=[1]) // 2):
            for c in cutlass.range_constexpr(2 * block, 2 * block + 2):
                view[r, c] = view[r, c] * inverse[r] if inverse[r] != 0.0 else 0.0


@cute.jit
def store_out(ctx, mma, thread, out):
    """O in the caller's dtype over Q's place in shared memory, then a TMA store, clipped at T and the true depth."""
    plan = ctx.plan
    shared = ctx.out[2]
    dtype = DTYPES[plan.dtype]
    if const_expr(plan.inner != plan.inner_value):
        # A warpgroup's rows of O then cover Q rows of another, which may still be at its last scores.
        cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=128 * plan.groups)
    half = cute.make_rmem_tensor_like(out, dtype)
    half.store(out.load().to(dtype))
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    mine = cute.make_tiled_copy_C(matrix, mma).get_slice(thread)
    cute.copy(matrix, mine.retile(half), mine.partition_D(shared[None, None, 0]))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=128 * plan.groups)
    if ctx.warp == 4:
        put(views(ctx.out, (plan.rows, plan.inner_value), ctx.head, ctx.batch), ctx.tile)


@cute.jit
def store_rows(ctx, thread, out):
    """As store_out, a warpgroup's 64 rows at a time through a place of their own: neither waits for the others, nor
    for memory before the next store."""
    plan = ctx.plan
    dtype = DTYPES[plan.dtype]
    group = ctx.warp // 4 - 1
    shared = ctx.out[2][None, None, group]
    barrier = {"barrier_id": ROWS_BARRIER + group, "number_of_threads": 128}
    half = cute.make_rmem_tensor_like(out, dtype)
    half.store(out.load().to(dtype))
    if ctx.warp % 4 == 0:
        settle()
    cute.arch.barrier(**barrier)
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    majors = (wgmma.K_MAJOR, wgmma.MN_MAJOR)
    alone = wgmma.product(dtype, majors, (1, 1), (64, plan.inner_value), a_in_registers=True)
    mine = cute.make_tiled_copy_C(matrix, alone).get_slice(thread % 128)
    cute.copy(matrix, mine.retile(half), mine.partition_D(shared))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(**barrier)
    if ctx.warp % 4 == 0:
        copy = views(ctx.out, (64, plan.inner_value), ctx.head, ctx.batch)
        send(copy, ctx.tile * plan.groups + group, group)


@cute.jit
def store_part(ctx, row, out):
    """The thread's two rows in float32, from registers; up to the line's end and the true depth."""
    view = by_row(out)
    depth = ctx.plan.value_depth
    first = 2 * (ctx.thread % 4)
    for r in cutlass.range_constexpr(2):
        if row + 8 * r < ctx.rows:
            to = ctx.part + (row + 8 * r) * depth + first
            for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
                if const_expr(column_of(c) < depth):  # depths are multiples of 8, as are a thread's column blocks
                    to[column_of(c)] = view[r, c]


@cute.jit
def store_lse(ctx, row, lse):
    """One lane of each quad writes its rows' LSE, up to the line's end."""
    # ctx.lse[...] = inside a dynamic `if` would make ctx itself a carried value, its plan no longer Python.
    to = ctx.lse
    for r in cutlass.range_constexpr(2):
        if (ctx.thread % 4 == 0) & (row + 8 * r < ctx.rows):
            to[row + 8 * r] = lse[r]
