"""Last kernel: the float32 dQ workspace, in the order of the math threads' registers, becomes dQ of the true scale."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.tiles import work_item
from jax_fa4.kernels.sm90.bwd.convert import convert
from jax_fa4.kernels.sm90.bwd.plan import POST_THREADS


@cute.kernel
def bwd_post(
    work: cute.Pointer,
    dq: cute.Pointer,
    floats: cute.Pointer,
    queries: Int32,
    heads: Int32,
    tiles: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA for 64 queries, a warp for eight."""
    if const_expr(plan.dependent):
        cute.arch.griddepcontrol_wait()  # the main kernel has ended, and so has the preprocess, which that one awaits
    pieces = plan.rows // 64
    item, head, batch = work_item(cute.arch.block_idx()[0], tiles * pieces, heads, False)
    eight = item % pieces * 8 + cute.arch.thread_idx()[0] // 32
    tile = item // pieces
    source = work + ((batch.to(Int64) * heads + head) * tiles + tile) * (plan.rows * plan.depth)
    convert((eight, tile, head, batch), (queries, heads), source, dq, floats[VALUES.scale], plan)


def start(stream, plan, data, kernel, e):
    """Starts the kernel. data: pointers by buffer name; e: extents by symbol."""
    assert kernel.block == POST_THREADS
    pointers = [data[name] for name in kernel.pointers]
    labelled(bwd_post, plan)(*pointers, *[e[symbol] for symbol in kernel.extents], plan).launch(
        grid=kernel.grid, block=(kernel.block, 1, 1), stream=stream, use_pdl=kernel.dependent
    )
