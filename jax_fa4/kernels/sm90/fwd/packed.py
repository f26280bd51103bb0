"""Rows that are the heads of a query: row r of a line is head r % each of query r // each. With each = 1, queries."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from jax_fa4.kernels.common.dtypes import DTYPES

ROWS_THERE = 2  # named barrier of the math warps; its other use, where V is cleared, comes after this one


def query_of(ctx, row):
    return row // ctx.each if const_expr(ctx.plan.packed) else row


@cute.jit
def sink_of(ctx, row):
    """The extra logit of a row, -inf where another part of the row's keys counts it."""
    plan = ctx.plan
    at = row % ctx.each if const_expr(plan.packed) else 0
    sink = ctx.sinks[at]
    if const_expr(plan.splits):
        sink = sink if ctx.counted else -Float32.inf
    return sink


@cute.jit
def bring_rows(ctx, thread):
    """A query tile's rows into shared memory, 16 bytes a thread at a time; zeros past the line's end and the depth.

    No tensor map has their places where a group is no power of two, and there are few of them.
    """
    plan = ctx.plan
    _, source, shared = ctx.q
    chunks = cute.flat_divide(shared[None, None, 0], (1, 8))  # 16 bytes stay together in any swizzle
    columns, threads = plan.inner // 8, 128 * plan.groups
    begin = ctx.batch.to(Int64) * ctx.queries * ctx.heads + ctx.head * ctx.each
    for n in cutlass.range_constexpr(plan.rows * columns // threads):
        place = n * threads + thread
        inside, column = place // columns, place % columns
        row = ctx.tile * plan.rows + inside
        part = cute.make_rmem_tensor(8, DTYPES[plan.dtype])
        part.fill(0.0)
        if (row < ctx.rows) & (column < plan.depth // 8):
            at = (begin + (row // ctx.each) * ctx.heads + row % ctx.each) * plan.depth + column * 8
            of = cute.make_ptr(DTYPES[plan.dtype], (source + at).toint(), cutlass.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(of, cute.make_layout(8)), part)
        cute.autovec_copy(part, cute.flatten(chunks[None, None, inside, column]))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=ROWS_THERE, number_of_threads=threads)
