"""dQ without a postprocess: additions to a query tile are counted, the last one's CTA converts the tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common.ring import step, wait
from jax_fa4.kernels.common.tiles import key_tiles
from jax_fa4.kernels.sm90.bwd.plan import DONE


@cute.jit
def count(ctx, tile):
    """Counts a complete addition to a query tile (of all heads and examples; negative: none). Returns (the tile, how
    many were counted before), for `hand_on`."""
    before = Int32(0)
    if tile >= 0:
        before = cute.arch.atomic_add((ctx.turns + tile).llvm_ptr, Int32(1), sem="acq_rel", scope="gpu")
    return tile, before


@cute.jit
def post(ctx, at, tile):
    """Tells the finishing warps of a complete tile, or with a negative one that there will be no other."""
    wait(ctx.empty["done"], at)
    to = ctx.done
    to[at.index] = tile
    cute.arch.mbarrier_arrive(ctx.full["done"] + at.index)


@cute.jit
def hand_on(ctx, counted, at):
    """If what `count` counted was the last addition, the tile goes to the finishing warps. Returns the next place."""
    plan = ctx.plan
    tile, before = counted
    if tile >= 0:
        m = tile % ctx.tiles
        first, last = key_tiles(m, (plan.rows, plan.keys), ctx.band, plan.band, cutlass.min, cutlass.max)
        if before == last - first - 1:
            post(ctx, at, tile)
            at = step(at, DONE)
    return at
