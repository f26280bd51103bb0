"""The MMA warp of each CTA of a sweep: what has landed is cleared past a length, and the leader's issues every product.

Both go through the same steps. The other CTA's warp waits for its own loads, and tells the leader, whose products read
both CTAs' memory.

Skewed, so that the tensor pipe works while the compute warps do: scores of the next step stand before the sum of this
one, dP of the next behind it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.ring import start, step
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.bwd.clear import clear
from jax_fa4.kernels.sm100.bwd.pair import products
from jax_fa4.kernels.sm100.bwd.pair.mma import tell
from jax_fa4.kernels.sm100.bwd.products import halves
from jax_fa4.kernels.sm100.sync import after_wait, wait_pair


@cute.jit
def _own(ctx, part: cutlass.Constexpr):
    """The CTA's rows are there. The leader hears of the other CTA's with the next tile of the other side."""
    cute.arch.mbarrier_wait(ctx.full[part], 0)
    length, whole = ctx.own
    clear(ctx, ctx.maps[part][2][None, None, 0], length, ctx.tile * ctx.plan.tile, whole)


@cute.jit
def _other(ctx, part: cutlass.Constexpr, m, at):
    """The other side's tile m is there as `part`; in the leader: in both CTAs. Gives it back."""
    plan = ctx.plan
    wait_pair(ctx.full[part] + at.index, at.phase)
    shared = ctx.maps[part][2][None, None, at.index]
    rows = cute.size(shared, mode=[0])
    top = m * plan.tile + (ctx.rank * rows if const_expr(rows < plan.tile) else 0)
    length, whole = ctx.other
    clear(ctx, shared, length, top, whole)
    tell(ctx, ctx.full[part] + at.index)
    return shared


@cute.jit
def _squared(ctx, name: cutlass.Constexpr, to, a, b, barrier):
    """Scores or dP, a product over a depth of the pair's 256 rows by 128 of the other side."""
    plan = ctx.plan
    depth = plan.value_depth if const_expr(name == "slope") else plan.depth
    a, b = products.rows(plan, a), products.rows(plan, b)
    idesc = products.instruction(plan, 2 * plan.tile, plan.tile)
    umma.issue(to.toint(), a, b, idesc, umma.SHARED, products.steps(depth), 0, barrier)


@cute.jit
def _scores(ctx, m, at, before):
    """Scores of a step with the other side's tile m. before: the step before it, or None."""
    plan = ctx.plan
    b = _other(ctx, "score_b", m, at)
    if ctx.rank == plan.leader:
        if const_expr(plan.slopes and before is not None):
            wait_pair(ctx.empty["scores"], before & 1)
        after_wait()
        to = ctx.tmem + (plan.at("s") + plan.tile * at.index)
        _squared(ctx, "score", to, ctx.maps["score_a"][2], b, ctx.full["scores"] + at.index)


@cute.jit
def _slopes(ctx, m, at):
    """dP of a step, over dS of the one before, which the sum has read on the same pipe."""
    plan = ctx.plan
    b = _other(ctx, "slope_b", m, at)
    if ctx.rank == plan.leader:
        _squared(ctx, "slope", ctx.tmem + plan.at("dp"), ctx.maps["slope_a"][2], b, ctx.full["slopes"])


@cute.jit
def _sum(ctx, m, at, n, barrier):
    """gradient += (P or dS) turned, of step n."""
    plan = ctx.plan
    b = _other(ctx, "turned", m, at)
    if ctx.rank == plan.leader:
        wait_pair(ctx.full["weights"] + at.index, at.phase)
        after_wait()
        a = halves(plan, ctx.tmem + plan.tile * at.index, "ds" if const_expr(plan.slopes) else "p")
        to = (ctx.tmem + plan.at(plan.gradient)).toint()
        idesc = products.instruction(plan, 2 * plan.tile, plan.width, True)
        turned = products.turned(plan, b)
        umma.issue(to, a, turned, idesc, umma.TENSOR, products.steps(plan.tile), n > 0, barrier)


@cute.jit
def multiply(ctx):
    plan = ctx.plan
    total = ctx.group * (ctx.last - ctx.first)
    if total > 0:
        m, at = Int32(ctx.first), start(0)
        _own(ctx, "score_a")
        _scores(ctx, m, at, None)
        if const_expr(plan.slopes):
            _own(ctx, "slope_a")
            _slopes(ctx, m, at)
        for n in cutlass.range(total - 1, unroll=1):
            after, then = m + 1, step(at, plan.places)
            if after == ctx.last:
                after = Int32(ctx.first)
            _scores(ctx, after, then, n)
            _sum(ctx, m, at, n, ctx.empty["turned"] + at.index)
            if const_expr(plan.slopes):
                _slopes(ctx, after, then)
            m, at = after, then
        _sum(ctx, m, at, total - 1, ctx.full["final"])
