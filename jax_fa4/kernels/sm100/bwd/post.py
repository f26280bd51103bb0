"""Last kernel: the float32 dQ workspace, [column block of 4][query][4] a tile, summed over copies, becomes dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.tiles import work_item
from jax_fa4.kernels.sm100.bwd.plan import POST_ROWS, POST_THREADS

ACROSS = 4  # lanes that share a query, 8 columns each at a time


@cute.jit
def collected(plan: cutlass.Constexpr, start, which, size: cutlass.Constexpr, form: cutlass.Constexpr, turns):
    """Eight sums for each of `which`: (where from `start` on, in the first copy; whether it is wanted).

    start: (the workspace, the thread's place in it). size: numbers of a copy; form: where the eight lie. turns: (those
    of the tile, copies) in an ordered plan. Nothing was stored where nobody took a turn.
    """
    work, place = start
    found = [cute.make_rmem_tensor((4, 2), Float32) for _ in range(len(which))]
    if const_expr(plan.ordered):
        for n in cutlass.range_constexpr(len(which)):
            found[n].fill(0.0)
        # Not rounded up in the loop, as `align` would: the verifier loses track of an address that is carried so.
        place = work + cute.assume(place, divby=4)
        for c in cutlass.range(turns[1], unroll=1):
            if turns[0][c] > 0:
                for n in cutlass.range_constexpr(len(which)):
                    if which[n][1]:
                        more = cute.make_rmem_tensor((4, 2), Float32)
                        cute.autovec_copy(cute.make_tensor(place + which[n][0], form), more)
                        found[n].store(found[n].load() + more.load())
            place = place + size
    else:
        place = work + place
        for n in cutlass.range_constexpr(len(which)):
            if which[n][1]:
                cute.autovec_copy(cute.make_tensor((place + which[n][0]).align(16), form), found[n])
    return found


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
    """A warp takes 8 queries by 32 columns at a time: it reads lines of 128 bytes and writes rows of 64."""
    if const_expr(plan.dependent):
        cute.arch.griddepcontrol_wait()  # the main kernel has ended, and so has the preprocess, which that one awaits
    thread = cute.arch.thread_idx()[0]
    pieces = plan.tile // POST_ROWS
    item, head, batch = work_item(cute.arch.block_idx()[0], tiles * pieces, heads, False)
    tile, piece = item // pieces, item % pieces
    row, lane = POST_ROWS * piece + thread // 32 * 8 + thread % 8, thread % 32 // 8
    depth, i = plan.depth, tile * plan.tile + row
    line = (batch.to(Int64) * heads + head) * tiles + tile
    place, taken = line * (plan.tile * depth), None
    if const_expr(plan.ordered):
        place, taken = place * copies, (turns + line * copies, copies)
    to = dq + ((batch.to(Int64) * queries + i) * heads + head) * depth
    scale = floats[VALUES.scale]
    half = cute.make_rmem_tensor(8, DTYPES[plan.dtype])
    blocks = depth // 8
    which = []
    for n in cutlass.range_constexpr(-(-blocks // ACROSS)):
        block = ACROSS * n + lane
        wanted = i < queries
        if const_expr(ACROSS * (n + 1) > blocks):
            wanted = wanted & (block < blocks)
        which.append((ACROSS * n * (2 * plan.tile) * 4, wanted))
    form = cute.make_layout((4, 2), stride=(1, 4 * plan.tile))
    place = place + (lane * (2 * plan.tile) + row) * 4
    found = collected(plan, (work, place), which, plan.tile * depth, form, taken)
    for n in cutlass.range_constexpr(len(which)):
        if which[n][1]:
            half.store((found[n].load() * scale).to(DTYPES[plan.dtype]).reshape(8))
            cute.autovec_copy(half, cute.make_tensor((to + 8 * (ACROSS * n + lane)).align(16), cute.make_layout(8)))


def start(stream, plan, data, kernel, e):
    """Starts the kernel. data: pointers by buffer name; e: extents by symbol."""
    assert kernel.block == POST_THREADS == POST_ROWS * ACROSS
    pointers = [data["work"], data.get("turns"), data["dq"], data["floats"]]
    sizes = [e[symbol] for symbol in kernel.extents] + [None] * (not plan.ordered)
    labelled(bwd_post, plan)(*pointers, *sizes, plan).launch(
        grid=kernel.grid, block=(kernel.block, 1, 1), stream=stream, use_pdl=kernel.dependent
    )
