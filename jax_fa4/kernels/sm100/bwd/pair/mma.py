"""The MMA warp of each CTA: what has landed is cleared past a length, and the leader's issues every product.

Both go through the same steps. The other CTA's warp waits for its own loads and for what its peer sends it, and tells
the leader, whose products read both CTAs' memory.

Skewed, so that the tensor pipe works while the compute warps do and while dS travels: S of the next step stands
before dK of this one, dP of the next before dQ of this one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm100 import umma
from jax_fa4.kernels.sm100.bwd.pair import products
from jax_fa4.kernels.sm100.bwd.pair.pipe import LEADER, arrive_leader, issue, wait_pair
from jax_fa4.kernels.sm100.bwd.pair.plan import INNER, WARP
from jax_fa4.kernels.sm100.sync import after_wait


@cute.jit
def _clear(ctx, shared, length, top, whole):
    """Zeroes the rows of a tile from `length` on, counted from `top`; past `whole` TMA read zeros already.

    What stands there may be anything: scores and weights of hidden pairs are 0, and 0 * NaN would reach the sums.
    """
    rest = length - top
    rows, columns = cute.size(shared, mode=[0]), cute.size(shared, mode=[1]) // 8
    if (rest < rows) & (length < whole):
        chunks = cute.flat_divide(shared, (1, 8))  # 16 bytes stay together in any swizzle
        zero = cute.make_rmem_tensor((1, 8), DTYPES[ctx.plan.dtype])
        zero.fill(0.0)
        begin = cutlass.max(rest, 0) * columns
        for n in cutlass.range(begin + ctx.thread % WARP, rows * columns, WARP, unroll=1):
            cute.autovec_copy(zero, chunks[None, None, n // columns, n % columns])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()


@cute.jit
def _tell(ctx, barrier):
    """Of the leader's barrier of that name: it is full here too."""
    if ctx.rank != LEADER:
        arrive_leader(barrier, True)


@cute.jit
def _keys(ctx, name: cutlass.Constexpr):
    """K, V or Kt is there. The leader hears of the other CTA's with the next tile of queries or of dS."""
    cute.arch.mbarrier_wait(ctx.full[name], 0)
    tile = ctx.pair if const_expr(name == "kt") else ctx.tile
    shared = ctx.maps[name][2][None, None, 0]
    _clear(ctx, shared, ctx.band.kv_len, tile * cute.size(shared, mode=[0]), ctx.keys)


@cute.jit
def _queries(ctx, name: cutlass.Constexpr, m, n):
    """A tile of Q or dO of step n, which is query tile m, is there; in the leader: in both CTAs."""
    plan = ctx.plan
    wait_pair(ctx.full[name], n & 1)
    shared = ctx.maps[name][2][None, None, 0]
    rows = cute.size(shared, mode=[0])
    top = m * plan.tile + (ctx.rank * rows if const_expr(rows < plan.tile) else 0)
    _clear(ctx, shared, ctx.band.q_len, top, ctx.queries)
    _tell(ctx, ctx.full[name])


@cute.jit
def _scores(ctx, m, n):
    """S^T = K Q^T of step n, over dQ of step n - 2, of which it waits for the reading."""
    plan = ctx.plan
    _queries(ctx, "q", m, n)
    if ctx.rank == LEADER:
        if n > 1:
            wait_pair(ctx.empty["dq"], n & 1)
        after_wait()
        k, q = products.rows(plan, ctx.maps["k"][2]), products.rows(plan, ctx.maps["q"][2])
        to, idesc = (ctx.tmem + plan.at("s")).toint(), products.instruction(plan, 2 * plan.tile, plan.tile)
        issue(to, k, q, idesc, umma.SHARED, products.steps(plan.depth), 0, ctx.full["scores"])


@cute.jit
def _slopes(ctx, m, n):
    """dP^T = V dO^T of step n, over dS^T of the step before, which dK has read on the same pipe."""
    plan = ctx.plan
    _queries(ctx, "dout", m, n)
    if ctx.rank == LEADER:
        v, dout = products.rows(plan, ctx.maps["v"][2]), products.rows(plan, ctx.maps["dout"][2])
        to, idesc = (ctx.tmem + plan.at("dp")).toint(), products.instruction(plan, 2 * plan.tile, plan.tile)
        issue(to, v, dout, idesc, umma.SHARED, products.steps(plan.value_depth), 0, ctx.full["slopes"])


@cute.jit
def _values(ctx, m, n):
    """dV += P^T dO of step n."""
    plan = ctx.plan
    _queries(ctx, "doutt", m, n)
    if ctx.rank == LEADER:
        wait_pair(ctx.full["probs"], n & 1)
        after_wait()
        p, dout = products.words(plan, ctx.tmem, "p"), products.turned(plan, ctx.maps["doutt"][2])
        to, idesc = (ctx.tmem + plan.at("dv")).toint(), products.instruction(plan, 2 * plan.tile, INNER, True)
        issue(to, p, dout, idesc, umma.TENSOR, products.steps(plan.tile), n > 0, ctx.empty["doutt"])


@cute.jit
def _dk(ctx, m, n):
    """dK += dS^T Q of step n."""
    plan = ctx.plan
    _queries(ctx, "qt", m, n)
    if ctx.rank == LEADER:
        wait_pair(ctx.full["ds"], n & 1)
        after_wait()
        ds, q = products.words(plan, ctx.tmem, "ds"), products.turned(plan, ctx.maps["qt"][2])
        to, idesc = (ctx.tmem + plan.at("dk")).toint(), products.instruction(plan, 2 * plan.tile, INNER, True)
        issue(to, ds, q, idesc, umma.TENSOR, products.steps(plan.tile), n > 0, ctx.empty["qt"])


@cute.jit
def _dq(ctx, n, more: cutlass.Constexpr):
    """dQ = dS K of step n, over the half of S^T's columns that P^T leaves. more: is there a step n + 1, whose S^T is
    there now?"""
    plan = ctx.plan
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ctx.full["trade"], plan.tile_bytes("parcel"))
    wait_pair(ctx.full["trade"], n & 1)
    _tell(ctx, ctx.full["trade"])
    if ctx.rank == LEADER:
        wait_pair(ctx.full["square"], n & 1)
        if const_expr(more):
            wait_pair(ctx.empty["scores"], (n + 1) & 1)
        elif n > 0:
            wait_pair(ctx.empty["dq"], (n + 1) & 1)  # of step n - 1, as the next S^T would have
        after_wait()
        ds, k = products.turned(plan, ctx.ds), products.turned(plan, ctx.maps["kt"][2])
        to, idesc = (ctx.tmem + plan.at("dq")).toint(), products.instruction(plan, plan.tile, INNER, True, True)
        issue(to, ds, k, idesc, umma.SHARED, products.steps(2 * plan.tile), 0, ctx.full["dq"])


@cute.jit
def multiply(ctx):
    total = ctx.group * (ctx.last - ctx.first)
    if total > 0:
        m = Int32(ctx.first)
        _keys(ctx, "k")
        _scores(ctx, m, Int32(0))
        _keys(ctx, "v")
        _slopes(ctx, m, Int32(0))
        if ctx.rank == LEADER:
            wait_pair(ctx.empty["scores"], 0)  # no product needs it, but phases are waited for one by one
        _values(ctx, m, Int32(0))
        for n in cutlass.range(total - 1, unroll=1):
            after = m + 1
            if after == ctx.last:
                after = Int32(ctx.first)
            _scores(ctx, after, n + 1)
            _dk(ctx, m, n)
            _slopes(ctx, after, n + 1)
            if n == 0:
                _keys(ctx, "kt")
            _dq(ctx, n, True)
            _values(ctx, after, n + 1)
            m = after
        _dk(ctx, m, total - 1)
        if total == 1:
            _keys(ctx, "kt")
        _dq(ctx, total - 1, False)
