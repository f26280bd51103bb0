"""Two CTAs share tiles of float32: each brings half of a tile and the copy puts it into both, in a ring whose stages
are free when both have read them. out[r, i]: the sum of tile i's rows, as CTA r finds it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Descriptor, Kernel
from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100.sync import arrive_warp, meet, wait_pair
from micro.build import Micro

ROWS, COLUMNS, STAGES, BLOCK, CTAS = 16, 32, 2, 64, 2  # warp 0 adds, warp 1 brings
TILE_BYTES = 4 * ROWS * COLUMNS


def micro(tiles):
    whole = (ROWS * tiles, COLUMNS)
    box = Descriptor("x", whole, (COLUMNS, 1), (ROWS // CTAS, COLUMNS))
    return Micro(
        "share",
        (Buffer("x", "float32", whole),),
        (Buffer("out", "float32", (CTAS, tiles, COLUMNS), "out"),),
        Kernel(
            "share",
            (CTAS, 1, 1),
            BLOCK,
            (box,),
            cluster=CTAS,
            smem=STAGES * TILE_BYTES + 1024,
            pointers=("out",),
            extents=("n",),
        ),
        (("n", tiles),),
    )


def layout(stages):
    return cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3),
        0,
        cute.make_layout((ROWS, COLUMNS, stages), stride=(COLUMNS, 1, ROWS * COLUMNS)),
    )


@cute.jit
def bring(n, copy, full, empty):
    atom, to, source = copy
    at = start(1)
    for i in cutlass.range(n, unroll=1):
        wait_pair(empty + at.index, at.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + at.index, TILE_BYTES)
        cute.copy(atom, source[None, i], to[None, at.index], tma_bar_ptr=full + at.index, mcast_mask=cutlass.Int16(3))
        at = step(at, STAGES)


@cute.jit
def add(n, tile, out, full, empty):
    at, thread = start(0), cute.arch.thread_idx()[0]
    for i in cutlass.range(n, unroll=1):
        wait(full, at)
        total = Float32(0.0)
        for row in cutlass.range_constexpr(ROWS):
            total = total + tile[row, thread, at.index]
        out[i * COLUMNS + thread] = total
        for rank in cutlass.range_constexpr(CTAS):
            arrive_warp(empty + at.index, rank, True)
        at = step(at, STAGES)


@cute.kernel
def share(x_atom: cute.CopyAtom, x: cute.Tensor, out: cute.Pointer, n: Int32):
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    memory, form = SmemAllocator(), layout(STAGES)
    tile = memory.allocate_tensor(Float32, form.outer, byte_alignment=1024, swizzle=form.inner)
    full, empty = memory.allocate_array(Int64, STAGES), memory.allocate_array(Int64, STAGES)
    if warp == 1:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, CTAS)
    cute.arch.mbarrier_init_fence()
    meet()
    if warp == 1:
        tiles = cute.local_tile(x, (ROWS, COLUMNS), (None, 0))
        to, source = cpasync.tma_partition(
            x_atom, rank, cute.make_layout(CTAS), cute.group_modes(tile, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        bring(n, (x_atom, to, source), full, empty)
    else:
        add(n, tile, cute.make_tensor(out + rank * n * COLUMNS, cute.make_layout(n * COLUMNS)), full, empty)
    meet()


@cute.jit
def host(x: cute.Pointer, out: cute.Pointer, n: Int32):
    whole = cute.make_tensor(x, cute.make_layout((ROWS * n, COLUMNS), stride=(COLUMNS, 1)))
    one = cute.make_composed_layout(layout(1).inner, 0, cute.select(layout(1).outer, [0, 1]))
    op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    atom, coords = cpasync.make_tiled_tma_atom(op, whole, one, (ROWS, COLUMNS), num_multicast=CTAS)
    share(atom, coords, out, n).launch(grid=(CTAS, 1, 1), block=(BLOCK, 1, 1), cluster=(CTAS, 1, 1))
