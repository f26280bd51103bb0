"""The Hopper forward kernel (plain parameters in launch order) and its launch.

load warp --Q--> [q 1] --+
          --K--> [k 2] --+--> math warpgroups (64 queries each) --> out (TMA, over Q's place), lse
          --V--> [v 2] --+
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.copies import init_barriers, make_barriers, tensor_map
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.tiles import key_tiles, up, work_item
from jax_fa4.kernels.sm90.fwd.attend import attend
from jax_fa4.kernels.sm90.fwd.context import Context
from jax_fa4.kernels.sm90.fwd.load import load
from jax_fa4.kernels.sm90.fwd.plan import bind, swizzle_of
from jax_fa4.kernels.sm90.fwd.segments import narrow
from jax_fa4.kernels.sm90.rows import LOG2_E, power_of_two
from jax_fa4.kernels.sm90.wgmma import swizzled
from jax_fa4.mask import Band


def layout(plan, rows, depth, stages):
    return swizzled(DTYPES[plan.dtype], rows, depth, stages, swizzle_of(depth))


def shared_tensors(plan, memory):
    """q, k, v and out. O takes Q's place: every query has met its last key by then."""
    dtype = DTYPES[plan.dtype]
    place = memory.allocate_array(Uint8, plan.query_bytes, byte_alignment=1024)
    made = {}
    for name, depth in (("q", plan.inner), ("out", plan.inner_value)):
        form = layout(plan, plan.rows, depth, 1)
        made[name] = cute.make_tensor(cute.recast_ptr(place, form.inner, dtype=dtype), form.outer)
    for name, depth in (("k", plan.inner), ("v", plan.inner_value)):
        form = layout(plan, plan.keys, depth, plan.stages)
        made[name] = memory.allocate_tensor(dtype, form.outer, byte_alignment=1024, swizzle=form.inner)
    return made


def example_band(ints, batch, queries, keys):
    """The run-time Band of one example, its lengths inside [0, T] and [0, S]."""
    at = VALUES.example(batch)
    q_len = cutlass.max(cutlass.min(ints[at + VALUES.q_len], queries), 0)
    kv_len = cutlass.max(cutlass.min(ints[at + VALUES.kv_len], keys), 0)
    return Band(ints[VALUES.left], ints[VALUES.right], ints[at + VALUES.offset], q_len, kv_len)


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
    tile, head, batch = work_item(cute.arch.block_idx()[0], up(queries, plan.rows), heads, plan.band)
    memory = SmemAllocator()
    shared = shared_tensors(plan, memory)
    full, empty = make_barriers(memory, plan.rings)
    if warp == 0:
        init_barriers(plan.rings, full, empty)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    band = example_band(ints, batch, queries, keys)
    first, last = key_tiles(tile, (plan.rows, plan.keys), band, plan.band, cutlass.min, cutlass.max)
    first, last, segments = Int32(first), Int32(last), None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * queries, kv_segments + batch.to(Int64) * keys)
        first, last = narrow(plan, tile, band, (first, last), segments, memory.allocate_array(Int32, plan.threads // 8))
    scale, cap = floats[VALUES.scale], None
    if const_expr(plan.soft_cap):
        limit = floats[VALUES.soft_cap]
        scale, cap = cutlass.Float32(1.0), (scale / limit, limit)
    scale = scale * LOG2_E
    ctx = Context(
        plan=plan,
        warp=warp,
        thread=thread,
        tile=tile,
        head=head,
        kv_head=head // (heads // kv_heads),
        batch=batch,
        first=first,
        last=last,
        queries=queries,
        keys=keys,
        band=band,
        scale=(scale, power_of_two(scale)),
        cap=cap,
        sink=sinks[head] if const_expr(plan.sinks) else None,
        segments=segments,
        q=(q_atom, q, shared["q"]),
        k=(k_atom, k, shared["k"]),
        v=(v_atom, v, shared["v"]),
        out=(out_atom, out, shared["out"]),
        lse=lse + (batch.to(Int64) * heads + head) * queries,
        full=full,
        empty=empty,
    )
    if warp < 4:
        cute.arch.setmaxregister_decrease(plan.registers[0])
        if warp == 0:
            load(ctx)
    else:
        cute.arch.setmaxregister_increase(plan.registers[1])
        attend(ctx)


def launch(stream, plan, data, e):
    """data: pointers by buffer name; e: extents by symbol."""
    (main,) = bind(plan, e, wide=lambda x: x.to(Int64))
    maps = []
    for d in main.descriptors:
        maps += tensor_map(d, data[d.tensor], cute.select(layout(plan, *d.box, 1), [0, 1]))
    pointers = [data.get(name) for name in ("lse", "ints", "floats", "q_segments", "kv_segments", "sinks")]
    forward(*maps, *pointers, *[e[symbol] for symbol in main.extents], plan).launch(
        grid=main.grid, block=(main.block, 1, 1), stream=stream, min_blocks_per_mp=1
    )
