"""A twin of the Blackwell backward, with a band or not: a compute thread has 64 scores of one key, not 16 each of four.

So P and dS are written as rows. The prover cannot follow them as fragments from tensor memory into a product
("projection crosses independent read-result domains"). All else is the call's: loads, rings, products, descriptors,
regions, arithmetic, how dK and dV leave. Statistics then lie in the order of queries.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd import compute
from jax_fa4.kernels.sm100.bwd.compute import CHUNK, LOG2_E, WORD, differences, exponentials, piece, rounded, statistics
from jax_fa4.kernels.sm100.bwd.mask import covered, hide, limits
from jax_fa4.kernels.sm100.sync import arrive_warp, before_arrive


@cute.jit
def weigh(ctx, m, group, thread, stats_at, ids):
    """In place of `compute._weigh`: the thread's row of P^T, over its own scores."""
    plan = ctx.plan
    half = plan.tile // 2
    line = tmem.read(ctx.tmem + (plan.at("s") + half * group), half, thread)
    tmem.loaded()
    scale = ctx.scale * LOG2_E
    if const_expr(plan.band):
        if not covered(ctx, m):
            bounds = limits(ctx, ctx.tile * plan.tile + thread, m * plan.tile + half * group)
            for c in cutlass.range_constexpr(0, half, WORD):
                hide(plan, piece(line, c, WORD), c, bounds)
    for c in cutlass.range_constexpr(0, half, WORD):
        part, lse = piece(line, c, WORD), statistics(ctx, stats_at, 0, half * group + c)
        exponentials(part, lse, scale, part)
        _, words = rounded(plan, part)
        tmem.write(ctx.tmem + (plan.at("p0") + half * group + c // 2), words, thread)
    tmem.stored()
    before_arrive()
    arrive_warp(ctx.full["probs"])
    return line


@cute.jit
def differ(ctx, line, group, thread, stats_at):
    """In place of `compute._differ`: the thread's row of dS^T, over its own dP^T and in shared memory."""
    plan = ctx.plan
    half = plan.tile // 2
    chunks = cute.flat_divide(ctx.ds, (1, CHUNK))
    for c in cutlass.range_constexpr(0, half, WORD):
        slope = tmem.read(ctx.tmem + (plan.at("dp") + half * group + c), WORD, thread)
        delta = statistics(ctx, stats_at, 1, half * group + c)
        tmem.loaded()
        part = piece(line, c, WORD)
        differences(part, slope, delta)
        small, words = rounded(plan, part)
        tmem.write(ctx.tmem + (plan.at("ds0") + half * group + c // 2), words, thread)
        for j in cutlass.range_constexpr(0, WORD, CHUNK):
            source = cute.make_tensor(small.iterator + j, cute.make_layout((1, CHUNK)))
            cute.autovec_copy(source, chunks[None, None, thread, (half * group + c + j) // CHUNK])
    tmem.stored()
    before_arrive()
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive_warp(ctx.full["ds"])


def built(plan) -> str:
    """The twin's PTX."""
    from jax_fa4.ffi.compile import build

    assert not (plan.segments or plan.soft_cap), f"the twin has none of these: {plan}"
    before = compute._weigh, compute._differ
    compute._weigh, compute._differ = weigh, differ
    try:
        return (build(plan, keep_ptx=True).ptx or "").rstrip("\0")
    finally:
        compute._weigh, compute._differ = before
