"""The math role's helpers around its loop: rows past a length cleared in shared memory, dK and dV stored."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common.copies import put, views
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.ring import arrive, step, wait

MATH_BARRIER = 1  # named barrier of the math warps
TURN_BARRIERS = 2  # the first of two: warpgroup 0 has laid down its dS; warpgroup 1 has
OWN_BARRIERS = 5  # the first of two: all four warps of that warpgroup have


def meet(plan):
    """All math warps; before it, what they wrote to shared memory becomes visible to bulk copies and wgmma."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=128 * plan.groups)


@cute.jit
def clear_rows(shared, rest, thread, plan: cutlass.Constexpr):
    """Zeroes the rows from `rest` on of a shared tile (rows, columns)."""
    rows, columns = cute.size(shared, mode=[0]), cute.size(shared, mode=[1]) // 8
    chunks = cute.flat_divide(shared, (1, 8))  # 16 bytes stay together in any swizzle
    zero = cute.make_rmem_tensor((1, 8), DTYPES[plan.dtype])
    zero.fill(0.0)
    begin = cutlass.max(rest, 0) * columns
    for n in cutlass.range(begin + thread, rows * columns, 128 * plan.groups, unroll=1):
        cute.autovec_copy(zero, chunks[None, None, n // columns, n % columns])


def lay_rounded(grad, mma, to, thread):
    """dK or dV from its accumulator to shared memory (keys, depth) in a 16-bit type."""
    dtype = to.element_type
    half = cute.make_rmem_tensor_like(grad, dtype)
    half.store(grad.load().to(dtype))
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    mine = cute.make_tiled_copy_C(matrix, mma).get_slice(thread)
    cute.copy(matrix, mine.retile(half), mine.partition_D(to))


@cute.jit
def hand_keys(ctx, h, at):
    """dK of the true scale and dV to the reduce warp, which stores them, through places of the ring dq, whose next one
    is returned: K and V make room for the next tile meanwhile."""
    plan = ctx.plan
    h.dk.store(h.dk.load() * ctx.scale)
    gone = 0
    for grad, mma, target in ((h.dk, h.dk_mma, ctx.dk), (h.dv, h.dv_mma, ctx.dv)):
        if const_expr(gone % plan.places == 0):
            wait(ctx.empty["dq"], at)
        lay_rounded(grad, mma, target[2][None, None, at.index * plan.places + gone % plan.places], h.thread)
        gone += 1
        if const_expr(gone % plan.places == 0):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            arrive(ctx.full["dq"], at)
            at = step(at, plan.parts)
    return at


@cute.jit
def store_keys(ctx, h):
    """dK of the true scale and dV, in the caller's dtype, over K's and V's places, then by TMA, clipped at S."""
    plan = ctx.plan
    h.dk.store(h.dk.load() * ctx.scale)
    cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=128 * plan.groups)  # the other may still read K for dQ
    for grad, mma, target in ((h.dk, h.dk_mma, ctx.dk), (h.dv, h.dv_mma, ctx.dv)):
        lay_rounded(grad, mma, target[2][None, None, 0], h.thread)
    meet(plan)
    if ctx.warp == 4:
        put(views(ctx.dk, (plan.keys, plan.inner), ctx.kv_head, ctx.batch), ctx.tile)
        put(views(ctx.dv, (plan.keys, plan.inner_value), ctx.kv_head, ctx.batch), ctx.tile)
