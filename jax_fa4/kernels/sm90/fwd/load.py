"""The producer: one warp brings Q once, then K and V tiles from the last to the first."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.common.copies import fetch, views
from jax_fa4.kernels.common.ring import Place, step, wait
from jax_fa4.kernels.sm90.fwd.told import tell


@cute.jit
def load(ctx, q_at: Place, at: Place):
    """Fills the rings for one query tile from the places on; returns the next of K and V.

    Q is brought even for a tile that sees no key: the math role awaits it. Rows of several heads it brings itself.
    """
    plan = ctx.plan
    k, v = plan.rings[-2:]
    copy_k = views(ctx.k, (plan.keys, plan.inner), ctx.kv_head, ctx.batch)
    copy_v = views(ctx.v, (plan.keys, plan.inner_value), ctx.kv_head, ctx.batch)
    if const_expr(not plan.packed):
        copy_q = views(ctx.q, (plan.rows, plan.inner), ctx.head, ctx.batch)
        if const_expr(plan.workers > 0):
            wait(ctx.empty["q"], q_at)
        if const_expr(plan.told):
            tell(ctx, q_at)
        fetch(copy_q, ctx.tile, ctx.full["q"], q_at, plan.rings[0].bytes)
    for n in cutlass.range(ctx.last - ctx.first, unroll=1):
        which = ctx.last - 1 - n
        wait(ctx.empty["k"], at)
        fetch(copy_k, which, ctx.full["k"], at, k.bytes)
        wait(ctx.empty["v"], at)
        fetch(copy_v, which, ctx.full["v"], at, v.bytes)
        at = step(at, plan.stages)
    return at
