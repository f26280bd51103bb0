"""The MMA warp: issues every product, and clears rows past a length before the first that reads them.

Skewed, so that the tensor pipe works while the compute warps do: S of the next step stands before dK and dQ of this
one, dP of the next behind them. Where tensor memory has no room for that, step after step.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.bwd import products
from jax_fa4.kernels.sm100.bwd.clear import clear
from jax_fa4.kernels.sm100.bwd.turns import after
from jax_fa4.kernels.sm100.sync import after_wait, commit


@cute.jit
def _clear_queries(ctx, shared, m):
    clear(ctx, shared, ctx.band.q_len, m * ctx.plan.tile, ctx.queries)


@cute.jit
def _clear_keys(ctx, shared):
    clear(ctx, shared[None, None, 0], ctx.band.kv_len, ctx.tile * ctx.plan.tile, ctx.keys)


def _fresh(plan, operand, n):
    """An operand's (base, offsets) of step n, which serial plans have computed anew in every step.

    With one stage of everything no descriptor changes, and ptxas keeps each step's of each product, 416 bytes of them
    in local memory (DSL 4.8.1, ptxas 13.4, 2026-11-30). That n >> 30 is 0 it cannot know.
    """
    base, offsets = operand
    return (base + (n >> 30), offsets) if plan.serial else operand


@cute.jit
def _squared(ctx, name: cutlass.Constexpr, a, b, barrier):
    """S^T or dP^T, a product over a depth of 128 keys by 128 queries."""
    plan = ctx.plan
    depth = plan.depth if const_expr(name == "s") else plan.value_depth
    to, idesc = (ctx.tmem + plan.at(name)).toint(), products.instruction(plan, plan.tile)
    umma.issue(to, a, b, idesc, umma.SHARED, (0, products.steps(depth)), 0, barrier)


@cute.jit
def _scores(ctx, m, at, n):
    """S^T = K Q^T of step n, query tile m."""
    plan = ctx.plan
    wait(ctx.full["q"], at)
    _clear_queries(ctx, ctx.q[2][None, None, at.index], m)
    k, q = products.rows(plan, ctx.k[2], 1, 0), products.rows(plan, ctx.q[2], plan.query_stages, at.index)
    _squared(ctx, "s", _fresh(plan, k, n), _fresh(plan, q, n), ctx.full["scores"])


@cute.jit
def _slopes(ctx, m, at, n):
    """dP^T = V dO^T of step n, query tile m. In a serial plan, where dV has been before, dO is free after it."""
    plan = ctx.plan
    if const_expr(not plan.serial):
        _take_dout(ctx, m, at)
    v, dout = products.rows(plan, ctx.v[2], 1, 0), products.rows(plan, ctx.dout[2], plan.dout_stages, at.index)
    _squared(ctx, "dp", _fresh(plan, v, n), _fresh(plan, dout, n), ctx.full["slopes"])
    if const_expr(plan.serial):
        commit(ctx.empty["dout"] + at.index)


@cute.jit
def _take_dout(ctx, m, at):
    """Waits for dO of query tile m."""
    wait(ctx.full["dout"], at)
    _clear_queries(ctx, ctx.dout[2][None, None, at.index], m)


@cute.jit
def _values(ctx, at, n):
    """dV += P^T dO of step n; frees dO, unless dP comes behind it."""
    plan = ctx.plan
    cute.arch.mbarrier_wait(ctx.full["probs"], n & 1)
    after_wait()
    p, dout = products.halves(plan, ctx.tmem, "p"), products.turned(plan, ctx.dout[2], plan.dout_stages, at.index)
    to, idesc = (ctx.tmem + plan.at("dv")).toint(), products.instruction(plan, plan.inner_value, True)
    free = None if const_expr(plan.serial) else ctx.empty["dout"] + at.index
    umma.issue(
        to, _fresh(plan, p, n), _fresh(plan, dout, n), idesc, umma.TENSOR, (0, products.steps(plan.tile)), n > 0, free
    )


@cute.jit
def _keys_queries(ctx, at, n):
    """dK += dS^T Q of step n, which frees Q, then dQ = dS K."""
    plan = ctx.plan
    cute.arch.mbarrier_wait(ctx.full["ds"], n & 1)
    after_wait()
    count = (0, products.steps(plan.tile))
    ds, q = products.halves(plan, ctx.tmem, "ds"), products.turned(plan, ctx.q[2], plan.query_stages, at.index)
    to, idesc = (ctx.tmem + plan.at("dk")).toint(), products.instruction(plan, plan.inner, True)
    umma.issue(to, _fresh(plan, ds, n), _fresh(plan, q, n), idesc, umma.TENSOR, count, n > 0, ctx.empty["q"] + at.index)
    if const_expr(plan.dq_apart):
        cute.arch.mbarrier_wait(ctx.empty["dq"], (n & 1) ^ 1)
        after_wait()
    ds, k = products.turned_square(plan, ctx.ds), products.turned(plan, ctx.k[2], 1, 0)
    to, idesc = (ctx.tmem + plan.at("dq")).toint(), products.instruction(plan, plan.inner, True, True)
    umma.issue(to, _fresh(plan, ds, n), _fresh(plan, k, n), idesc, umma.SHARED, count, 0, ctx.full["dq"])


@cute.jit
def _skewed(ctx, total):
    plan = ctx.plan
    q_at, dout_at, m = start(0), start(0), Int32(ctx.course.begin)
    wait(ctx.full["k"], start(0))
    _clear_keys(ctx, ctx.k[2])
    _scores(ctx, m, q_at, 0)
    wait(ctx.full["v"], start(0))
    _clear_keys(ctx, ctx.v[2])
    _slopes(ctx, m, dout_at, 0)
    _values(ctx, dout_at, 0)
    for n in cutlass.range(total - 1, unroll=1):
        m = after(ctx.course, m)
        next_q, dout_at = step(q_at, plan.query_stages), step(dout_at, plan.dout_stages)
        _scores(ctx, m, next_q, n + 1)
        _keys_queries(ctx, q_at, n)
        if const_expr(not plan.dq_apart):
            cute.arch.mbarrier_wait(ctx.empty["dq"], n & 1)
            after_wait()
        _slopes(ctx, m, dout_at, n + 1)
        _values(ctx, dout_at, n + 1)
        q_at = next_q
    _keys_queries(ctx, q_at, total - 1)


@cute.jit
def _serial(ctx, total):
    """S, dV, dP, dK, dQ; and the next S takes dQ's columns when these have been read."""
    plan = ctx.plan
    q_at, dout_at, m = start(0), start(0), Int32(ctx.course.begin)
    wait(ctx.full["k"], start(0))
    _clear_keys(ctx, ctx.k[2])
    for n in cutlass.range(total, unroll=1):
        cute.arch.mbarrier_wait(ctx.empty["dq"], (n & 1) ^ 1)
        after_wait()
        _scores(ctx, m, q_at, n)
        _take_dout(ctx, m, dout_at)
        _values(ctx, dout_at, n)
        if n == 0:
            wait(ctx.full["v"], start(0))
            _clear_keys(ctx, ctx.v[2])
        _slopes(ctx, m, dout_at, n)
        _keys_queries(ctx, q_at, n)
        q_at, dout_at = step(q_at, plan.query_stages), step(dout_at, plan.dout_stages)
        m = after(ctx.course, m)


@cute.jit
def multiply(ctx):
    total = ctx.group * (ctx.last - ctx.first)
    if total > 0:
        if const_expr(ctx.plan.serial):
            _serial(ctx, total)
        else:
            _skewed(ctx, total)
        commit(ctx.full["final"])
