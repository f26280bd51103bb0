"""out = A B^T, 256 x 128, by a pair of CTAs: each brings its rows of A and its half of B, all bytes count on the
leader's barrier, the leader issues for both, and its commits free stages and announce the result in both."""

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
from jax_fa4.kernels.sm100.sync import after_wait, before_arrive, meet
from micro.build import Micro

M, N, STEP, STAGES, BLOCK = 256, 128, 64, 2, 192  # warps 0-3 read, 4 multiplies, 5 loads
A_ROWS, B_ROWS = M // 2, N // 2  # of one CTA
BYTES = 2 * STEP * (A_ROWS + B_ROWS)
COLUMNS = 512  # all, so that the base is known to be 0 in both CTAs
LEADER = 0


def micro(steps):
    """steps: how many times STEP are multiplied; all that the tensors have."""
    k = STEP * steps
    maps = (Descriptor("a", (M, k), (k, 1), (A_ROWS, STEP)), Descriptor("b", (N, k), (k, 1), (B_ROWS, STEP)))
    return Micro(
        "pair",
        (Buffer("a", "bfloat16", (M, k)), Buffer("b", "bfloat16", (N, k))),
        (Buffer("out", "float32", (M, N), "out"),),
        Kernel(
            "pair", (2, 1, 1), BLOCK, maps, cluster=2, smem=STAGES * BYTES + 1024, pointers=("out",), extents=("n",)
        ),
        (("n", steps),),
    )


def product():
    return umma.product("bfloat16", M, N)


@cute.jit
def load(n, rank, a, b, full, empty):
    at = start(1)
    for i in cutlass.range(n, unroll=1):
        wait(empty, at)
        if rank == LEADER:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + at.index, 2 * BYTES)
        for atom, to, source in (a, b):
            cute.copy(atom, source[None, i], to[None, at.index], tma_bar_ptr=full + at.index)
        at = step(at, STAGES)
    for _ in cutlass.range(STAGES - 1, unroll=1):  # commits must not find this CTA gone; the last stage is not freed
        wait(empty, at)
        at = step(at, STAGES)


@cute.jit
def multiply(n, a, b, base, full, empty, done):
    mma, at = product(), start(0)
    for i in cutlass.range(n, unroll=1):
        left = umma.in_shared(mma.make_fragment_A(a)[None, None, None, at.index])
        right = umma.in_shared(mma.make_fragment_B(b)[None, None, None, at.index])
        wait(full, at)
        to, idesc = base.toint(), umma.instruction("bfloat16", M, N)
        last = STEP // umma.K_STEP - 1
        umma.issue(to, left, right, idesc, umma.SHARED, (0, last), i > 0, None)
        if i + 1 == n:  # in place of freeing the stage: two commits must not follow each other
            umma.issue(to, left, right, idesc, umma.SHARED, (last, last + 1), 1, done)
        else:
            umma.issue(to, left, right, idesc, umma.SHARED, (last, last + 1), 1, empty + at.index)
        at = step(at, STAGES)


@cute.kernel
def pair(
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
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
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
        cute.arch.alloc_tmem(COLUMNS, tmem_at, is_two_cta=True)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    cute.arch.mbarrier_init_fence()
    meet()
    base = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at)
    if warp == 5:
        mma, copies = product().get_slice(rank), []
        for atom, whole, shared, part, rows in (
            (a_atom, a, sa, mma.partition_A, M),
            (b_atom, b, sb, mma.partition_B, N),
        ):
            tiles = part(cute.local_tile(whole, (rows, STEP), (0, None)))
            to, source = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
            )
            copies.append((atom, to, source))
        load(n, rank, *copies, full, empty)
    elif warp == 4:
        if rank == LEADER:
            multiply(n, sa, sb, base, full, empty, done)
    else:
        cute.arch.mbarrier_wait(done, 0)
        after_wait()
        row = cute.make_tensor(out + (rank * A_ROWS + thread) * N, cute.make_layout(N))
        for c in cutlass.range_constexpr(0, N, 32):
            line = tmem.read(base + c, 32, thread)
            tmem.loaded()
            for j in cutlass.range_constexpr(32):
                row[c + j] = line[j]
        before_arrive()
    meet()
    if warp == 4:
        cute.arch.dealloc_tmem(base, COLUMNS, is_two_cta=True)


@cute.jit
def host(a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, n: Int32):
    forms = [
        make(product(), (M, N, STEP), BFloat16, STAGES)
        for make in (helpers.make_smem_layout_a, helpers.make_smem_layout_b)
    ]
    atoms = []
    makers = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)
    for pointer, form, make, rows in zip((a, b), forms, makers, (M, N), strict=True):
        whole = cute.make_tensor(pointer, cute.make_layout((rows, STEP * n), stride=(STEP * n, 1)))
        stage = cute.select(form, [0, 1, 2])
        op = cpasync.CopyBulkTensorTileG2SOp(umma.group_of(M))
        atoms += make(op, whole, stage, (M, N, STEP), product(), (2, 1, 1, 1))
    pair(*atoms, out, n, *forms).launch(grid=(2, 1, 1), block=(BLOCK, 1, 1), cluster=(2, 1, 1))
