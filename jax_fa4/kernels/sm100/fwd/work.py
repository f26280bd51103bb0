"""Which pairs of query tiles a CTA takes, in which order, and what its roles must know of the earlier ones.

Signals alternate in parity, and stages come round, across all pairs of a CTA. So every role counts what came before its
pair (`turn`, `uses`, `rounds`) in the one loop below, and no role moves state of its own from one pair to the next.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels.common.examples import example_band
from jax_fa4.kernels.common.parts import ITEM_BYTES
from jax_fa4.kernels.common.ring import Place
from jax_fa4.kernels.common.tiles import sectioned, up, work_item
from jax_fa4.kernels.sm100.fwd.mask import halves, visited

SECTION_BYTES = 60 << 20  # of K and V that are met together: half of the 126 MB of L2 of a B200


def item(ctx, index):
    """(pair of tiles, line, batch) of the index-th pair of the call."""
    plan, tiles, heads = ctx.plan, up(ctx.length, ctx.plan.span), ctx.lines
    if const_expr(plan.sections):
        line_bytes = ITEM_BYTES[plan.dtype] * (plan.inner + plan.inner_value)
        kept = cutlass.max(SECTION_BYTES // line_bytes // ctx.keys, 1)  # key heads; never 2^31 bytes
        lines = heads * ctx.batches
        tile, line = sectioned(index, tiles, lines, kept * ctx.group, plan.band, cutlass.min)
        return tile, line % heads, line // heads
    return work_item(index, tiles, heads, plan.band)


def place(ctx, index, given):
    """The context of the index-th pair. given: (ints, q_segments, kv_segments, lse, space, (part, this, parts))."""
    plan = ctx.plan
    ints, q_segments, kv_segments, lse, space, (part, this, parts) = given
    tile, head, batch = item(ctx, index)
    band, segments = example_band(ints, batch, ctx.queries, ctx.keys, banded=plan.band), None
    if const_expr(plan.segments):
        segments = (q_segments + batch.to(Int64) * ctx.queries, kv_segments + batch.to(Int64) * ctx.keys)
    line, counted = batch.to(Int64) * ctx.lines + head, True
    if const_expr(plan.splits):
        counted = this == 0
        line = line + this.to(Int64) * ctx.lines * ctx.batches
        part = part + line * ctx.length * plan.value_depth
    last, blocks, band = visited(ctx, tile, band, segments, space, (this, parts))
    lead, trail = halves(ctx, tile, band, last, blocks)
    return replace(
        ctx,
        tile=tile,
        head=head,
        kv_head=head // ctx.group,
        batch=batch,
        last=last,
        blocks=blocks,
        lead=lead,
        trail=trail,
        band=band,
        segments=segments,
        lse=lse + line * ctx.length,
        part=part,
        counted=counted,
    )


def _share(total, workers, worker):
    """How many of `total` items fall to a worker, dealt one by one: 0, 1, 2, 0, 1, 2."""
    rounds = total // workers
    return rounds + cutlass.min(cutlass.max(total - rounds * workers - worker, 0), 1)


@cute.jit
def work(ctx, given, role: cutlass.Constexpr):
    """A role's part of all pairs of this CTA."""
    plan = ctx.plan
    cta = cute.arch.block_idx()[0]
    total = up(ctx.length, plan.span) * ctx.lines * ctx.batches
    mine = _share(total, plan.workers, cta)
    uses, first, second = Int32(0), Int32(0), Int32(0)
    for n in cutlass.range(mine, unroll=1):
        earlier = replace(ctx, turn=n, turns=mine, uses=uses, rounds=(first, second))
        one = place(earlier, n * plan.workers + cta, given)
        role(one)
        uses = uses + 2 * one.blocks
        first, second = first + one.blocks - one.lead, second + one.blocks - one.trail


def of_tile(pair, s):
    """pair[s] where s may be a run-time integer."""
    return pair[0] + (pair[1] - pair[0]) * s


def place_of(ctx, more, parity):
    """The place of K and V number `more` of this pair in their ring; parity: 0 for who empties it, 1 for who fills."""
    if const_expr(ctx.plan.workers == 0):
        return Place(Int32(more % ctx.plan.stages), Int32(more // ctx.plan.stages & 1 ^ parity))
    uses = ctx.uses + more
    return fresh(Place(uses % ctx.plan.stages, uses // ctx.plan.stages & 1 ^ parity))


def fresh(at):
    """The same place, of which the compiler knows nothing.

    With two stages it finds out that K is always in stage 0, hoists every descriptor and address of every step out of
    the loop, and spills 352 bytes at depth 192 (0 with this; ptxas of DSL 4.8.1, 2026-11-29).
    """
    copy = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[at.index])
    return Place(copy, at.phase)


def scales(plan, floats):
    """(factor of scores to the exponent in tanh or None, factor to log2 units)."""
    log2e = 1.4426950408889634
    if const_expr(plan.baked_scale is not None):
        return None, Float32(plan.baked_scale * log2e)
    scale = floats[VALUES.scale]
    if const_expr(plan.soft_cap):
        cap = floats[VALUES.soft_cap]
        return 2 * log2e * scale / cap, cap * log2e
    return None, scale * log2e
