"""The MMA warp: issues every product.

The scores of block i + 1 are issued between the two P V of block i, so the softmax groups run half a period apart.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.ring import Place, start, step, wait
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.fwd import operands
from jax_fa4.kernels.sm100.sync import after_wait, commit, wait_pair


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
def _output(ctx, s: cutlass.Constexpr, at, round, adds, barrier):
    """O_s += P_s V, then a commit to `barrier`. The last quarter of P may still be on its way when the product starts.

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
    umma.issue(to, p, v, idesc, umma.TENSOR, (0, there), adds, barrier if plan.early == 4 else None)
    if const_expr(plan.early < 4):
        cute.arch.mbarrier_wait(ctx.full["rest"] + s, round & 1)
        after_wait()
        umma.issue(to, p, v, idesc, umma.TENSOR, (there, steps), 1, barrier)


def _fresh(at):
    """The same place, of which the compiler knows nothing.

    With two stages it finds out that K is always in stage 0, hoists every descriptor and address of every step out of
    the loop, and spills 352 bytes at depth 192 (0 with this; ptxas of DSL 4.8.1, 2026-11-29).
    """
    copy = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[at.index])
    return Place(copy, at.phase)


@cute.jit
def multiply(ctx):
    plan = ctx.plan
    full, empty = ctx.full["kv"], ctx.empty["kv"]
    at = start(0)
    wait(full, at)
    for s in cutlass.range_constexpr(2):
        cute.arch.mbarrier_wait(ctx.full["q"] + s, 0)
        _scores(ctx, s, at)
    if const_expr(not plan.pair):
        commit(empty + at.index)
    (wait_pair if plan.pair else cute.arch.mbarrier_wait)(
        ctx.full["edge"], 0
    )  # behind the scores of the first block, so it is not waited for
    for i in cutlass.range(ctx.blocks - 1, unroll=1):
        v = step(at, plan.stages)
        k = step(v, plan.stages)
        wait(full, v)
        for s in cutlass.range_constexpr(2):
            # A pair frees K behind the next product, as two commits must not follow each other: see umma.signal.
            free = (empty + v.index) if s else (empty + at.index if plan.pair else None)
            _output(ctx, s, v, i, i > 0, free)
            if const_expr(s == 0):
                wait(full, k)
            _scores(ctx, s, k)
        if const_expr(not plan.pair):
            commit(empty + k.index)
        at = _fresh(k)
    v = step(at, plan.stages)
    wait(full, v)
    for s in cutlass.range_constexpr(2):
        _output(ctx, s, v, ctx.blocks - 1, ctx.blocks > 1, ctx.full["acc"] + s)
