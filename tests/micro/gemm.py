"""out = A B^T, 128 x 128, on the forward's own helpers: a load warp, an MMA warp, a two-stage ring whose length is a
run-time number, an accumulator in tensor memory, rows read back by a warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers as helpers

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Descriptor, Kernel
from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100 import tmem, umma
from jax_fa4.kernels.sm100.sync import after_wait, before_arrive, commit
from micro.build import Micro

M, N, STEP, STAGES, BLOCK = 128, 128, 64, 2, 192  # warps 0-3 read, 4 multiplies, 5 loads
TILE_BYTES = 2 * 128 * STEP
COLUMNS = 128
READERS = 128 + 32


def micro(steps):
    """steps: how many times STEP are multiplied; all that the tensors have."""
    k = STEP * steps
    a, b = (Descriptor(name, (128, k), (k, 1), (128, STEP)) for name in "ab")
    return Micro(
        "gemm",
        (Buffer("a", "bfloat16", (M, k)), Buffer("b", "bfloat16", (N, k))),
        (Buffer("out", "float32", (M, N), "out"),),
        Kernel(
            "gemm", (1, 1, 1), BLOCK, (a, b), smem=2 * STAGES * TILE_BYTES + 1024, pointers=("out",), extents=("n",)
        ),
        (("n", steps),),
    )


def product():
    return umma.product("bfloat16", M, N)


@cute.jit
def load(n, a, b, full, empty):
    at = start(1)
    for i in cutlass.range(n, unroll=1):
        wait(empty, at)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + at.index, 2 * TILE_BYTES)
        for atom, to, source in (a, b):
            cute.copy(atom, source[None, i], to[None, at.index], tma_bar_ptr=full + at.index)
        at = step(at, STAGES)


@cute.jit
def multiply(n, a, b, base, full, empty, done):
    mma = product()
    at = start(0)
    for i in cutlass.range(n, unroll=1):
        left = umma.in_shared(mma.make_fragment_A(a)[None, None, None, at.index])
        right = umma.in_shared(mma.make_fragment_B(b)[None, None, None, at.index])
        wait(full, at)
        idesc = umma.instruction("bfloat16", M, N)
        to, steps = base.toint(), STEP // umma.K_STEP
        umma.issue(to, left, right, idesc, umma.SHARED, (0, steps), i > 0, empty + at.index)
        at = step(at, STAGES)
    commit(done)


@cute.kernel
def gemm(
    a_atom: cute.CopyAtom,
    a: cute.Tensor,
    b_atom: cute.CopyAtom,
    b: cute.Tensor,
    out: cute.Pointer,
    n: Int32,
    a_form: cute.ComposedLayout,
    b_form: cute.ComposedLayout,
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    sa, sb = [
        memory.allocate_tensor(BFloat16, form.outer, byte_alignment=1024, swizzle=form.inner)
        for form in (a_form, b_form)
    ]
    full, empty = memory.allocate_array(Int64, STAGES), memory.allocate_array(Int64, STAGES)
    done, tmem_at = memory.allocate_array(Int64, 1), memory.allocate_array(Int32, 1)
    if warp == 5:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, 1)
            cute.arch.mbarrier_init(done, 1)
    if warp == 4:
        cute.arch.alloc_tmem(COLUMNS, tmem_at)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    base = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at)
    if warp == 5:
        mma, copies = product().get_slice(0), []
        for atom, whole, shared, part in ((a_atom, a, sa, mma.partition_A), (b_atom, b, sb, mma.partition_B)):
            tiles = part(cute.local_tile(whole, (128, STEP), (0, None)))
            to, source = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
            )
            copies.append((atom, to, source))
        load(n, *copies, full, empty)
    elif warp == 4:
        multiply(n, sa, sb, base, full, empty, done)
        cute.arch.barrier(barrier_id=1, number_of_threads=READERS)
        cute.arch.dealloc_tmem(base, COLUMNS)
    else:
        cute.arch.mbarrier_wait(done, 0)
        after_wait()
        row = cute.make_tensor(out + thread * N, cute.make_layout(N))
        for c in cutlass.range_constexpr(0, N, 32):
            line = tmem.read(base + c, 32, thread)
            tmem.loaded()
            for j in cutlass.range_constexpr(32):
                row[c + j] = line[j]
        before_arrive()
        cute.arch.barrier_arrive(barrier_id=1, number_of_threads=READERS)


@cute.jit
def host(a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, n: Int32):
    forms = [
        make(product(), (M, N, STEP), BFloat16, STAGES)
        for make in (helpers.make_smem_layout_a, helpers.make_smem_layout_b)
    ]
    atoms = []
    makers = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)
    for pointer, form, make in zip((a, b), forms, makers, strict=True):
        whole = cute.make_tensor(pointer, cute.make_layout((128, STEP * n), stride=(STEP * n, 1)))
        stage = cute.select(form, [0, 1, 2])
        atoms += make(cpasync.CopyBulkTensorTileG2SOp(), whole, stage, (M, N, STEP), product())
    gemm(*atoms, out, n, *forms).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))
