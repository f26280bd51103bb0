"""dQ of a query tile from a math warpgroup's registers on its way to the workspace."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.common.ring import Place, arrive, wait
from jax_fa4.kernels.sm90.bwd.plan import block_of


@cute.jit
def announce(ctx, at):
    """The reduce warp may take the part of dQ that was laid down at this place."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    arrive(ctx.full["dq"], at)


@cute.jit
def announce_older(ctx, at, laid):
    """`announce` of the place before `at`, if a part was laid down there and nobody was told."""
    if const_expr(ctx.plan.late):
        if laid:
            announce(ctx, Place(at.index ^ (ctx.plan.parts - 1), at.phase))


@cute.jit
def hand_over(ctx, h, at):
    """dQ registers to shared memory, for the reduce warp; 16 bytes a thread, conflict-free. With `late` it is told
    later: its fence waits until all is written, which takes 300 cycles beside products that read shared memory."""
    plan = ctx.plan
    chunks = cute.size(h.part) // 4
    wait(ctx.empty["dq"], at)
    group, thread = h.group, h.thread % 128
    place = at.index * plan.part_numbers + (block_of(plan, group, 0) * 128 + thread) * 4
    stride = 512 * (block_of(plan, 0, 1) - block_of(plan, 0, 0))
    to = cute.make_tensor((ctx.part + place).align(16), cute.make_layout((4, chunks), stride=(1, stride)))
    cute.autovec_copy(cute.make_tensor(h.part.iterator, cute.make_layout((4, chunks))), to)
    if const_expr(not plan.late):
        announce(ctx, at)


@cute.jit
def add_directly(ctx, h, tile):
    """dQ registers onto the workspace's `tile`, 16 bytes a thread, a warp's in one line of 512."""
    plan = ctx.plan
    four = cute.make_tensor(h.part.iterator, cute.make_layout((4, cute.size(h.part) // 4)))
    group, thread = h.group, h.thread % 128
    to = ctx.work + (tile * (plan.rows * plan.depth) + thread * 4)
    blocks = plan.rows * plan.depth // 512
    for chunk in cutlass.range_constexpr(cute.size(four, mode=[1])):
        block = block_of(plan, group, chunk)
        if const_expr(plan.depth == plan.inner) or block < blocks:
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[(to + block * 512).toint(), *(four[i, chunk] for i in range(4))],
            )


@cute.jit
def leave(ctx, h, at, tile):
    """This query tile's dQ on its way to the workspace's `tile`; `at`: a place of the ring dq, where there is one."""
    if const_expr(ctx.plan.direct):
        add_directly(ctx, h, tile)
    else:
        hand_over(ctx, h, at)
