"""Rows of a tile in shared memory that a length leaves out become zeros before a product reads them."""

import cutlass
import cutlass.cute as cute

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm100.bwd.plan import WARP


@cute.jit
def clear(ctx, shared, length, top, whole):
    """Zeroes the rows of a tile from `length` on, counted from `top`; past `whole` TMA read zeros already.

    What stands there may be anything: scores and weights of hidden pairs are 0, and 0 * NaN would reach the sums.
    """
    rest = length - top
    rows, columns = cute.size(shared, mode=[0]), cute.size(shared, mode=[1]) // 8
    if (rest < rows) & (length < whole):
        chunks = cute.flat_divide(shared, (1, 8))  # 16 bytes stay together in any swizzle
        zero = cute.make_rmem_tensor((1, 8), DTYPES[ctx.plan.dtype])
        zero.fill(0.0)
        begin = cutlass.max(rest, 0) * columns
        for n in cutlass.range(begin + ctx.thread % WARP, rows * columns, WARP, unroll=1):
            cute.autovec_copy(zero, chunks[None, None, n // columns, n % columns])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
