"""Last kernel: the float32 dQ workspace of pairs, see reduce.py, becomes dQ of the true scale, summed over copies."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.tiles import work_item
from jax_fa4.kernels.sm100.bwd.pair.plan import GROUP, POST_ROWS, POST_THREADS
from jax_fa4.kernels.sm100.bwd.post import collected

ACROSS = 4  # lanes that share a query, 8 columns each at a time


@cute.kernel
def bwd_post(
    work: cute.Pointer,
    turns,
    dq: cute.Pointer,
    floats: cute.Pointer,
    queries: Int32,
    heads: Int32,
    tiles: Int32,
    copies,
    plan: cutlass.Constexpr,
):
    """A warp takes 8 queries by 32 columns at a time: it reads lines of 128 bytes and writes rows of 64.

    Query j of unit 2 i + r of a tile is row unit * i + j of CTA r's half; the second half of its columns is 64 lanes
    further.
    """
    if const_expr(plan.dependent):
        cute.arch.griddepcontrol_wait()  # the main kernel has ended, and so has the preprocess, which that one awaits
    thread = cute.arch.thread_idx()[0]
    pieces = plan.tile // POST_ROWS
    item, head, batch = work_item(cute.arch.block_idx()[0], tiles * pieces, heads, False)
    tile, piece = item // pieces, item % pieces
    row, across = thread // 32 * 8 + thread % 8, thread % 32 // 8  # of the POST_ROWS queries of piece i
    i = tile * plan.tile + POST_ROWS * piece + row
    half, unit = plan.half, plan.unit
    owner, inside = row // unit % 2, POST_ROWS // 2 * piece + row // (2 * unit) * unit + row % unit
    line = (batch.to(Int64) * heads + head) * tiles + tile
    place, taken = line * (plan.tile * plan.inner), None
    if const_expr(plan.ordered):
        place, taken = place * copies, (turns + line * copies, copies)
    place = place + owner * (GROUP * half) + inside * 4 + across * (2 * 4 * GROUP)
    to = dq + ((batch.to(Int64) * queries + i) * heads + head) * plan.depth
    scale = floats[VALUES.scale]
    small = cute.make_rmem_tensor(8, DTYPES[plan.dtype])
    blocks = plan.depth // 8
    which = []
    for n in cutlass.range_constexpr(-(-blocks // ACROSS)):
        block = ACROSS * n + across
        wanted = i < queries
        if const_expr(ACROSS * (n + 1) > blocks):
            wanted = wanted & (block < blocks)
        right = (8 * ACROSS * n) // half  # whether these columns are the upper lanes'
        which.append((right * (POST_ROWS * 4) + (ACROSS * n - right * (half // 8)) * (2 * 4 * GROUP), wanted))
    form = cute.make_layout((4, 2), stride=(1, 4 * GROUP))
    found = collected(plan, (work, place), which, plan.tile * plan.inner, form, taken)
    for n in cutlass.range_constexpr(len(which)):
        if which[n][1]:
            small.store((found[n].load() * scale).to(DTYPES[plan.dtype]).reshape(8))
            cute.autovec_copy(small, cute.make_tensor((to + 8 * (ACROSS * n + across)).align(16), cute.make_layout(8)))


def start(stream, plan, data, kernel, e):
    """Starts the kernel. data: pointers by buffer name; e: extents by symbol."""
    assert (
        kernel.block == POST_THREADS == POST_ROWS * ACROSS
        and plan.tile == 2 * POST_ROWS
        and POST_ROWS % (2 * plan.unit) == 0
    )
    pointers = [data["work"], data.get("turns"), data["dq"], data["floats"]]
    sizes = [e[symbol] for symbol in kernel.extents] + [None] * (not plan.ordered)
    labelled(bwd_post, plan)(*pointers, *sizes, plan).launch(
        grid=kernel.grid, block=(kernel.block, 1, 1), stream=stream, use_pdl=kernel.dependent
    )
