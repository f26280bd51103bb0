"""The backward preprocess: per query delta and the LSE in base 2, the dQ workspace zeroed. Plain SIMT, any arch."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.examples import example_band
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.segments import narrowed
from jax_fa4.kernels.common.tiles import key_tiles, query_tiles, up, work_item
from jax_fa4.kernels.passes.plan import ahead, bind, in_fragments

LOG2_E = 1.4426950408889634


@cute.jit
def dot_row(a, b, lane, plan: cutlass.Constexpr):
    """Sum of the products of two rows, in every one of the lanes that share them."""
    total = Float32(0.0)
    if 8 * lane < plan.value_depth:
        x, y = cute.make_rmem_tensor(8, DTYPES[plan.dtype]), cute.make_rmem_tensor(8, DTYPES[plan.dtype])
        cute.autovec_copy(cute.make_tensor((a + 8 * lane).align(16), cute.make_layout(8)), x)
        cute.autovec_copy(cute.make_tensor((b + 8 * lane).align(16), cute.make_layout(8)), y)
        total = (x.load().to(Float32) * y.load().to(Float32)).reduce(cute.ReductionOp.ADD, Float32(0), 0)
    for bit in cutlass.range_constexpr((plan.lanes - 1).bit_length()):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
    return total


@cute.jit
def clear(work, thread, plan: cutlass.Constexpr):
    """Zeroes one tile of the workspace, 16 bytes a thread at a time."""
    zero = cute.make_rmem_tensor(4, Float32)
    zero.fill(0.0)
    size, stride = plan.rows * plan.work_depth, 4 * plan.threads
    for n in cutlass.range_constexpr(-(-size // stride)):
        at = n * stride + 4 * thread
        if const_expr((n + 1) * stride <= size):
            cute.autovec_copy(zero, cute.make_tensor((work + at).align(16), cute.make_layout(4)))
        elif at < size:
            cute.autovec_copy(zero, cute.make_tensor((work + at).align(16), cute.make_layout(4)))


@cute.jit
def clear_unseen(dq, place, ints, sizes, plan: cutlass.Constexpr):
    """Zeroes dQ of a query tile that sees no key tile. place: (tile, head, batch); sizes: (queries, heads, keys)."""
    (tile, head, batch), (queries, heads, keys) = place, sizes
    band = example_band(ints, batch, queries, keys)
    first, last = key_tiles(tile, (plan.rows, plan.unseen), band, plan.band, cutlass.min, cutlass.max)
    if last <= first:
        zero = cute.make_rmem_tensor(8, DTYPES[plan.dtype])
        zero.fill(0.0)
        width = plan.work_depth // 8
        rows = cutlass.min(queries - tile * plan.rows, plan.rows)
        for n in cutlass.range(cute.arch.thread_idx()[0], rows * width, plan.threads, unroll=1):
            i = tile * plan.rows + n // width
            to = dq + (((batch.to(Int64) * queries + i) * heads + head) * plan.work_depth + n % width * 8)
            cute.autovec_copy(zero, cute.make_tensor(to.align(16), cute.make_layout(8)))


@cute.jit
def clear_first(work, cleared, place, sizes, plan: cutlass.Constexpr):
    """Zeroes the tile of the workspace if nobody else does, and the counts of those who do.

    place: (tile, head, batch), where the tile is; sizes: (heads, keys, kv_heads).
    """
    (tile, head, batch, begin), (heads, keys, kv_heads) = place, sizes
    key_tiles, group = up(keys, plan.unseen), heads // kv_heads
    line = batch * kv_heads + head // group
    mine = line < ahead(plan.workers, key_tiles)
    if mine:
        clear(work + begin, cute.arch.thread_idx()[0], plan)
    if (cute.arch.thread_idx()[0] == 0) & (tile == 0) & (head % group == 0):
        cleared[line] = key_tiles if mine else Int32(0)


@cute.jit
def lay_ranges(ranges, place, ints, sizes, ids, plan: cutlass.Constexpr):
    """[first, last) of the query tiles that each key tile of an example visits, the key tiles shared out over its CTAs.

    place: (tile, head, batch); sizes: (queries, heads, keys, tiles); ids: pointers to those of queries and of keys.
    """
    (tile, head, batch), (queries, heads, keys, tiles) = place, sizes
    space = SmemAllocator().allocate_array(Int32, plan.threads // 8)
    band, size = example_band(ints, batch, queries, keys), (plan.rows, plan.ranges)
    ids = (ids[0] + batch.to(Int64) * queries, ids[1] + batch.to(Int64) * keys)
    key_tiles = up(keys, plan.ranges)
    for n in cutlass.range(head * tiles + tile, key_tiles, heads * tiles, unroll=1):
        first, last = query_tiles(n, size, band, plan.band, cutlass.min, cutlass.max)
        trip = (Int32(first), Int32(last))
        first, last = narrowed(n, trip, (band.q_len, band.kv_len), ids, space, (*size, plan.threads))
        if cute.arch.thread_idx()[0] == 0:
            to = ranges + 2 * (batch * key_tiles + n)
            to[0] = Int32(first)
            to[1] = Int32(last)


@cute.kernel
def bwd_pre(
    out: cute.Pointer,
    dout: cute.Pointer,
    lse: cute.Pointer,
    dlse: cute.Pointer,
    ints: cute.Pointer,
    q_segments,
    kv_segments,
    stats: cute.Pointer,
    work,
    turns,
    tickets,
    cleared,
    ranges,
    dq,
    queries: Int32,
    heads: Int32,
    tiles: Int32,
    keys,
    kv_heads,
    copies,
    plan: cutlass.Constexpr,
):
    """Rows of LSE -inf, past q_len or padding the tile get LSE +inf and delta 0: exp2(score - inf) = 0 needs no mask.

    So whatever O, dO and dLSE hold there, NaN included, goes no further. A row that sees only a sink is none of them.
    """
    if const_expr(plan.releases):
        cute.arch.griddepcontrol_launch_dependents()
    thread = cute.arch.thread_idx()[0]
    tile, head, batch = work_item(cute.arch.block_idx()[0], tiles, heads, False)
    line = batch.to(Int64) * heads + head
    place = line * tiles + tile
    if const_expr(plan.workers > 0):
        begin = place * (plan.rows * plan.work_depth)
        clear_first(work, cleared, (tile, head, batch, begin), (heads, keys, kv_heads), plan)
    elif const_expr(plan.copies):
        for c in cutlass.range(thread, copies, plan.threads, unroll=1):  # whose first visitor stores
            turns[place * copies + c] = Int32(0)
    elif const_expr(plan.work_depth > 0):
        clear(work + place * (plan.rows * plan.work_depth), thread, plan)
    if const_expr(plan.turns > 1):
        if thread < plan.turns:
            turns[place * plan.turns + thread] = Int32(0)
    elif const_expr(plan.turns and not plan.copies):
        if thread == 0:
            turns[place] = Int32(0)
    if const_expr(plan.tickets):
        if (thread == 0) & (place == 0):
            tickets[0] = Int32(0)
    if const_expr(plan.unseen > 0):
        clear_unseen(dq, (tile, head, batch), ints, (queries, heads, keys), plan)
    if const_expr(plan.ranges > 0):
        ids = (q_segments, kv_segments)
        lay_ranges(ranges, (tile, head, batch), ints, (queries, heads, keys, tiles), ids, plan)
    q_len = cutlass.min(ints[VALUES.example(batch) + VALUES.q_len], queries)
    to = stats + place * (2 * plan.rows)
    lane, first = thread % plan.lanes, thread // plan.lanes
    for n in cutlass.range_constexpr(-(-plan.rows // plan.rows_at_once)):  # no branch around the loads: many in flight
        row = first + n * plan.rows_at_once
        i = cutlass.min(tile * plan.rows + row, queries - 1)
        at = ((batch.to(Int64) * queries + i) * heads + head) * plan.value_depth
        dot = dot_row(out + at, dout + at, lane, plan)
        whole, slope = lse[line * queries + i], dlse[line * queries + i]
        two, delta = whole * LOG2_E, dot - slope
        if (whole == -Float32.inf) | (tile * plan.rows + row >= q_len):
            two, delta = Float32.inf, Float32(0.0)
        if (lane == 0) & (row < plan.rows):
            where = in_fragments(row) if const_expr(plan.fragments) else row
            to[where] = two
            to[where + plan.rows] = delta


def start(stream, plan, data, e, dependent=False):
    """Starts the kernel as one of a call's. data: pointers by buffer name; e: extents by symbol."""
    kernel = bind(plan, e, dependent)
    names = ("out", "dout", "lse", "dlse", "ints", "q_segments", "kv_segments", "stats", "work", "turns", "tickets")
    names += ("cleared", "ranges", "dq")
    pointers = [data[name] if name in kernel.pointers else None for name in names]
    sizes = [e[s] if s in kernel.extents else None for s in ("T", "N", "M", "S", "K", "C")]
    labelled(bwd_pre, plan)(*pointers, *sizes, plan).launch(
        grid=kernel.grid, block=(kernel.block, 1, 1), stream=stream, use_pdl=dependent
    )


launch = start  # an object of its own
