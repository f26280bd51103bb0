"""The correction warpgroup at depth 256: rescales O where a row's maximum moved, and normalises it at the end.

Only then does it wait for the product before: most blocks pass with no look at O. But every block waits for the product
that used its stage of V before. It is done, as the scores behind it are; that it has also been signalled nothing says:
PTX orders the work of two commits, not their arrivals at two barriers. Without, a wait for the next phase of that
barrier might find the one before the last, which has the same parity, and pass at once. The verifier objects to it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100.fwd.correct import deliver, rescale
from jax_fa4.kernels.sm100.fwd.join import join
from jax_fa4.kernels.sm100.fwd.plan import GROUP
from jax_fa4.kernels.sm100.fwd.wide.softmax import EVEN, LAST
from jax_fa4.kernels.sm100.sync import after_wait, before_arrive


@cute.jit
def _shrink(ctx, thread, factor, done):
    """O *= factor, when the product before is done."""
    plan = ctx.plan
    wait(ctx.empty["v"], done)
    after_wait()
    rescale(ctx.tmem + plan.at("o", 0), plan.inner_value, thread, factor)


@cute.jit
def correct(ctx):
    plan, stats = ctx.plan, ctx.stats
    thread, warp = ctx.thread % GROUP, ctx.warp - plan.CORRECT
    done = start(0)  # the stage of V whose freeing says that O holds the block before
    own = step(start(1), plan.value_stages)  # that of this block, from block 1 on
    # The first block has nothing to rescale, and O is free: its product overwrites it. But only behind the statistics:
    # two blocks later softmax arrives at the same named barrier.
    cute.arch.barrier(barrier_id=EVEN + warp, number_of_threads=64)
    join(ctx, ctx.full["probs"])
    for i in cutlass.range(1, ctx.blocks, unroll=1):
        b = i & 1
        cute.arch.barrier(barrier_id=EVEN + 4 * b + warp, number_of_threads=64)
        factor = stats[b * GROUP + thread]
        wait(ctx.empty["v"], own)
        if const_expr(plan.lazy > 0):
            if cute.arch.vote_any_sync(factor < 1.0):
                _shrink(ctx, thread, factor, done)
        else:
            _shrink(ctx, thread, factor, done)
        before_arrive()
        join(ctx, ctx.full["probs"] + b)
        done, own = step(done, plan.value_stages), step(own, plan.value_stages)
    cute.arch.barrier(barrier_id=LAST + warp, number_of_threads=64)
    sums = (stats[2 * GROUP + thread], stats[3 * GROUP + thread])
    deliver(ctx, 0, thread, sums, (ctx.empty["v"] + done.index, done.phase))
    before_arrive()  # O has been read; the CTAs meet, and tensor memory goes
