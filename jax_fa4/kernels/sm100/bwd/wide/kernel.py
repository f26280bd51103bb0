"""The kernel of a sweep of the Blackwell backward at large depths, its parameters in order, and all four launches.

bwd_pre --stats
load --score_a once, score_b--> mma --scores--> compute --P [weights]--> mma     of dV
     --slope_a once, slope_b-->     --dP [slopes]-->    --dS [weights]-> mma     of dK and dQ
     --turned------------------>    --gradient [final]--> compute --> memory
     --stats (dV, dK)------------------------------->

Each role runs in both CTAs of a pair; only the leader's mma issues, for both.
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
from jax_fa4.kernels.common.segments import narrow, narrowed
from jax_fa4.kernels.common.tiles import key_tiles, query_tiles, sectioned, up, work_item
from jax_fa4.kernels.passes import bwd_pre
from jax_fa4.kernels.sm100 import tmem as tensor_memory
from jax_fa4.kernels.sm100.bwd.mask import soft_cap
from jax_fa4.kernels.sm100.bwd.pair import products
from jax_fa4.kernels.sm100.bwd.pair.kernel import init_barriers
from jax_fa4.kernels.sm100.bwd.plan import SECTION
from jax_fa4.kernels.sm100.bwd.wide.compute import compute
from jax_fa4.kernels.sm100.bwd.wide.context import Context
from jax_fa4.kernels.sm100.bwd.wide.load import load
from jax_fa4.kernels.sm100.bwd.wide.mma import multiply
from jax_fa4.kernels.sm100.bwd.wide.plan import bind
from jax_fa4.kernels.sm100.sync import meet


def _shared(plan, memory):
    """The 16-bit tiles by part. The gradient takes score_a's place, which is as large as the larger of them."""
    forms = {part: products.tiles(plan, box, plan.stages_of(part)) for part, box in plan.boxes.items()}
    larger, other = "score_a", "out"
    if plan.tile_bytes(larger) < plan.own_bytes:
        larger, other = other, larger
    made = {}
    for part, form in forms.items():
        if part != other:
            made[part] = memory.allocate_tensor(DTYPES[plan.dtype], form.outer, byte_alignment=1024, swizzle=form.inner)
    made[other] = cute.make_tensor(made[larger].iterator, forms[other].outer)
    return made


def _work(plan, index, tiles, heads):
    """(pair tile, head, example) of a place in the order of work; with a band the longest first, across the heads of a
    section: see bwd/plan.SECTION."""
    if const_expr(not plan.band):
        return work_item(index, tiles, heads, False)
    lines = cute.arch.grid_dim()[0] // (plan.ctas * tiles)
    tile, line = sectioned(index, tiles, lines, SECTION, plan.by_query, cutlass.min)
    return tile, line % heads, line // heads


@cute.jit
def _trip(plan: cutlass.Constexpr, pair, band, segments, space):
    """[first, last) of the other side's tiles that the pair's rows meet."""
    if const_expr(plan.by_query):
        rows = (plan.ctas * plan.tile, plan.tile)
        first, last = key_tiles(pair, rows, band, plan.band, cutlass.min, cutlass.max)
        first, last = Int32(first), Int32(last)
        if const_expr(plan.segments):
            own = (pair * rows[0], cutlass.min((pair + 1) * rows[0], band.q_len))
            first, last = narrow((plan.threads, plan.tile), own, (first, last), band.kv_len, segments, space)
        return first, last
    sizes = (plan.tile, plan.ctas * plan.tile)
    first, last = query_tiles(pair, sizes, band, plan.band, cutlass.min, cutlass.max)
    first, last = Int32(first), Int32(last)
    if const_expr(plan.segments):
        lengths = (band.q_len, band.kv_len)
        first, last = narrowed(pair, (first, last), lengths, segments, space, (*sizes, plan.threads))
    return first, last


@cute.jit
def _play(ctx):
    """Each warp its role. Registers first: every warp of a warpgroup executes the same setmaxnreg."""
    plan = ctx.plan
    if ctx.warp >= plan.MMA:
        cute.arch.setmaxregister_decrease(plan.registers[1])
        if ctx.warp == plan.MMA:
            multiply(ctx)
        elif ctx.warp == plan.LOAD:
            load(ctx)
    else:
        cute.arch.setmaxregister_increase(plan.registers[0])
        compute(ctx)


@cute.kernel
def sweep(
    score_a_atom: cute.CopyAtom,
    score_a: cute.Tensor,
    score_b_atom: cute.CopyAtom,
    score_b: cute.Tensor,
    slope_a_atom,
    slope_a,
    slope_b_atom,
    slope_b,
    turned_atom: cute.CopyAtom,
    turned: cute.Tensor,
    out_atom: cute.CopyAtom,
    out: cute.Tensor,
    stats: cute.Pointer,
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
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    memory = SmemAllocator()
    shared = _shared(plan, memory)
    held, space = None, None
    if const_expr(not plan.by_query):
        held = memory.allocate_array(Float32, 2 * 2 * plan.tile, byte_alignment=128)
    full, empty = make_barriers(memory, plan.rings)
    tmem_at = memory.allocate_array(Int32, 1)
    if const_expr(plan.segments):
        space = memory.allocate_array(Int32, plan.threads // 8, byte_alignment=16)
    if warp == plan.LOAD:
        init_barriers(plan, full, empty, rank)
    if warp == plan.MMA:
        cute.arch.alloc_tmem(tensor_memory.COLUMNS, tmem_at, is_two_cta=True)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    if const_expr(plan.dependent):  # one place for all threads: whatever is read of global memory comes after it
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    cute.arch.mbarrier_init_fence()
    meet()
    rows, lines = (queries, heads) if const_expr(plan.by_query) else (keys, kv_heads)
    index = cute.arch.block_idx()[0] // plan.ctas
    pair, head, batch = _work(plan, index, up(rows, plan.ctas * plan.tile), lines)
    band, segments = example_band(ints, batch, queries, keys), None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * queries, kv_segments + batch.to(Int64) * keys)
    first, last = _trip(plan, pair, band, segments, space)
    cap = soft_cap(plan, floats)
    own, other = (band.kv_len, keys), (band.q_len, queries)
    if const_expr(plan.by_query):
        own, other = other, own
    atoms = {"score_a": (score_a_atom, score_a), "score_b": (score_b_atom, score_b), "turned": (turned_atom, turned)}
    atoms |= {"slope_a": (slope_a_atom, slope_a), "slope_b": (slope_b_atom, slope_b), "out": (out_atom, out)}
    ratio = heads // kv_heads
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        rank=rank,
        tile=plan.ctas * pair + rank,
        head=head,
        batch=batch,
        heads=heads,
        ratio=ratio,
        group=Int32(1) if const_expr(plan.by_query) else ratio,
        first=first,
        last=last,
        tiles=tiles,
        queries=queries,
        keys=keys,
        band=band,
        own=own,
        other=other,
        scale=floats[VALUES.scale],
        cap=cap,
        segments=segments,
        maps={part: (*atoms[part], tile) for part, tile in shared.items()},
        held=held,
        stats=stats,
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
    _, *kernels = bind(plan, e, wide=lambda x: x.to(Int64))
    bwd_pre.start(stream, plan.pre, data, e)
    for one, kernel in zip(plan.sweeps, kernels, strict=True):
        maps = {}
        for part, d in zip((*one.operands, "out"), kernel.descriptors, strict=True):
            form = products.tiles(one, one.boxes[part])
            maps[part] = tensor_map(d, data[d.tensor], cute.select(form, [0, 1]))
        parts = ("score_a", "score_b", "slope_a", "slope_b", "turned", "out")
        given = [piece for part in parts for piece in maps.get(part, (None, None))]
        pointers = [data.get(name) for name in ("stats", "ints", "floats", "q_segments", "kv_segments")]
        labelled(sweep, one, one.gradient)(*given, *pointers, *[e[symbol] for symbol in kernel.extents], one).launch(
            grid=kernel.grid,
            block=(kernel.block, 1, 1),
            cluster=(kernel.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=kernel.dependent,
        )
