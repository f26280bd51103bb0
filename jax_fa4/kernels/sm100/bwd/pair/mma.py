"""The MMA warp of each CTA: what has landed is cleared past a length, and the leader's issues every product.

Both go through the same steps. The other CTA's warp waits for its own loads and for what its peer sends it, and tells
the leader, whose products read both CTAs' memory.

Skewed, so that the tensor pipe works while the compute warps do and while dS travels: S of the next step stands
before dK of this one, dP of the next before dQ of this one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.bwd.clear import clear
from jax_fa4.kernels.sm100.bwd.pair import products
from jax_fa4.kernels.sm100.bwd.turns import after
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, wait_pair


@cute.jit
def tell(ctx, barrier):
    """Of the leader's barrier of that name: it is full here too."""
    if ctx.rank != ctx.plan.leader:
        arrive_warp(barrier, ctx.plan.leader, True)


@cute.jit
def _keys(ctx, name: cutlass.Constexpr):
    """K, V or Kt is there. The leader hears of the other CTA's with the next tile of queries or of dS."""
    cute.arch.mbarrier_wait(ctx.full[name], 0)
    tile = ctx.pair if const_expr(name == "kt") else ctx.tile
    shared = ctx.maps[name][2][None, None, 0]
    clear(ctx, shared, ctx.band.kv_len, tile * cute.size(shared, mode=[0]), ctx.keys)


@cute.jit
def _queries(ctx, name: cutlass.Constexpr, span, u):
    """A tile of Q or dO of part u, whose queries are span number `span`, is there; in the leader: in both CTAs."""
    plan = ctx.plan
    wait_pair(ctx.full[name], u & 1)
    shared = ctx.maps[name][2][None, None, 0]
    rows = cute.size(shared, mode=[0])
    top = span * plan.span + (ctx.rank * rows if const_expr(rows < plan.span) else 0)
    clear(ctx, shared, ctx.band.q_len, top, ctx.queries)
    tell(ctx, ctx.full[name])


@cute.jit
def _scores(ctx, span, u, n, late: cutlass.Constexpr):
    """S^T = K Q^T of part u. late: over dQ of the step before step n, of which it waits for the reading."""
    plan = ctx.plan
    _queries(ctx, "q", span, u)
    if ctx.rank == plan.leader:
        if const_expr(late):
            if n > 0:
                wait_pair(ctx.empty["dq"], (n & 1) ^ 1)
        after_wait()
        k, q = products.rows(plan, ctx.maps["k"][2]), products.rows(plan, ctx.maps["q"][2])
        to, idesc = (ctx.tmem + plan.at("s")).toint(), products.instruction(plan, 2 * plan.tile, plan.span)
        umma.issue(to, k, q, idesc, umma.SHARED, products.steps(plan.depth), 0, ctx.full["scores"])


@cute.jit
def _slopes(ctx, span, u):
    """dP^T = V dO^T of part u, over dS^T of the part before, which dK has read on the same pipe."""
    plan = ctx.plan
    _queries(ctx, "dout", span, u)
    if ctx.rank == plan.leader:
        v, dout = products.rows(plan, ctx.maps["v"][2]), products.rows(plan, ctx.maps["dout"][2])
        to, idesc = (ctx.tmem + plan.at("dp")).toint(), products.instruction(plan, 2 * plan.tile, plan.span)
        umma.issue(to, v, dout, idesc, umma.SHARED, products.steps(plan.value_depth), 0, ctx.full["slopes"])


@cute.jit
def _values(ctx, span, u):
    """dV += P^T dO of part u."""
    plan = ctx.plan
    _queries(ctx, "doutt", span, u)
    if ctx.rank == plan.leader:
        wait_pair(ctx.empty["scores"], u & 1)  # has passed when P is there, but phases are waited for one by one
        wait_pair(ctx.full["probs"], u & 1)
        after_wait()
        p, dout = products.words(plan, ctx.tmem, "p"), products.turned(plan, ctx.maps["doutt"][2])
        to, idesc = (
            (ctx.tmem + plan.at("dv")).toint(),
            products.instruction(plan, 2 * plan.tile, plan.inner_value, True),
        )
        umma.issue(to, p, dout, idesc, umma.TENSOR, products.steps(plan.span), u > 0, ctx.empty["doutt"])


@cute.jit
def _dk(ctx, span, u):
    """dK += dS^T Q of part u."""
    plan = ctx.plan
    _queries(ctx, "qt", span, u)
    if ctx.rank == plan.leader:
        wait_pair(ctx.full["ds"], u & 1)
        after_wait()
        ds, q = products.words(plan, ctx.tmem, "ds"), products.turned(plan, ctx.maps["qt"][2])
        to, idesc = (ctx.tmem + plan.at("dk")).toint(), products.instruction(plan, 2 * plan.tile, plan.inner, True)
        umma.issue(to, ds, q, idesc, umma.TENSOR, products.steps(plan.span), u > 0, ctx.empty["qt"])


@cute.jit
def _dq(ctx, n, more: cutlass.Constexpr):
    """dQ = dS K of step n, over the columns of S^T that P^T leaves. more: there is a part after it, whose S^T is there
    now: it must have been read."""
    plan = ctx.plan
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ctx.full["trade"], plan.tile_bytes("parcel"))
    wait_pair(ctx.full["trade"], n & 1)
    tell(ctx, ctx.full["trade"])
    if ctx.rank == plan.leader:
        wait_pair(ctx.full["square"], n & 1)
        if const_expr(more):
            wait_pair(ctx.empty["scores"], (plan.parts * (n + 1)) & 1)
        elif const_expr(plan.parts == 1):
            if n > 0:
                wait_pair(ctx.empty["dq"], (n & 1) ^ 1)  # of the step before, as the next S^T would have
        after_wait()
        ds, k = products.turned(plan, ctx.ds), products.turned(plan, ctx.maps["kt"][2])
        to, idesc = (ctx.tmem + plan.at("dq")).toint(), products.instruction(plan, plan.tile, plan.inner, True, True)
        umma.issue(to, ds, k, idesc, umma.SHARED, products.steps(2 * plan.tile), 0, ctx.full["dq"], True)


@cute.jit
def _step(ctx, m, then, n, more: cutlass.Constexpr):
    """What follows the first products of step n, which is query tile m; more: and those of step n + 1, tile `then`."""
    plan = ctx.plan
    for p in cutlass.range_constexpr(plan.parts):
        u, span = plan.parts * n + p, plan.parts * m + p
        last = p == plan.parts - 1
        goes_on = more or not last
        ahead = plan.parts * then if const_expr(last) else span + 1
        if const_expr(goes_on):
            _scores(ctx, ahead, u + 1, n, p == 0)
        _dk(ctx, span, u)
        if const_expr(goes_on):
            _slopes(ctx, ahead, u + 1)
        if const_expr(last):
            if n == 0:
                _keys(ctx, "kt")
            _dq(ctx, n, more)
        if const_expr(goes_on):
            _values(ctx, ahead, u + 1)


@cute.jit
def multiply(ctx):
    plan = ctx.plan
    total = ctx.group * (ctx.last - ctx.first)
    if total > 0:
        m = Int32(ctx.course.begin)
        _keys(ctx, "k")
        _scores(ctx, plan.parts * m, Int32(0), Int32(0), False)
        _keys(ctx, "v")
        _slopes(ctx, plan.parts * m, Int32(0))
        _values(ctx, plan.parts * m, Int32(0))
        for n in cutlass.range(total - 1, unroll=1):
            then = after(ctx.course, m)
            _step(ctx, m, then, n, True)
            m = then
        _step(ctx, m, m, total - 1, False)
