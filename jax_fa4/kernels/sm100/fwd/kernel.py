"""The attention kernel, its parameters in launch order, and its launch. One CTA = two query tiles of one head.

load --Q0 Q1--> [q] --+                       +--[scores 0]--> softmax 0 --factor--> correct --O--> [final] --> store
     --K V K V> [kv] -+--> mma --S0 S1 (TMEM)-+--[scores 1]--> softmax 1 --factor-->   |  +-------> lse
edge --V's tail-> [edge] ^ ^                          |                                |
                           +---- [probs] P (3/4) -----+--- [rest] P (1/4)              |
                           +---- [probs] O rescaled -----------------------------------+
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa4.kernels.common.combine import combine
from jax_fa4.kernels.common.copies import init_barriers, make_barriers
from jax_fa4.kernels.common.parts import labelled
from jax_fa4.kernels.sm100 import tmem as tensor_memory
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.fwd import operands
from jax_fa4.kernels.sm100.fwd.context import Context
from jax_fa4.kernels.sm100.fwd.correct import correct
from jax_fa4.kernels.sm100.fwd.edge import edge
from jax_fa4.kernels.sm100.fwd.load import load
from jax_fa4.kernels.sm100.fwd.mma import multiply
from jax_fa4.kernels.sm100.fwd.plan import bind
from jax_fa4.kernels.sm100.fwd.softmax import softmax
from jax_fa4.kernels.sm100.fwd.store import store
from jax_fa4.kernels.sm100.fwd.wide.correct import correct as wide_correct
from jax_fa4.kernels.sm100.fwd.wide.load import load as wide_load
from jax_fa4.kernels.sm100.fwd.wide.mma import multiply as wide_multiply
from jax_fa4.kernels.sm100.fwd.wide.softmax import softmax as wide_softmax
from jax_fa4.kernels.sm100.fwd.work import place, scales, work
from jax_fa4.kernels.sm100.sync import meet

FREE = 9  # named barrier: correction has read O, tensor memory may go. 0 is the CTA's, 1-8 carry statistics


class Roles(NamedTuple):
    """What differs between kinds of plans."""

    load: Callable
    multiply: Callable
    softmax: Callable
    correct: Callable


TWO_TILES = Roles(load, multiply, softmax, correct)
ONE_TILE = Roles(wide_load, wide_multiply, wide_softmax, wide_correct)


def _roles(plan):
    return ONE_TILE if plan.queries == 1 else TWO_TILES


@cute.jit
def _role(ctx, given, role: cutlass.Constexpr):
    """A warp's role: of the one pair that `ctx` is of, or of all pairs of this CTA."""
    if const_expr(ctx.plan.workers > 0):
        work(ctx, given, role)
    else:
        role(ctx)


@cute.jit
def _multiply(ctx, given):
    """The MMA warp's role, and tensor memory back at the end. In a pair the leader's warp issues for both, and all
    warps of both CTAs meet before they leave: until then the other may need their memory and barriers."""
    if const_expr(not ctx.plan.pair):
        _role(ctx, given, _roles(ctx.plan).multiply)
        cute.arch.barrier(barrier_id=FREE, number_of_threads=160)
        cute.arch.dealloc_tmem(ctx.tmem, tensor_memory.COLUMNS)
    else:
        if ctx.rank == ctx.plan.leader:
            _role(ctx, given, _roles(ctx.plan).multiply)
        meet()
        cute.arch.dealloc_tmem(ctx.tmem, tensor_memory.COLUMNS, is_two_cta=True)


@cute.jit
def _leave(ctx):
    """The end of any other warp."""
    if const_expr(ctx.plan.pair):
        meet()


@cute.jit
def _play(ctx, given):
    """Each warp its role. Registers first: every warp of a warpgroup executes the same setmaxnreg."""
    plan = ctx.plan
    if ctx.warp >= plan.MMA:
        cute.arch.setmaxregister_decrease(plan.registers[2])
        if ctx.warp == plan.MMA:
            _multiply(ctx, given)
        elif ctx.warp == plan.LOAD:
            _role(ctx, given, _roles(plan).load)
            _leave(ctx)
        elif ctx.warp == plan.STORE:
            if const_expr(not plan.splits):
                _role(ctx, given, store)
            _leave(ctx)
        else:
            _role(ctx, given, edge)
            _leave(ctx)
    elif ctx.warp >= plan.CORRECT:
        cute.arch.setmaxregister_decrease(plan.registers[1])
        _role(ctx, given, _roles(plan).correct)
        if const_expr(not plan.pair):
            cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=160)
        _leave(ctx)
    else:
        cute.arch.setmaxregister_increase(plan.registers[0])
        _role(ctx, given, _roles(plan).softmax)
        _leave(ctx)


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
    index, rank = cute.arch.block_idx()[0], None
    if const_expr(plan.pair):
        index, rank = index // 2, cute.arch.block_idx_in_cluster()
    memory = SmemAllocator()
    queries_at = memory.allocate_array(Uint8, plan.query_bytes, byte_alignment=1024)
    keys_at = memory.allocate_array(Uint8, plan.kv_bytes, byte_alignment=1024)
    out_at = queries_at if const_expr(plan.out_over_q) else queries_at + 2 * plan.q_bytes
    places = {"q": queries_at, "k": keys_at, "v": keys_at + plan.value_place}
    places |= {} if plan.splits else {"out": out_at}
    places |= {"rows": queries_at} if plan.packed else {}
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
    # Aligned: the compiler reads it by 16 bytes, and past its end where it begins elsewhere.
    space = memory.allocate_array(Int32, plan.threads // 8, byte_alignment=16) if const_expr(plan.segments) else None
    before, scale = scales(plan, floats)
    each, lines, group = 1, heads, heads // kv_heads
    if const_expr(plan.packed):
        each, lines, group = group, kv_heads, 1
    this = None
    if const_expr(plan.splits):
        index, this = index // parts, index % parts
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        rank=rank,
        queries=queries,
        keys=keys,
        heads=heads,
        batches=batches,
        each=each,
        length=queries * each,
        lines=lines,
        group=group,
        before=before,
        scale=scale,
        sinks=sinks,
        q=(q_atom, q, shared["q"]),
        k=(k_atom, k, shared["k"]),
        v=(v_atom, v, shared["v"]),
        out=(out_atom, out, shared.get("out")),
        q_rows=(None, q_rows, shared.get("rows")),
        stats=stats,
        tmem=cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at),
        full=full,
        empty=empty,
    )
    given = (ints, q_segments, kv_segments, lse, space, (part, this, parts))
    if const_expr(plan.workers == 0):
        ctx = place(ctx, index, given)
    _play(ctx, given)


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
    main, *then = bind(plan, e, wide=lambda x: x.to(Int64))
    tma = _atoms(plan, main.descriptors, data)
    maps = [part for name in ("q", "k", "v", "out") for part in tma.get(name, (None, None))]
    pointers = [data["q"] if plan.packed else None, data["part_lse" if plan.splits else "lse"]]
    pointers += [data.get(name) for name in ("ints", "floats", "q_segments", "kv_segments", "sinks", "part")]
    sizes = [e[symbol] for symbol in main.extents] + [None] * (not plan.splits)
    labelled(forward, plan)(*maps, *pointers, *sizes, plan).launch(
        grid=main.grid, block=(main.block, 1, 1), cluster=(main.cluster, 1, 1), stream=stream, min_blocks_per_mp=1
    )
    for last in then:
        labelled(combine, plan)(
            *[data[name] for name in last.pointers], *[e[symbol] for symbol in last.extents], plan
        ).launch(grid=last.grid, block=(last.block, 1, 1), stream=stream)
