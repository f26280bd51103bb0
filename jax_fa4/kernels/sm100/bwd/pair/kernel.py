"""The main kernel of the Blackwell backward by pairs of CTAs, its parameters in launch order, and all three launches.

bwd_pre --stats, zeroed work
load --K, V, Kt once-----> mma --S^T [scores]--> compute --P^T [probs]--> mma --dV
     --Q, Qt, dO, dOt---->     --dP^T [slopes]->         --dS^T [ds]----> mma --dK
     --stats------------------------------------^        --dS [square, trade of the other CTA]--> mma
                               --dQ [dq]--> reduce --> work
bwd_post: work --> dQ

Each role runs in both CTAs; only the leader's mma issues, for both.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.copies import make_barriers, tensor_map
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.examples import example_band
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.segments import narrowed
from jax_fa4.kernels.common.tiles import query_tiles, up, work_item
from jax_fa4.kernels.passes import bwd_pre
from jax_fa4.kernels.sm100 import tmem as tensor_memory
from jax_fa4.kernels.sm100.bwd.mask import soft_cap
from jax_fa4.kernels.sm100.bwd.order import course, placed, plain
from jax_fa4.kernels.sm100.bwd.pair import post, products
from jax_fa4.kernels.sm100.bwd.pair.compute import compute
from jax_fa4.kernels.sm100.bwd.pair.context import Context
from jax_fa4.kernels.sm100.bwd.pair.load import load
from jax_fa4.kernels.sm100.bwd.pair.mma import multiply
from jax_fa4.kernels.sm100.bwd.pair.plan import LOADED, STORED, bind
from jax_fa4.kernels.sm100.bwd.pair.reduce import reduce
from jax_fa4.kernels.sm100.bwd.plan import SECTION
from jax_fa4.kernels.sm100.registers import hold
from jax_fa4.kernels.sm100.sync import meet


def _shared(plan, memory):
    """The 16-bit tiles by name."""
    made = {}
    for name, box in (plan.boxes | plan.squares).items():
        form = products.tiles(plan, box)
        made[name] = memory.allocate_tensor(DTYPES[plan.dtype], form.outer, byte_alignment=1024, swizzle=form.inner)
    return made


@cute.jit
def init_barriers(plan: cutlass.Constexpr, full, empty, rank):
    """By one warp of the CTA; the caller then fences and synchronises the cluster."""
    with cute.arch.elect_one():
        for ring in plan.rings:
            for stage in cutlass.range_constexpr(ring.stages):
                cute.arch.mbarrier_init(full[ring.name] + stage, plan.arrivals(ring, rank))
                if const_expr(ring.empty > 0):
                    cute.arch.mbarrier_init(empty[ring.name] + stage, ring.empty)


@cute.jit
def _take(tickets, ticket, rank, plan: cutlass.Constexpr):
    """Before the CTAs meet: the leader of an ordered plan draws the pair's place in the order of work."""
    if const_expr(plan.ordered):
        if (cute.arch.thread_idx()[0] == 0) & (rank == plan.leader):
            ticket[0] = cute.arch.atomic_add(tickets.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def _place(ticket, plan: cutlass.Constexpr):
    """The pair's place in the order of work: its id, or with `ordered` the order in which pairs start.

    Whoever has an earlier turn has then started before, so that nobody waits for a CTA that waits for a free SM.
    """
    if const_expr(plan.ordered):
        place = cute.arch.map_dsmem_ptr(ticket, plan.leader).toint()
        return cute.arch.inline_ptx(
            "ld.shared::cluster.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place]
        )
    return cute.arch.block_idx()[0] // 2


def _work(plan, index, key_tiles, kv_heads):
    """(tile of the pair, key head, example, rising) of a place in the order of work; the last see ../order.py.

    Without turns the first keys first: causal, they have most to do.
    """
    if const_expr(not plan.ordered):
        return *work_item(index, key_tiles, kv_heads, False), 0
    lines = cute.arch.grid_dim()[0] // plan.ctas // key_tiles
    tile, line, rising = placed(index, key_tiles, lines, SECTION, plan.band, cutlass.min, cutlass.max)
    return tile, line % kv_heads, line // kv_heads, rising


@cute.jit
def _play(ctx):
    """Each warp its role. Registers first: every warp of a warpgroup executes the same setmaxnreg."""
    plan = ctx.plan
    if ctx.warp >= plan.MMA:
        hold(plan.registers[2], plan.threads)
        if ctx.warp == plan.MMA:
            multiply(ctx)
        elif ctx.warp == plan.LOAD:
            load(ctx)
    elif ctx.warp >= plan.COMPUTE:
        hold(plan.registers[1], plan.threads)
        compute(ctx)
    else:
        hold(plan.registers[0], plan.threads)
        reduce(ctx)


@cute.kernel
def backward(
    k_atom: cute.CopyAtom,
    k: cute.Tensor,
    v_atom: cute.CopyAtom,
    v: cute.Tensor,
    kt_atom: cute.CopyAtom,
    kt: cute.Tensor,
    q_atom: cute.CopyAtom,
    q: cute.Tensor,
    dout_atom: cute.CopyAtom,
    dout: cute.Tensor,
    qt_atom: cute.CopyAtom,
    qt: cute.Tensor,
    doutt_atom: cute.CopyAtom,
    doutt: cute.Tensor,
    dk_atom: cute.CopyAtom,
    dk: cute.Tensor,
    dv_atom: cute.CopyAtom,
    dv: cute.Tensor,
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
    copies,
    plan: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    memory = SmemAllocator()
    shared = _shared(plan, memory)
    part = memory.allocate_array(Float32, plan.slices * plan.slice_numbers, byte_alignment=128)
    held = memory.allocate_array(Float32, 2 * 2 * plan.tile, byte_alignment=128)
    full, empty = make_barriers(memory, plan.rings)
    tmem_at = memory.allocate_array(Int32, 1)
    ticket = memory.allocate_array(Int32, 1) if const_expr(plan.ordered) else None
    if warp == plan.LOAD:
        init_barriers(plan, full, empty, rank)
    if warp == plan.MMA:
        cute.arch.alloc_tmem(tensor_memory.COLUMNS, tmem_at, is_two_cta=True)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    if const_expr(plan.dependent):  # one place for all threads: tickets, turns, statistics and workspace come after it
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    _take(tickets, ticket, rank, plan)
    cute.arch.mbarrier_init_fence()
    meet()
    pair, kv_head, batch, rising = _work(plan, _place(ticket, plan), up(keys, 2 * plan.tile), kv_heads)
    band = example_band(ints, batch, queries, keys)
    first, last = query_tiles(pair, (plan.tile, 2 * plan.tile), band, plan.band, cutlass.min, cutlass.max)
    first, last, segments = Int32(first), Int32(last), None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * queries, kv_segments + batch.to(Int64) * keys)
        if const_expr(plan.narrows):
            space = memory.allocate_array(Int32, plan.threads // 8, byte_alignment=16)
            sizes, lengths = (plan.tile, 2 * plan.tile, plan.threads), (band.q_len, band.kv_len)
            first, last = narrowed(pair, (first, last), lengths, segments, space, sizes)
    path = plain(first, last)
    if const_expr(plan.ordered):
        whole = up(band.kv_len, 2 * plan.tile)
        path = course(pair, (first, last), rising, (whole, copies), plan.band, cutlass.min, cutlass.max)
    cap = soft_cap(plan, floats)
    atoms = {"k": (k_atom, k), "v": (v_atom, v), "kt": (kt_atom, kt), "q": (q_atom, q), "dout": (dout_atom, dout)}
    atoms |= {"qt": (qt_atom, qt), "doutt": (doutt_atom, doutt), "dk": (dk_atom, dk), "dv": (dv_atom, dv)}
    maps = {name: (*pieces, shared[STORED.get(name, name)]) for name, pieces in atoms.items()}
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        rank=rank,
        pair=pair,
        tile=2 * pair + rank,
        kv_head=kv_head,
        batch=batch,
        heads=heads,
        group=heads // kv_heads,
        first=first,
        last=last,
        course=path,
        tiles=tiles,
        queries=queries,
        keys=keys,
        band=band,
        scale=floats[VALUES.scale],
        cap=cap,
        segments=segments,
        maps=maps,
        ds=shared["ds"][None, None, 0],
        parcel=shared["parcel"][None, None, 0],
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
    # Every read of tensor memory is over, and neither CTA needs the other's memory: its products' operands, barriers.
    meet()
    if warp == plan.MMA:
        cute.arch.dealloc_tmem(ctx.tmem, tensor_memory.COLUMNS, is_two_cta=True)


def launch(stream, plan, data, e):
    """data: pointers by buffer name; e: extents by symbol."""
    _, main, last = bind(plan, e, wide=lambda x: x.to(Int64))
    maps = []
    for d, name in zip(main.descriptors, (*LOADED, *STORED), strict=True):
        form = products.tiles(plan, plan.boxes[STORED.get(name, name)])
        maps += tensor_map(d, data[d.tensor], cute.select(form, [0, 1]))
    names = ("stats", "work", "turns", "tickets", "ints", "floats", "q_segments", "kv_segments")
    pointers = [data.get(name) for name in names]
    bwd_pre.start(stream, plan.pre, data, e)
    sizes = [e[symbol] for symbol in main.extents] + [None] * (not plan.ordered)
    labelled(backward, plan)(*maps, *pointers, *sizes, plan).launch(
        grid=main.grid,
        block=(main.block, 1, 1),
        cluster=(main.cluster, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=main.dependent,
    )
    post.start(stream, plan, data, last, e)
