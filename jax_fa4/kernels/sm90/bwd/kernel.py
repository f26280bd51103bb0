"""The main kernel of the Hopper backward (plain parameters in launch order), and the launch of all three.

bwd_pre --stats, zeroed work--> load warp --K, V once------> math warpgroups ------------> dK, dV
                                          --Q, stats--> [q] -->   |
                                          --dO-----> [dout] -->   +--> [dq] --> reduce warp --> work --> bwd_post --> dQ
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.copies import init_barriers, make_barriers, tensor_map
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.tiles import query_tiles, up
from jax_fa4.kernels.passes import bwd_pre
from jax_fa4.kernels.sm90.bwd import post
from jax_fa4.kernels.sm90.bwd.context import Context
from jax_fa4.kernels.sm90.bwd.grads import grads
from jax_fa4.kernels.sm90.bwd.load import load
from jax_fa4.kernels.sm90.bwd.plan import DS_BUFFERS, bind, section_of, sectioned
from jax_fa4.kernels.sm90.bwd.reduce import reduce
from jax_fa4.kernels.sm90.bwd.segments import narrow
from jax_fa4.kernels.sm90.wgmma import swizzled
from jax_fa4.mask import Band


def layout(plan, name, rows, stages):
    return swizzled(DTYPES[plan.dtype], rows, plan.depth_of(name), stages, plan.swizzle_of(name))


def shared_tensors(plan, memory):
    """The 16-bit tiles. dK and dV take K's and V's places."""
    dtype = DTYPES[plan.dtype]
    made = {}
    shapes = {"k": (plan.keys, 1), "v": (plan.keys, 1)}
    shapes |= {"q": (plan.rows, plan.query_stages), "dout": (plan.rows, plan.dout_stages)}
    for name, shape in shapes.items():
        form = layout(plan, name, *shape)
        made[name] = memory.allocate_tensor(dtype, form.outer, byte_alignment=1024, swizzle=form.inner)
    square = swizzled(dtype, plan.keys, plan.rows, DS_BUFFERS, 128)
    for name in ("ds", "p") if plan.split_depth else ("ds",):
        made[name] = memory.allocate_tensor(dtype, square.outer, byte_alignment=1024, swizzle=square.inner)
    return made


def example_band(ints, batch, queries, keys):
    """The run-time Band of one example, its lengths inside [0, T] and [0, S]."""
    at = VALUES.example(batch)
    q_len = cutlass.max(cutlass.min(ints[at + VALUES.q_len], queries), 0)
    kv_len = cutlass.max(cutlass.min(ints[at + VALUES.kv_len], keys), 0)
    return Band(ints[VALUES.left], ints[VALUES.right], ints[at + VALUES.offset], q_len, kv_len)


@cute.jit
def take(tickets, memory, index, plan: cutlass.Constexpr):
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
    ints: cute.Pointer,
    floats: cute.Pointer,
    q_segments,
    kv_segments,
    queries: Int32,
    keys: Int32,
    heads: Int32,
    kv_heads: Int32,
    tiles: Int32,
    plan: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    shared = shared_tensors(plan, memory)
    part = None
    if const_expr(not plan.direct):
        part = memory.allocate_array(Float32, plan.parts * plan.part_numbers, byte_alignment=128)
    held = memory.allocate_array(Float32, plan.query_stages * 2 * plan.rows, byte_alignment=128)
    full, empty = make_barriers(memory, plan.rings)
    if warp == 0:
        init_barriers(plan.rings, full, empty)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if const_expr(plan.dependent):  # one place for all threads: tickets, turns, statistics and workspace come after it
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    index = take(tickets, memory, cute.arch.block_idx()[0], plan)
    # Ordered: the last keys first, whose turn comes first. Else the first keys first: causal, they have most to do.
    key_tiles = up(keys, plan.keys)
    section = section_of(plan, tiles, key_tiles, heads // kv_heads, cutlass.max)
    batches = cute.arch.grid_dim()[0] // (key_tiles * kv_heads)
    tile, kv_head = sectioned(index, key_tiles, kv_heads * batches, section, plan.ordered, cutlass.min)
    batch, kv_head = kv_head // kv_heads, kv_head % kv_heads
    band = example_band(ints, batch, queries, keys)
    first, last = query_tiles(tile, (plan.rows, plan.keys), band, plan.band, cutlass.min, cutlass.max)
    first, last, segments = Int32(first), Int32(last), None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * queries, kv_segments + batch.to(Int64) * keys)
        if const_expr(not plan.ordered):  # ranks are counted by the band alone, so every tile of it takes its turn
            space = memory.allocate_array(Int32, plan.threads // 8)
            first, last = narrow(plan, tile, band, (first, last), segments, space)
    cap = None
    if const_expr(plan.soft_cap):
        limit = floats[VALUES.soft_cap]
        cap = (floats[VALUES.scale] / limit, limit)
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
        ds=shared["ds"],
        p=shared.get("p"),
        part=part,
        held=held,
        stats=stats,
        work=work,
        turns=turns,
        full=full,
        empty=empty,
    )
    if warp < 4:
        cute.arch.setmaxregister_decrease(plan.registers[0])
        if warp == 0:
            load(ctx)
        for n in cutlass.range_constexpr(plan.reducers):
            if warp == 1 + n:
                reduce(ctx, n)
    else:
        cute.arch.setmaxregister_increase(plan.registers[1])
        grads(ctx)


def launch(stream, plan, data, e):
    """data: pointers by buffer name; e: extents by symbol."""
    _, main, last = bind(plan, e, wide=lambda x: x.to(Int64))
    maps = []
    for d in main.descriptors:
        maps += tensor_map(d, data[d.tensor], cute.select(layout(plan, d.tensor, d.box[0], 1), [0, 1]))
    names = ("stats", "work", "turns", "tickets", "ints", "floats", "q_segments", "kv_segments")
    pointers = [data.get(name) for name in names]
    bwd_pre.start(stream, plan.pre, data, e)
    labelled(backward, plan)(*maps, *pointers, *[e[symbol] for symbol in main.extents], plan).launch(
        grid=main.grid, block=(main.block, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=main.dependent
    )
    post.start(stream, plan, data, last, e)
