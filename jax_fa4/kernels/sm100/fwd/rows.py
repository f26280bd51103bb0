"""Rows that are heads of queries, or leave by parts: to and from global memory by the threads that own them.

No tensor map has their places where a group is no power of two, and they are few.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm100.fwd.context import query_tile

CHUNK = 8  # 16-bit elements of 16 bytes


def _eight(pointer, kind, at):
    """Eight elements at `at`, a multiple of eight, on which the pointer's type keeps no hold."""
    place = cute.make_ptr(kind, (pointer + at).toint(), cutlass.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(place, cute.make_layout(CHUNK))


@cute.jit
def bring_row(ctx, s, thread):
    """This thread's row of Q to shared memory; zeros past the line's end and past the depth. Then it arrives."""
    plan = ctx.plan
    kind, (_, source, shared) = DTYPES[plan.dtype], ctx.q_rows
    row = query_tile(ctx, s) * plan.tile + thread
    query, head = row // ctx.each, ctx.head * ctx.each + row % ctx.each
    line = (ctx.batch.to(Int64) * ctx.queries + query) * ctx.heads + head
    to = shared[thread, None, s]
    parts = cute.make_rmem_tensor(plan.inner, kind)
    parts.fill(0.0)
    if row < ctx.length:
        for c in cutlass.range_constexpr(0, plan.depth, CHUNK):
            part = cute.make_tensor(parts.iterator + c, cute.make_layout(CHUNK))
            cute.autovec_copy(_eight(source, kind, line * plan.depth + c), part)
    for c in cutlass.range_constexpr(0, plan.inner, CHUNK):
        part = cute.make_tensor(parts.iterator + c, cute.make_layout(CHUNK))
        cute.autovec_copy(part, cute.local_tile(to, (CHUNK,), (c // CHUNK,)))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_arrive(ctx.full["q"] + s)


@cute.jit
def sink_of(ctx, row):
    """The extra logit of a row, -inf where another part of the row's keys counts it."""
    plan = ctx.plan
    sink = ctx.sinks[ctx.head * ctx.each + row % ctx.each] if plan.packed else ctx.sinks[ctx.head]
    if cutlass.const_expr(plan.splits):
        sink = sink if ctx.counted else -Float32.inf
    return sink


@cute.jit
def put_part(ctx, row, line, first: cutlass.Constexpr):
    """Columns `first` and later of a row, float32, up to the line's end and the true depth."""
    depth = ctx.plan.value_depth
    if row < ctx.length:
        for c in cutlass.range_constexpr(0, cute.size(line), CHUNK):
            if cutlass.const_expr(first + c < depth):
                part = cute.make_tensor(line.iterator + c, cute.make_layout(CHUNK))
                cute.autovec_copy(part, _eight(ctx.part, Float32, row.to(Int64) * depth + first + c))
