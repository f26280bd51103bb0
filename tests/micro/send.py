"""Two CTAs send each other rows through distributed shared memory, whose bytes count on a barrier of the receiver: word
by word with st.async, or in bulk. out[r, i] = 2 x[1 - r, i]. A place is free again when the receiver says so."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Kernel
from jax_fa4.kernels.common.ring import start, step
from jax_fa4.kernels.sm100.sync import meet, wait_pair
from micro.build import Micro

COLUMNS, STAGES, BLOCK, CTAS = 32, 2, 64, 2  # warp 0 sends, warp 1 receives
ROW_BYTES = 4 * COLUMNS
ST_ASYNC = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];"
BULK = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
ARRIVE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];"


def micro(rows, bulk=False):
    size = 4 * STAGES * ROW_BYTES + 1024
    kind = {"cluster": CTAS, "smem": size, "pointers": ("x", "out"), "extents": ("n",)}
    return Micro(
        "send",
        (Buffer("x", "float32", (CTAS, rows, COLUMNS)),),
        (Buffer("out", "float32", (CTAS, rows, COLUMNS), "out"),),
        Kernel("bulk" if bulk else "words", (CTAS, 1, 1), BLOCK, **kind),
        (("n", rows),),
        "host_bulk" if bulk else "host",
    )


@cute.jit
def send(n, peer, x, own, there, full, empty, bulk: cutlass.Constexpr):
    """own: places for rows on their way out. there: where the peer takes them, in this CTA's addresses."""
    at, thread = start(1), cute.arch.thread_idx()[0]
    for i in cutlass.range(n, unroll=1):
        wait_pair(empty + at.index, at.phase)
        value = x[i * COLUMNS + thread]
        to = cute.arch.map_dsmem_ptr(there + at.index * COLUMNS, peer).toint()
        barrier = cute.arch.map_dsmem_ptr(full + at.index, peer).toint()
        if const_expr(bulk):
            row = cute.make_tensor(own + at.index * COLUMNS, cute.make_layout(COLUMNS))
            row[thread] = value  # the copy that read this place is done: its bytes had come when the place was freed
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.inline_ptx(BULK, read_only_args=[to, row.iterator.toint(), Int32(ROW_BYTES), barrier])
        else:
            cute.arch.inline_ptx(ST_ASYNC, read_only_args=[to + 4 * thread, value, barrier])
        at = step(at, STAGES)


@cute.jit
def receive(n, peer, out, there, full, empty):
    at, thread = start(0), cute.arch.thread_idx()[0] % COLUMNS
    for i in cutlass.range(n, unroll=1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + at.index, ROW_BYTES)
        wait_pair(full + at.index, at.phase)
        out[i * COLUMNS + thread] = 2.0 * there[at.index * COLUMNS + thread]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.inline_ptx(ARRIVE, read_only_args=[cute.arch.map_dsmem_ptr(empty + at.index, peer).toint()])
        at = step(at, STAGES)


@cute.kernel
def exchange(x: cute.Pointer, out: cute.Pointer, n: Int32, bulk: cutlass.Constexpr):
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    memory = SmemAllocator()
    own, there = [memory.allocate_array(Float32, STAGES * COLUMNS, byte_alignment=128) for _ in range(2)]
    full, empty = memory.allocate_array(Int64, STAGES), memory.allocate_array(Int64, STAGES)
    if warp == 0:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, 1)
    cute.arch.mbarrier_init_fence()
    meet()
    rows = [cute.make_tensor(p + rank * n * COLUMNS, cute.make_layout(n * COLUMNS)) for p in (x, out)]
    if warp == 0:
        send(n, rank ^ 1, rows[0], own, there, full, empty, bulk)
    else:
        receive(n, rank ^ 1, rows[1], cute.make_tensor(there, cute.make_layout(STAGES * COLUMNS)), full, empty)
    meet()


@cute.jit
def host(x: cute.Pointer, out: cute.Pointer, n: Int32):
    exchange(x, out, n, False).launch(grid=(CTAS, 1, 1), block=(BLOCK, 1, 1), cluster=(CTAS, 1, 1))


@cute.jit
def host_bulk(x: cute.Pointer, out: cute.Pointer, n: Int32):
    exchange(x, out, n, True).launch(grid=(CTAS, 1, 1), block=(BLOCK, 1, 1), cluster=(CTAS, 1, 1))
