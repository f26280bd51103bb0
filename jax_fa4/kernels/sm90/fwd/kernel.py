"""The Hopper forward kernel (plain parameters in launch order) and its launch.

load warp --Q--> [q 1] --+
          --K--> [k 2] --+--> math warpgroups (64 queries each) --> out (TMA, over Q's place), lse
          --V--> [v 2] --+
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.combine import combine
from jax_fa4.kernels.common.copies import init_barriers, make_barriers, settle, tensor_map
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.examples import example_band
from jax_fa4.kernels.common.parts import ITEM_BYTES, labelled
from jax_fa4.kernels.common.ring import start, step
from jax_fa4.kernels.common.segments import narrow
from jax_fa4.kernels.common.tiles import Order, deal_of, dealt, key_tiles, sectioned, share, turned, up, work_item
from jax_fa4.kernels.sm90.fwd.attend import attend
from jax_fa4.kernels.sm90.fwd.context import Context
from jax_fa4.kernels.sm90.fwd.load import load
from jax_fa4.kernels.sm90.fwd.plan import ITEM_WORDS, bind, swizzle_of
from jax_fa4.kernels.sm90.fwd.told import heard
from jax_fa4.kernels.sm90.rows import LOG2_E, power_of_two
from jax_fa4.kernels.sm90.wgmma import swizzled

FIRST_PARITY = {"load": 1, "math": 0}  # of a role's first waits
SECTION_BYTES = 24 << 20  # of K and V that are met together: half of the 50 MB of L2 of an H100 or H200
TAIL_BYTES = 36 << 20  # of those of a Deal's tail, which is soon over; with 24 shares are less even


def layout(plan, rows, depth, stages):
    return swizzled(DTYPES[plan.dtype], rows, depth, stages, swizzle_of(depth))


def shared_tensors(plan, memory):
    """q, k, v and out. O takes Q's place, as every query has met its last key by then; unless the next Q is there."""
    dtype = DTYPES[plan.dtype]
    place = memory.allocate_array(Uint8, plan.query_bytes, byte_alignment=1024)
    out = (plan.rows, 1, 0)  # rows of a stage, stages, where: in 16-bit columns of plan.rows rows
    if plan.workers:  # a stage for each warpgroup, behind the queries
        out = (64, plan.groups, plan.q_stages * plan.inner)
    made = {}
    for name, depth, (rows, stages, at) in (
        ("q", plan.inner, (plan.rows, plan.q_stages, 0)),
        ("out", plan.inner_value, out),
    ):
        form = layout(plan, rows, depth, stages)
        begin = place + ITEM_BYTES[plan.dtype] * plan.rows * at
        made[name] = cute.make_tensor(cute.recast_ptr(begin, form.inner, dtype=dtype), form.outer)
    for name, depth in (("k", plan.inner), ("v", plan.inner_value)):
        form = layout(plan, plan.keys, depth, plan.stages)
        made[name] = memory.allocate_tensor(dtype, form.outer, byte_alignment=1024, swizzle=form.inner)
    return made


def place(ctx, work, memory):
    """The context of one query tile; work: (tile, head, batch), memory: see `forward`."""
    plan, (tile, head, batch) = ctx.plan, work
    ints, lse, q_segments, kv_segments, sinks, space, (part, this, parts) = memory
    band = example_band(ints, batch, ctx.queries, ctx.keys)
    trip = key_tiles(tile, (plan.rows, plan.keys), band, plan.band, cutlass.min, cutlass.max, ctx.each)
    (first, last), segments = (Int32(x) for x in trip), None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * ctx.queries, kv_segments + batch.to(Int64) * ctx.keys)
        own = (tile * plan.rows, cutlass.min((tile + 1) * plan.rows, band.q_len))
        first, last = narrow((plan.threads, plan.keys), own, (first, last), band.kv_len, segments, space)
    line = batch.to(Int64) * ctx.lines + head
    if const_expr(not plan.hollow):
        # At least one tile, of which nothing is seen then: a branch around all of a tile's products makes ptxas keep
        # what their descriptors come from in a thread's registers, and move it before each wgmma.
        last = cutlass.max(last, first + 1)
    if const_expr(plan.splits):
        first, last = first + (last - first) * this // parts, first + (last - first) * (this + 1) // parts
        line = line + this.to(Int64) * ctx.lines * ctx.batches
        part = part + line * ctx.rows * plan.value_depth
    return replace(
        ctx,
        tile=tile,
        head=head,
        kv_head=head // ctx.group,
        batch=batch,
        first=first,
        last=last,
        band=band,
        sinks=sinks + head * ctx.each if const_expr(plan.sinks) else None,
        counted=this == 0 if const_expr(plan.splits) else True,
        segments=segments,
        lse=lse + line * ctx.rows,
        part=part,
    )


def lines_in(ctx, size):
    """Lines whose K and V are so many bytes together."""
    row = ITEM_BYTES[ctx.plan.dtype] * (ctx.plan.inner + ctx.plan.inner_value)
    return cutlass.max(size // row // ctx.keys, 1) * ctx.group


def item(ctx, index):
    """(tile, head, batch) of the index-th query tile of the call."""
    plan, tiles, lines = ctx.plan, up(ctx.rows, ctx.plan.rows), ctx.lines * ctx.batches
    if const_expr(plan.sections):
        tile, line = sectioned(index, tiles, lines, lines_in(ctx, SECTION_BYTES), plan.band, cutlass.min)
        return tile, line % ctx.lines, line // ctx.lines
    return work_item(index, tiles, ctx.lines, plan.band)


def meet(role, ctx, q_at, at):
    """One query tile from these places of the rings on; returns the next place in those of K and V."""
    return (load if role == "load" else attend)(ctx, q_at, at)


@cute.jit
def work(ctx, memory, role: cutlass.Constexpr):
    """A role's part of all query tiles of this CTA: places of the rings move on from one to the next."""
    plan = ctx.plan
    cta = cute.arch.block_idx()[0]
    q_at, at = start(FIRST_PARITY[role]), start(FIRST_PARITY[role])
    tiles, lines = up(ctx.rows, plan.rows), ctx.lines * ctx.batches
    tail = cutlass.min(lines_in(ctx, TAIL_BYTES), lines)
    section = lines_in(ctx, SECTION_BYTES) if plan.sections else None
    order = Order(tiles, lines, tail, ctx.rows // plan.rows, plan.band, section)
    deal = deal_of(order, plan.workers)
    ends = memory[0][VALUES.left], memory[0][VALUES.right]
    for n in cutlass.range(share(deal, cta, cutlass.min, cutlass.max), unroll=1):
        if const_expr(plan.told and role == "math"):
            one = heard(ctx, q_at, ends, (memory[1], memory[4]))
        else:
            tile, line = turned(order, deal, dealt(deal, cta, n, cutlass.min, cutlass.max), cutlass.min, cutlass.max)
            one = place(ctx, (tile, line % ctx.lines, line // ctx.lines), memory)
        at = meet(role, one, q_at, at)
        q_at = step(q_at, plan.q_stages)


@cute.kernel
def forward(
    q_atom,
    q,
    k_atom: cute.CopyAtom,
    k: cute.Tensor,
    v_atom: cute.CopyAtom,
    v: cute.Tensor,
    out_atom,
    out,
    q_rows,
    lse: cute.Pointer,
    ints: cute.Pointer,
    floats: cute.Pointer,
    q_segments,
    kv_segments,
    sinks,
    part,
    queries: Int32,
    keys: Int32,
    heads: Int32,
    kv_heads: Int32,
    batches: Int32,
    parts,
    plan: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    shared = shared_tensors(plan, memory)
    full, empty = make_barriers(memory, plan.rings)
    if warp == 0:
        init_barriers(plan.rings, full, empty)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    space = memory.allocate_array(Int32, plan.threads // 8) if const_expr(plan.segments) else None
    items = (
        memory.allocate_array(Int32, ITEM_WORDS * plan.q_stages, byte_alignment=16) if const_expr(plan.told) else None
    )
    scale, cap = floats[VALUES.scale], None
    if const_expr(plan.soft_cap):
        limit = floats[VALUES.soft_cap]
        scale, cap = cutlass.Float32(1.0), (scale / limit, limit)
    scale = scale * LOG2_E
    each = heads // kv_heads if const_expr(plan.packed) else 1
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        queries=queries,
        keys=keys,
        each=each,
        rows=queries * each,
        lines=kv_heads if const_expr(plan.packed) else heads,
        heads=heads,
        group=1 if const_expr(plan.packed) else heads // kv_heads,
        batches=batches,
        scale=(scale, power_of_two(scale)),
        cap=cap,
        q=(q_atom, q_rows if const_expr(plan.packed) else q, shared["q"]),
        k=(k_atom, k, shared["k"]),
        v=(v_atom, v, shared["v"]),
        out=(out_atom, out, shared["out"]),
        full=full,
        empty=empty,
        items=items,
    )
    index, this = cute.arch.block_idx()[0], None
    if const_expr(plan.splits):
        index, this = index // parts, index % parts
    pointers = (ints, lse, q_segments, kv_segments, sinks, space, (part, this, parts))
    if const_expr(plan.workers == 0):
        ctx = place(ctx, item(ctx, index), pointers)
    if warp < 4:
        cute.arch.setmaxregister_decrease(plan.registers[0])
        if warp == 0:
            if const_expr(plan.workers == 0):
                meet("load", ctx, start(1), start(1))
            else:
                work(ctx, pointers, "load")
    else:
        cute.arch.setmaxregister_increase(plan.registers[1])
        if const_expr(plan.workers == 0):
            meet("math", ctx, start(0), start(0))
        else:
            work(ctx, pointers, "math")
            if warp % 4 == 0:
                settle()  # shared memory is this CTA's until its last store has read it


def launch(stream, plan, data, e):
    """data: pointers by buffer name; e: extents by symbol."""
    main, *then = bind(plan, e, wide=lambda x: x.to(Int64))
    made = {
        d.tensor: tensor_map(d, data[d.tensor], cute.select(layout(plan, *d.box, 1), [0, 1])) for d in main.descriptors
    }
    maps = [x for name in ("q", "k", "v", "out") for x in made.get(name, (None, None))]
    pointers = [data["q"] if plan.packed else None, data["part_lse" if plan.splits else "lse"]]
    pointers += [data.get(name) for name in ("ints", "floats", "q_segments", "kv_segments", "sinks", "part")]
    sizes = [e[symbol] for symbol in main.extents] + [None] * (not plan.splits)
    # More than one CTA of an SM needs all of its shared memory; left out, the DSL asks a driver about it.
    several = {"preferred_smem_carveout": 100} if plan.blocks > 1 else {}
    labelled(forward, plan)(*maps, *pointers, *sizes, plan).launch(
        grid=main.grid, block=(main.block, 1, 1), stream=stream, min_blocks_per_mp=plan.blocks, **several
    )
    for last in then:
        labelled(combine, plan)(
            *[data[name] for name in last.pointers], *[e[symbol] for symbol in last.extents], plan
        ).launch(grid=last.grid, block=(last.block, 1, 1), stream=stream)
