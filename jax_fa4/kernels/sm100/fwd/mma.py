"""The MMA warp: issues every product.

The scores of block i + 1 are issued between the two P V of block i, so the softmax groups run half a period apart.
The first query tile may start a block later than the second, and end some later: see mask.halves.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.common.ring import step, wait
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.fwd import operands
from jax_fa4.kernels.sm100.fwd.work import fresh, place_of
from jax_fa4.kernels.sm100.sync import after_wait, wait_pair


@cute.jit
def _scores(ctx, s: cutlass.Constexpr, at):
    """S_s = Q_s K^T."""
    plan = ctx.plan
    product = operands.scores(plan)
    q = umma.in_shared(product.make_fragment_A(ctx.q[2])[None, None, None, s])
    k = umma.in_shared(product.make_fragment_B(ctx.k[2])[None, None, None, at.index])
    idesc = umma.instruction(plan.dtype, plan.rows, plan.tile)
    to = (ctx.tmem + plan.at("s", s)).toint()
    umma.issue(to, q, k, idesc, umma.SHARED, (0, plan.inner // umma.K_STEP), 0, ctx.full["scores"] + s)


@cute.jit
def _output(ctx, s: cutlass.Constexpr, at, round, adds):
    """O_s += P_s V. The last quarter of P may still be on its way when the product starts.

    adds: whether O holds something already. The first product overwrites, so O is never cleared.
    """
    plan = ctx.plan
    product = operands.output(plan)
    v = umma.in_shared(product.make_fragment_B(ctx.v[2])[None, None, None, at.index])
    steps = plan.tile // umma.K_STEP
    p = umma.in_tensor(ctx.tmem + plan.at("p", s), steps)
    to, idesc = (
        (ctx.tmem + plan.at("o", s)).toint(),
        umma.instruction(plan.dtype, plan.rows, plan.inner_value, umma.MN_MAJOR),
    )
    there = steps * plan.early // 4
    cute.arch.mbarrier_wait(ctx.full["probs"] + s, round & 1)
    after_wait()
    umma.issue(to, p, v, idesc, umma.TENSOR, (0, there), adds, None)
    if const_expr(plan.early < 4):
        cute.arch.mbarrier_wait(ctx.full["rest"] + s, round & 1)
        after_wait()
        umma.issue(to, p, v, idesc, umma.TENSOR, (there, steps), 1, None)


@cute.jit
def _signal(ctx, barrier):
    """`barrier`, in each CTA of a pair, completes when every product that was issued so far has."""
    with cute.arch.elect_one():
        umma.signal(barrier, ctx.plan.ctas)


@cute.jit
def _free_queries(ctx):
    """The last product that reads Q is issued."""
    if const_expr(ctx.plan.workers > 0):
        for s in cutlass.range_constexpr(2):
            _signal(ctx, ctx.empty["q"] + s)


@cute.jit
def multiply(ctx):
    plan = ctx.plan
    full, empty = ctx.full["kv"], ctx.empty["kv"]
    blocks, lead, second = ctx.blocks, ctx.lead, ctx.blocks - ctx.trail
    at = place_of(ctx, 0, 0)
    wait(full, at)
    for s in cutlass.range_constexpr(2):
        cute.arch.mbarrier_wait(ctx.full["q"] + s, ctx.turn & 1)
        if const_expr(s == 1):
            _scores(ctx, s, at)
        elif lead == 0:
            _scores(ctx, s, at)
    if const_expr(not plan.pair):
        _signal(ctx, empty + at.index)
    if blocks == 1:
        _free_queries(ctx)
    # Behind the first scores, so it is not waited for.
    (wait_pair if plan.pair else cute.arch.mbarrier_wait)(ctx.full["edge"], ctx.turn & 1)
    for i in cutlass.range(blocks, unroll=1):
        v = step(at, plan.stages)
        k = step(v, plan.stages)
        more = i + 1 < blocks
        wait(full, v)
        if i >= lead:
            _output(ctx, 0, v, ctx.rounds[0] + i - lead, i > lead)
            if i + 1 == blocks:
                _signal(ctx, ctx.full["acc"])
        if more:
            if const_expr(plan.pair):  # behind a product, as two commits must not follow each other: see umma.signal
                _signal(ctx, empty + at.index)
            wait(full, k)
            _scores(ctx, 0, k)
        if i < second:
            _output(ctx, 1, v, ctx.rounds[1] + i, i > 0)
            if i + 1 == second:
                _signal(ctx, ctx.full["acc"] + 1)
        if more:
            _signal(ctx, empty + v.index)
            if i + 1 < second:
                _scores(ctx, 1, k)
            if const_expr(not plan.pair):
                _signal(ctx, empty + k.index)
            if i + 2 == blocks:
                _free_queries(ctx)
        elif const_expr(plan.workers > 0):
            _signal(ctx, empty + v.index)
        at = fresh(k)
    if const_expr(plan.workers > 0):
        # Not before: the edge warp's next wait is for a stage whose earlier phases, of equal parity, must be over.
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ctx.empty["edge"])
