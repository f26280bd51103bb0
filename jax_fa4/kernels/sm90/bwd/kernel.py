"""The main kernel of the Hopper backward (plain parameters in launch order), and the launch of all three.

bwd_pre --stats, zeroed work--> load warp --K, V once------> math warpgroups ------------> dK, dV
                                          --Q, stats--> [q] -->   |
                                          --dO-----> [dout] -->   +--> [dq] --> reduce warp --> work --> bwd_post --> dQ
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.copies import init_barriers, make_barriers, tensor_map
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.passes import bwd_pre
from jax_fa4.kernels.sm90.bwd import post
from jax_fa4.kernels.sm90.bwd.context import Context
from jax_fa4.kernels.sm90.bwd.finish import finish
from jax_fa4.kernels.sm90.bwd.items import placed
from jax_fa4.kernels.sm90.bwd.load import load_alone, load_items
from jax_fa4.kernels.sm90.bwd.math import math
from jax_fa4.kernels.sm90.bwd.plan import DONE, DS_BUFFERS, REACH, bind, section_of
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
    made["ds"] = memory.allocate_tensor(dtype, square.outer, byte_alignment=1024, swizzle=square.inner)
    return made


def shared_grads(plan, shared, part):
    """Where dK and dV stand on their way out: over K and V, or with workers where dQ does."""
    if not plan.workers:
        return {"dk": shared["k"], "dv": shared["v"]}
    form = layout(plan, "k", plan.keys, plan.parts * plan.places)
    here = cute.recast_ptr(part, form.inner, dtype=DTYPES[plan.dtype])
    return dict.fromkeys(("dk", "dv"), cute.make_tensor(here, form.outer))


@cute.jit
def ticket_of(tickets, memory, index, plan: cutlass.Constexpr):
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


def among_segments(ctx, memory, q_segments, kv_segments):
    """The context with its example's ids, and without query tiles that share none with the keys; see chain.py."""
    plan = ctx.plan
    q_segments, kv_segments = (
        q_segments + ctx.batch.to(Int64) * ctx.queries,
        kv_segments + ctx.batch.to(Int64) * ctx.keys,
    )
    first, last = ctx.first, ctx.last
    if const_expr(plan.chained):
        ranges = ctx.ranges + 2 * (ctx.batch * up(ctx.keys, plan.keys))
        first, last = ranges[2 * ctx.tile], ranges[2 * ctx.tile + 1]
        ctx = replace(ctx, ranges=ranges)
    else:
        space = memory.allocate_array(Int32, plan.threads // 8)
        first, last = narrow(plan, ctx.tile, ctx.band, (first, last), (q_segments, kv_segments), space)
    return replace(ctx, first=first, last=last, segments=(q_segments, kv_segments))


@cute.jit
def roles(ctx):
    """What each warp does."""
    if ctx.warp < 4:
        cute.arch.setmaxregister_decrease(ctx.plan.registers[0])
        if ctx.warp == 0:
            if const_expr(ctx.plan.workers > 0):
                load_items(ctx)
            else:
                load_alone(ctx)
        for n in cutlass.range_constexpr(ctx.plan.reducers):
            if ctx.warp == 1 + n:
                reduce(ctx, n)
        for n in cutlass.range_constexpr(ctx.plan.finishers):
            if ctx.warp == 1 + ctx.plan.reducers + n:
                finish(ctx, n)
    else:
        cute.arch.setmaxregister_increase(ctx.plan.registers[1])
        math(ctx)


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
    cleared,
    ranges,
    dq,
    ints: cute.Pointer,
    floats: cute.Pointer,
    q_segments,
    kv_segments,
    queries: Int32,
    keys: Int32,
    heads: Int32,
    kv_heads: Int32,
    tiles: Int32,
    batches: Int32,
    plan: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    shared = shared_tensors(plan, memory)
    part, weights = None, None
    if const_expr(not plan.direct):
        numbers = plan.parts * plan.part_numbers * len(plan.part_rings)
        part = memory.allocate_array(Float32, numbers, byte_alignment=1024)
    if const_expr(plan.apart):
        weights = memory.allocate_array(Float32, plan.keys * plan.rows, byte_alignment=128)
    shared |= shared_grads(plan, shared, part)
    sums = None
    if const_expr(plan.finishes):
        sums = memory.allocate_array(Float32, plan.part_numbers, byte_alignment=128)
    held = memory.allocate_array(Float32, plan.query_stages * 2 * plan.rows, byte_alignment=128)
    items = memory.allocate_array(Int32, 2 * plan.item_words) if const_expr(plan.workers > 0) else None
    done = memory.allocate_array(Int32, DONE) if const_expr(plan.finishes) else None
    full, empty = make_barriers(memory, plan.rings)
    if warp == 0:
        init_barriers(plan.rings, full, empty)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if const_expr(plan.dependent):  # one place for all threads: tickets, turns, statistics and workspace come after it
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    key_tiles = up(keys, plan.keys)
    cap = None
    if const_expr(plan.soft_cap):
        limit = floats[VALUES.soft_cap]
        cap = (floats[VALUES.scale] / limit, limit)
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        tile=Int32(0),
        kv_head=Int32(0),
        batch=Int32(0),
        heads=heads,
        group=heads // kv_heads,
        first=Int32(0),
        last=Int32(0),
        rising=Int32(0),
        tiles=tiles,
        queries=queries,
        keys=keys,
        band=Band(*[Int32(0)] * 5),
        scale=floats[VALUES.scale],
        cap=cap,
        segments=None,
        k=(k_atom, k, shared["k"]),
        v=(v_atom, v, shared["v"]),
        q=(q_atom, q, shared["q"]),
        dout=(dout_atom, dout, shared["dout"]),
        dk=(dk_atom, dk, shared["dk"]),
        dv=(dv_atom, dv, shared["dv"]),
        ds=shared["ds"],
        weights=weights,
        part=part,
        held=held,
        stats=stats,
        work=work,
        turns=turns,
        tickets=tickets,
        cleared=cleared,
        ranges=ranges,
        reach=memory.allocate_array(Int32, REACH * plan.reducers) if const_expr(plan.chained) else None,
        dq=dq,
        total=key_tiles * kv_heads * batches,
        section=section_of(plan, tiles, key_tiles, heads // kv_heads, cutlass.max),
        ends=(ints[VALUES.left], ints[VALUES.right]),
        ints=ints,
        items=items,
        done=done,
        sums=sums,
        full=full,
        empty=empty,
    )
    if const_expr(plan.workers == 0):
        ctx = placed(ctx, ticket_of(tickets, memory, cute.arch.block_idx()[0], plan))
        if const_expr(plan.segments):
            ctx = among_segments(ctx, memory, q_segments, kv_segments)
    roles(ctx)


def launch(stream, plan, data, e):
    """data: pointers by buffer name; e: extents by symbol."""
    _, main, *then = bind(plan, e, wide=lambda x: x.to(Int64))
    maps = []
    for d in main.descriptors:
        maps += tensor_map(d, data[d.tensor], cute.select(layout(plan, d.tensor, d.box[0], 1), [0, 1]))
    names = ("stats", "work", "turns", "tickets", "cleared", "ranges", "dq", "ints", "floats")
    names += ("q_segments", "kv_segments")
    pointers = [data[name] if name in main.pointers else None for name in names]
    bwd_pre.start(stream, plan.pre, data, e)
    labelled(backward, plan)(*maps, *pointers, *[e[symbol] for symbol in main.extents], plan).launch(
        grid=main.grid, block=(main.block, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=main.dependent
    )
    for last in then:
        post.start(stream, plan, data, last, e)
