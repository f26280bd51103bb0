"""A 64 x 64 bf16 tile by TMA into swizzled shared memory, 3 x + 1 by threads, and back by TMA: both directions, the
barrier between them, the proxy fence before the store."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Descriptor, Kernel
from micro.build import Micro

N, BLOCK = 64, 128
BYTES = 2 * N * N
MICRO = Micro(
    "copy",
    (Buffer("x", "bfloat16", (N, N)),),
    (Buffer("y", "bfloat16", (N, N), "out"),),
    Kernel(
        "copy",
        (1, 1, 1),
        BLOCK,
        (Descriptor("x", (N, N), (N, 1), (N, N)), Descriptor("y", (N, N), (N, 1), (N, N), True)),
        smem=2 * BYTES + 1024,
    ),
)


def layout():
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (N, N), (0, 1))


@cute.kernel
def copy(x_atom: cute.CopyAtom, x: cute.Tensor, y_atom: cute.CopyAtom, y: cute.Tensor, form: cute.ComposedLayout):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    there, back = [
        memory.allocate_tensor(BFloat16, form.outer, byte_alignment=1024, swizzle=form.inner) for _ in range(2)
    ]
    full = memory.allocate_array(Int64, 1)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(full, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if warp == 0:
        to, source = cpasync.tma_partition(
            x_atom, 0, cute.make_layout(1), cute.group_modes(there, 0, 2), cute.group_modes(x, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, BYTES)
        cute.copy(x_atom, source, to, tma_bar_ptr=full)
    cute.arch.mbarrier_wait(full, 0)
    row = thread // 2
    for j in cutlass.range_constexpr(N // 2):
        column = thread % 2 * (N // 2) + j
        back[row, column] = (there[row, column].to(Float32) * 3.0 + 1.0).to(BFloat16)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    if warp == 0:
        source, to = cpasync.tma_partition(
            y_atom, 0, cute.make_layout(1), cute.group_modes(back, 0, 2), cute.group_modes(y, 0, 2)
        )
        with cute.arch.elect_one():
            cute.copy(y_atom, source, to)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def host(x: cute.Pointer, y: cute.Pointer):
    form, flat = layout(), cute.make_layout((N, N), stride=(N, 1))
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    x_atom, xs = cpasync.make_tiled_tma_atom(load, cute.make_tensor(x, flat), form, (N, N))
    y_atom, ys = cpasync.make_tiled_tma_atom(store, cute.make_tensor(y, flat), form, (N, N))
    copy(x_atom, xs, y_atom, ys, form).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))
