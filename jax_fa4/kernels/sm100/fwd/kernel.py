"""The attention kernel, its parameters in launch order, and its launch. One CTA = two query tiles of one head.

load --Q0 Q1--> [q] --+                       +--[scores 0]--> softmax 0 --factor--> correct --O--> [final] --> store
     --K V K V> [kv] -+--> mma --S0 S1 (TMEM)-+--[scores 1]--> softmax 1 --factor-->   |  +-------> lse
edge --V's tail-> [edge] ^ ^                          |                                |
                           +---- [probs] P (3/4) -----+--- [rest] P (1/4)              |
                           +---- [probs] O rescaled -----------------------------------+
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.copies import init_barriers, make_barriers
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.common.tiles import up, work_item
from jax_fa4.kernels.sm100 import tmem as tensor_memory
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.fwd import operands
from jax_fa4.kernels.sm100.fwd.context import Context
from jax_fa4.kernels.sm100.fwd.correct import correct
from jax_fa4.kernels.sm100.fwd.edge import edge
from jax_fa4.kernels.sm100.fwd.load import load
from jax_fa4.kernels.sm100.fwd.mask import visited
from jax_fa4.kernels.sm100.fwd.mma import multiply
from jax_fa4.kernels.sm100.fwd.plan import bind
from jax_fa4.kernels.sm100.fwd.softmax import softmax
from jax_fa4.kernels.sm100.fwd.store import store
from jax_fa4.kernels.sm100.sync import meet
from jax_fa4.mask import Band

LOG2E = 1.4426950408889634
FREE = 9  # named barrier: correction has read O, tensor memory may go. 0 is the CTA's, 1-8 carry statistics


@cute.jit
def _values(plan: cutlass.Constexpr, ints, floats, batch, queries, keys):
    """(band of this example, factor to the exponent in tanh, factor to log2 units)."""
    mine = VALUES.example(batch)
    q_len = cutlass.max(cutlass.min(ints[mine + VALUES.q_len], queries), 0)
    kv_len = cutlass.max(cutlass.min(ints[mine + VALUES.kv_len], keys), 0)
    left, right, offset = None, None, None
    if const_expr(plan.band):
        left, right, offset = ints[VALUES.left], ints[VALUES.right], ints[mine + VALUES.offset]
    scale = floats[VALUES.scale] if const_expr(plan.baked_scale is None) else Float32(plan.baked_scale)
    before, after = None, scale * LOG2E
    if const_expr(plan.baked_scale is not None):
        after = Float32(plan.baked_scale * LOG2E)
    if const_expr(plan.soft_cap):
        cap = floats[VALUES.soft_cap]
        before, after = 2 * LOG2E * scale / cap, cap * LOG2E
    return Band(left, right, offset, q_len, kv_len), before, after


@cute.jit
def _multiply(ctx):
    """The MMA warp's role, and tensor memory back at the end. In a pair the leader's warp issues for both, and all
    warps of both CTAs meet before they leave: until then the other may need their memory and barriers."""
    if const_expr(not ctx.plan.pair):
        multiply(ctx)
        cute.arch.barrier(barrier_id=FREE, number_of_threads=160)
        cute.arch.dealloc_tmem(ctx.tmem, tensor_memory.COLUMNS)
    else:
        if ctx.rank == ctx.plan.leader:
            multiply(ctx)
        meet()
        cute.arch.dealloc_tmem(ctx.tmem, tensor_memory.COLUMNS, is_two_cta=True)


@cute.jit
def _leave(ctx):
    """The end of any other warp."""
    if const_expr(ctx.plan.pair):
        meet()


@cute.jit
def _play(ctx):
    """Each warp its role. Registers first: every warp of a warpgroup executes the same setmaxnreg."""
    plan = ctx.plan
    if ctx.warp >= plan.MMA:
        cute.arch.setmaxregister_decrease(plan.registers[2])
        if ctx.warp == plan.MMA:
            _multiply(ctx)
        elif ctx.warp == plan.LOAD:
            load(ctx)
            _leave(ctx)
        elif ctx.warp == plan.STORE:
            store(ctx)
            _leave(ctx)
        else:
            edge(ctx)
            _leave(ctx)
    elif ctx.warp >= plan.CORRECT:
        cute.arch.setmaxregister_decrease(plan.registers[1])
        correct(ctx)
        if const_expr(not plan.pair):
            cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=160)
        _leave(ctx)
    else:
        cute.arch.setmaxregister_increase(plan.registers[0])
        softmax(ctx)
        _leave(ctx)


@cute.kernel
def forward(
    q_atom: cute.CopyAtom,
    q: cute.Tensor,
    k_atom: cute.CopyAtom,
    k: cute.Tensor,
    v_atom: cute.CopyAtom,
    v: cute.Tensor,
    out_atom: cute.CopyAtom,
    out: cute.Tensor,
    lse: cute.Pointer,
    ints: cute.Pointer,
    floats: cute.Pointer,
    q_segments,
    kv_segments,
    sinks,
    queries: Int32,
    keys: Int32,
    heads: Int32,
    kv_heads: Int32,
    plan: cutlass.Constexpr,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    index, rank = cute.arch.block_idx()[0], None
    if const_expr(plan.pair):
        index, rank = index // 2, cute.arch.block_idx_in_cluster()
    tile, head, batch = work_item(index, up(queries, 2 * plan.rows), heads, plan.band)
    memory = SmemAllocator()
    queries_at = memory.allocate_array(Uint8, plan.query_bytes, byte_alignment=1024)
    keys_at = memory.allocate_array(Uint8, plan.stages * plan.stage_bytes, byte_alignment=1024)
    out_at = queries_at if const_expr(plan.out_over_q) else queries_at + 2 * plan.q_bytes
    places = {"q": queries_at, "k": keys_at, "v": keys_at, "out": out_at}
    shared = {name: operands.shared(plan, place, name) for name, place in places.items()}
    stats = memory.allocate_array(Float32, plan.stats_words)
    full, empty = make_barriers(memory, plan.rings)
    tmem_at = memory.allocate_array(Int32, 1)
    if warp == plan.LOAD:
        init_barriers(plan.rings, full, empty)
    if warp == plan.MMA:
        cute.arch.alloc_tmem(tensor_memory.COLUMNS, tmem_at, is_two_cta=plan.pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=plan.pair)
    cute.arch.mbarrier_init_fence()
    if const_expr(plan.pair):
        meet()
    else:
        cute.arch.barrier()
    band, before, scale = _values(plan, ints, floats, batch, queries, keys)
    segments, space = None, None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * queries, kv_segments + batch.to(Int64) * keys)
        # Aligned: the compiler reads it by 16 bytes, and past its end where it begins elsewhere.
        space = memory.allocate_array(Int32, plan.threads // 8, byte_alignment=16)
    last, blocks = visited(plan, tile, band, segments, space)
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        tile=tile,
        rank=rank,
        head=head,
        kv_head=head // (heads // kv_heads),
        batch=batch,
        last=last,
        blocks=blocks,
        queries=queries,
        keys=keys,
        band=band,
        before=before,
        scale=scale,
        sink=sinks[head] * LOG2E if const_expr(plan.sinks) else None,
        segments=segments,
        q=(q_atom, q, shared["q"]),
        k=(k_atom, k, shared["k"]),
        v=(v_atom, v, shared["v"]),
        out=(out_atom, out, shared["out"]),
        lse=lse + (batch.to(Int64) * heads + head) * queries,
        stats=stats,
        tmem=cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at),
        full=full,
        empty=empty,
    )
    _play(ctx)


def _atoms(plan, descriptors, data):
    """(copy atom, coordinate tensor) by tensor name."""
    bring, put = cpasync.CopyBulkTensorTileG2SOp(umma.group_of(plan.rows)), cpasync.CopyBulkTensorTileS2GOp()
    m, n, d, dv = plan.rows, plan.tile, plan.inner, plan.inner_value
    # Of a pair each CTA's box is its part of an operand: which, its slice of the product says.
    cluster = (plan.ctas, 1, 1, 1)
    atoms = {}
    for t in descriptors:
        tensor = cute.make_tensor(data[t.tensor], cute.make_layout(t.dims, stride=t.strides))
        if t.store:
            atoms[t.tensor] = cpasync.make_tiled_tma_atom(put, tensor, operands.one_tile("out", plan), t.box)
            continue
        stage = operands.one_tile(t.tensor, plan)
        if t.tensor == "q":
            made = cute.nvgpu.make_tiled_tma_atom_A(bring, tensor, stage, (m, n, d), operands.scores(plan), cluster)
        elif t.tensor == "k":
            made = cute.nvgpu.make_tiled_tma_atom_B(bring, tensor, stage, (m, n, d), operands.scores(plan), cluster)
        else:  # V^T as a view: (depth, keys, heads, batch)
            turned = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0, 2, 3]))
            made = cute.nvgpu.make_tiled_tma_atom_B(bring, turned, stage, (m, dv, n), operands.output(plan), cluster)
        atoms[t.tensor] = made
    return atoms


def launch(stream, plan, data, e):
    """Launches the call. data: device pointers by buffer name; e: extents by symbol, the DSL's Int32."""
    (main,) = bind(plan, e, wide=lambda x: x.to(Int64))
    tma = _atoms(plan, main.descriptors, data)
    maps = [part for name in ("q", "k", "v", "out") for part in tma[name]]
    pointers = [data.get(name) for name in ("lse", "ints", "floats", "q_segments", "kv_segments", "sinks")]
    labelled(forward, plan)(*maps, *pointers, *[e[symbol] for symbol in main.extents], plan).launch(
        grid=main.grid, block=(main.block, 1, 1), cluster=(main.cluster, 1, 1), stream=stream, min_blocks_per_mp=1
    )
