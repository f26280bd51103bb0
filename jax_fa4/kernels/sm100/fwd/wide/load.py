"""The load warp at depth 256: the query tile, then K through one ring and V through another, last block first."""

import cutlass
import cutlass.cute as cute

from jax_fa4.kernels.common.ring import start, step, wait
from jax_fa4.kernels.sm100.fwd import operands
from jax_fa4.kernels.sm100.fwd.load import fetch, tiles


@cute.jit
def load(ctx):
    plan, rank = ctx.plan, ctx.rank
    n, d, dv = plan.tile, plan.inner, plan.inner_value
    scores, output = operands.scores(plan).get_slice(rank), operands.output(plan).get_slice(rank)
    q = tiles(ctx.q, scores.partition_A, ctx.head, ctx.batch, (plan.rows, d), (None, 0))
    k = tiles(ctx.k, scores.partition_B, ctx.kv_head, ctx.batch, (n, d), (None, 0))
    v = tiles(ctx.v, output.partition_B, ctx.kv_head, ctx.batch, (dv, n), (0, None))
    k_at, v_at = start(1), start(1)
    for i in cutlass.range(ctx.blocks, unroll=1):
        which = ctx.last - 1 - i
        wait(ctx.empty["k"], k_at)
        fetch(rank, k, which, k_at.index, ctx.full["k"] + k_at.index, plan.key_bytes)
        if i == 0:
            fetch(rank, q, ctx.tile, 0, ctx.full["q"], plan.q_bytes)
        k_at = step(k_at, plan.stages)
        wait(ctx.empty["v"], v_at)
        fetch(rank, v, which, v_at.index, ctx.full["v"] + v_at.index, plan.value_bytes)
        v_at = step(v_at, plan.value_stages)
    # No signal of the leader may be under way to a CTA that has gone. The last K is not freed.
    for _ in cutlass.range(plan.stages - 1, unroll=1):
        wait(ctx.empty["k"], k_at)
        k_at = step(k_at, plan.stages)
    for _ in cutlass.range(plan.value_stages, unroll=1):
        wait(ctx.empty["v"], v_at)
        v_at = step(v_at, plan.value_stages)
