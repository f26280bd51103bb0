"""A query tile's dQ from float32, in the order of the math threads' registers, to rows of the caller's dtype."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from jax_fa4.kernels.common.dtypes import DTYPES


@cute.jit
def convert(place, sizes, source, dq, scale, plan: cutlass.Constexpr):
    """Eight rows of dQ, by one warp. place: (which eight of the tile, query tile, head, batch); sizes: (T, N).

    source: the tile in float32, in the workspace or a copy in shared memory.

    A tile is [column block of 8, see plan.block_of][math thread of a warpgroup][4], the four being (r, c), (r, c + 1),
    (r + 8, c), (r + 8, c + 1). A warp takes four blocks of eight rows, r and r + 8 among them: it reads lines of 256
    bytes and writes rows of 64.
    """
    (eight, tile, head, batch), (queries, heads) = place, sizes
    depth, pieces = plan.depth, plan.rows // 64
    piece, warp, lane = eight // 8, eight % 8, cute.arch.lane_idx()
    quad, lower = 4 * warp + lane // 4 % 4, lane // 16
    i = tile * plan.rows + 64 * piece + 16 * (quad // 8) + quad % 8 + 8 * lower
    to = dq + ((batch.to(Int64) * queries + i) * heads + head) * depth
    found = cute.make_rmem_tensor((2, 4), Float32)
    half = cute.make_rmem_tensor(8, DTYPES[plan.dtype])
    blocks = depth // 8
    for n in cutlass.range_constexpr(-(-blocks // 4)):
        block = 4 * n + lane % 4
        wanted = i < queries
        if const_expr(4 * n + 4 > blocks):
            wanted = wanted & (block < blocks)
        if wanted:
            of = (source + (((block * pieces + piece) * 128 + 4 * quad) * 4 + 2 * lower)).align(8)
            cute.autovec_copy(cute.make_tensor(of, cute.make_layout((2, 4), stride=(1, 4))), found)
            half.store((found.load() * scale).to(DTYPES[plan.dtype]).reshape(8))
            cute.autovec_copy(half, cute.make_tensor((to + 8 * block).align(16), cute.make_layout(8)))
