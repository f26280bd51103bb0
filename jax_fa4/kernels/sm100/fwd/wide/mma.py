"""The MMA warp at depth 256, of the CTA that leads the pair: the scores of the next block, then P V of this one.

So a block's softmax has the time of two products, and the tensor pipe always has one to do.
"""

import cutlass
import cutlass.cute as cute

from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.fwd import operands
from jax_fa4.kernels.sm100.fwd.work import fresh
from jax_fa4.kernels.sm100.sync import after_wait, wait_pair


@cute.jit
def _scores(ctx, block, at):
    """S of that block = Q K^T. Even and odd blocks have their own columns."""
    plan = ctx.plan
    product, b = operands.scores(plan), block & 1
    q = umma.in_shared(product.make_fragment_A(ctx.q[2])[None, None, None, 0])
    k = umma.in_shared(product.make_fragment_B(ctx.k[2])[None, None, None, at.index])
    idesc = umma.instruction(plan.dtype, plan.rows, plan.tile)
    wait(ctx.full["k"], at)
    to = (ctx.tmem + plan.at("s", b)).toint()
    umma.issue(to, q, k, idesc, umma.SHARED, (0, plan.inner // umma.K_STEP), 0, ctx.full["scores"] + b)


@cute.jit
def _output(ctx, block, at, frees):
    """O += P V of that block. The first part of P frees K, by a commit to `frees`; the second V.

    Each commit has a product of its own, see umma.signal. The first block overwrites, so O is never cleared.
    """
    plan = ctx.plan
    product, b, phase = operands.output(plan), block & 1, block >> 1 & 1
    v = umma.in_shared(product.make_fragment_B(ctx.v[2])[None, None, None, at.index])
    steps = plan.tile // umma.K_STEP
    p = umma.in_tensor(ctx.tmem + plan.at("p", b), steps)
    idesc = umma.instruction(plan.dtype, plan.rows, plan.inner_value, umma.MN_MAJOR)
    to, there = (ctx.tmem + plan.at("o", 0)).toint(), steps * plan.early // 4
    wait(ctx.full["v"], at)
    cute.arch.mbarrier_wait(ctx.full["probs"] + b, phase)
    after_wait()
    umma.issue(to, p, v, idesc, umma.TENSOR, (0, there), block > 0, frees)
    cute.arch.mbarrier_wait(ctx.full["rest"] + b, phase)
    after_wait()
    umma.issue(to, p, v, idesc, umma.TENSOR, (there, steps), 1, ctx.empty["v"] + at.index)


@cute.jit
def multiply(ctx):
    plan = ctx.plan
    k, v = start(0), start(0)
    cute.arch.mbarrier_wait(ctx.full["q"], 0)
    _scores(ctx, 0, k)
    wait_pair(ctx.full["edge"], 0)  # behind the first scores, so it is not waited for
    after_wait()
    for i in cutlass.range(ctx.blocks - 1, unroll=1):
        freed = ctx.empty["k"] + k.index
        k = fresh(step(k, plan.stages))
        _scores(ctx, i + 1, k)
        _output(ctx, i, v, freed)
        v = fresh(step(v, plan.value_stages))
    _output(ctx, ctx.blocks - 1, v, None)
