"""The main kernel of the Blackwell backward, its parameters in launch order, and the launch of all three.

bwd_pre --stats, zeroed work
load --K, V once--------> mma --S^T [scores]--> compute --P^T [probs]--> mma --dV
     --Q [q], dO [dout]->     --dP^T [slopes]->         --dS  [ds]-----> mma --dK; dQ [dq]--> reduce --> work
     --stats------------------------------------^       --dK, dV
bwd_post: work --> dQ
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.copies import init_barriers, make_barriers, tensor_map
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.examples import example_band
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.segments import narrowed
from jax_fa4.kernels.common.tiles import query_tiles, sectioned, up, work_item
from jax_fa4.kernels.passes import bwd_pre
from jax_fa4.kernels.sm100 import tmem as tensor_memory
from jax_fa4.kernels.sm100.bwd import post, products
from jax_fa4.kernels.sm100.bwd.chain import range_of, ranges_of
from jax_fa4.kernels.sm100.bwd.compute import compute
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.load import load
from jax_fa4.kernels.sm100.bwd.mask import soft_cap
from jax_fa4.kernels.sm100.bwd.mma import multiply
from jax_fa4.kernels.sm100.bwd.order import among, course, placed, plain
from jax_fa4.kernels.sm100.bwd.plan import GROUP, SECTION, WARP, bind
from jax_fa4.kernels.sm100.bwd.reduce import reduce
from jax_fa4.kernels.sm100.registers import hold

FREE = 3  # named barrier: dK, dV and every dQ have been read, tensor memory may go
FREE_THREADS = 3 * GROUP + WARP


def _shared(plan, memory):
    """The 16-bit tiles. dK and dV take K's and V's places."""
    made = {}
    for name in ("k", "v", "q", "dout"):
        form = products.tiles(plan, plan.depth_of(name), plan.stages_of(name))
        made[name] = memory.allocate_tensor(DTYPES[plan.dtype], form.outer, byte_alignment=1024, swizzle=form.inner)
    form = products.tiles(plan, plan.tile, 1)
    ds = memory.allocate_tensor(DTYPES[plan.dtype], form.outer, byte_alignment=1024, swizzle=form.inner)
    return made, ds[None, None, 0]


@cute.jit
def _take(tickets, memory, index, plan: cutlass.Constexpr):
    """The CTA's place in the order of work: its id, or with `ordered` the order in which CTAs start.

    Whoever has an earlier turn has then started before, so that nobody waits for a CTA that waits for a free SM.
    """
    if const_expr(plan.ordered):
        ticket = memory.allocate_array(Int32, 1)
        if cute.arch.thread_idx()[0] == 0:
            ticket[0] = cute.arch.atomic_add(tickets.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.barrier()
        index = ticket[0]
    return index


def _work(plan, index, key_tiles, kv_heads):
    """(key tile, key head, example, rising) of a place in the order of work; the last see order.py.

    Without turns the first keys first: causal, they have most to do, and across the heads of a section, see
    plan.SECTION; without a mask head by head, whose queries stay in L2.
    """
    if const_expr(not (plan.ordered or plan.band)):
        return *work_item(index, key_tiles, kv_heads, False), 0
    lines, rising = cute.arch.grid_dim()[0] // key_tiles, 0
    if const_expr(plan.ordered):
        tile, line, rising = placed(index, key_tiles, lines, SECTION, plan.band, cutlass.min, cutlass.max)
    else:
        tile, line = sectioned(index, key_tiles, lines, SECTION, False, cutlass.min)
    return tile, line % kv_heads, line // kv_heads, rising


@cute.jit
def _play(ctx):
    """Each warp its role. Registers first: every warp of a warpgroup executes the same setmaxnreg."""
    plan = ctx.plan
    if ctx.warp >= plan.MMA:
        hold(plan.registers[2], plan.threads)
        if ctx.warp == plan.MMA:
            multiply(ctx)
            cute.arch.barrier(barrier_id=FREE, number_of_threads=FREE_THREADS)
            cute.arch.dealloc_tmem(ctx.tmem, tensor_memory.COLUMNS)
        elif ctx.warp == plan.LOAD:
            load(ctx)
    elif ctx.warp >= plan.COMPUTE:
        hold(plan.registers[1], plan.threads)
        compute(ctx)
        cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=FREE_THREADS)
    else:
        hold(plan.registers[0], plan.threads)
        reduce(ctx)
        cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=FREE_THREADS)


@cute.kernel
def backward(
    k_atom: cute.CopyAtom,
    k: cute.Tensor,
    v_atom: cute.CopyAtom,
    v: cute.Tensor,
    dk_atom: cute.CopyAtom,
    dk: cute.Tensor,
    dv_atom: cute.CopyAtom,
    dv: cute.Tensor,
    q_atom: cute.CopyAtom,
    q: cute.Tensor,
    dout_atom: cute.CopyAtom,
    dout: cute.Tensor,
    stats: cute.Pointer,
    work: cute.Pointer,
    turns,
    tickets,
    ranges,
    ints: cute.Pointer,
    floats: cute.Pointer,
    q_segments,
    kv_segments,
    queries: Int32,
    keys: Int32,
    heads: Int32,
    kv_heads: Int32,
    tiles: Int32,
    copies,
    plan: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    shared, ds = _shared(plan, memory)
    part = memory.allocate_array(Float32, plan.slices * plan.slice_numbers, byte_alignment=128)
    held = memory.allocate_array(Float32, 2 * 2 * plan.tile, byte_alignment=128)
    full, empty = make_barriers(memory, plan.rings)
    tmem_at = memory.allocate_array(Int32, 1)
    if warp == plan.LOAD:
        init_barriers(plan.rings, full, empty)
    if warp == plan.MMA:
        cute.arch.alloc_tmem(tensor_memory.COLUMNS, tmem_at)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if const_expr(plan.dependent):  # one place for all threads: tickets, turns, statistics and workspace come after it
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    index = _take(tickets, memory, cute.arch.block_idx()[0], plan)
    tile, kv_head, batch, rising = _work(plan, index, up(keys, plan.tile), kv_heads)
    band = example_band(ints, batch, queries, keys)
    first, last = query_tiles(tile, (plan.tile, plan.tile), band, plan.band, cutlass.min, cutlass.max)
    first, last, segments = Int32(first), Int32(last), None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * queries, kv_segments + batch.to(Int64) * keys)
        if const_expr(plan.narrows):
            space = memory.allocate_array(Int32, plan.threads // 8, byte_alignment=16)
            sizes, lengths = (plan.tile, plan.tile, plan.threads), (band.q_len, band.kv_len)
            first, last = narrowed(tile, (first, last), lengths, segments, space, sizes)
        if const_expr(plan.chained):
            ranges = ranges_of(ranges, batch, up(keys, plan.tile))
            first, last = range_of(ranges, tile)
    path = plain(first, last)
    if const_expr(plan.chained):
        sizes = (up(band.q_len, plan.tile), up(band.kv_len, plan.tile), copies)
        path = among(tile, (first, last), rising, sizes, plan.band, cutlass.min, cutlass.max)
    elif const_expr(plan.ordered):
        whole = up(band.kv_len, plan.tile)
        path = course(tile, (first, last), rising, (whole, copies), plan.band, cutlass.min, cutlass.max)
    cap = soft_cap(plan, floats)
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        tile=tile,
        kv_head=kv_head,
        batch=batch,
        heads=heads,
        group=heads // kv_heads,
        first=first,
        last=last,
        ranges=ranges,
        course=path,
        tiles=tiles,
        queries=queries,
        keys=keys,
        band=band,
        scale=floats[VALUES.scale],
        cap=cap,
        segments=segments,
        k=(k_atom, k, shared["k"]),
        v=(v_atom, v, shared["v"]),
        q=(q_atom, q, shared["q"]),
        dout=(dout_atom, dout, shared["dout"]),
        dk=(dk_atom, dk, shared["k"]),
        dv=(dv_atom, dv, shared["v"]),
        ds=ds,
        part=part,
        held=held,
        stats=stats,
        work=work,
        turns=turns,
        copies=copies,
        tmem=cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at),
        full=full,
        empty=empty,
    )
    _play(ctx)


def launch(stream, plan, data, e):
    """data: pointers by buffer name; e: extents by symbol."""
    _, main, last = bind(plan, e, wide=lambda x: x.to(Int64))
    maps = []
    for d in main.descriptors:
        maps += tensor_map(d, data[d.tensor], cute.select(products.tiles(plan, d.box[1], 1), [0, 1]))
    names = ("stats", "work", "turns", "tickets", "ranges", "ints", "floats", "q_segments", "kv_segments")
    pointers = [data.get(name) for name in names]
    bwd_pre.start(stream, plan.pre, data, e)
    sizes = [e[symbol] for symbol in main.extents] + [None] * (not plan.ordered)
    labelled(backward, plan)(*maps, *pointers, *sizes, plan).launch(
        grid=main.grid, block=(main.block, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=main.dependent
    )
    post.start(stream, plan, data, last, e)
