"""The math role: the form of it that a plan has."""

import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.sm90.bwd.apart import grads_apart
from jax_fa4.kernels.sm90.bwd.grads import grads, grads_of_items


@cute.jit
def math(ctx):
    """dK and dV of the CTA's tiles of keys, and each query tile's share of dQ."""
    if const_expr(ctx.plan.apart):
        grads_apart(ctx)
    elif const_expr(ctx.plan.workers > 0):
        grads_of_items(ctx)
    else:
        grads(ctx)
