"""Tiles of keys of a CTA that takes several: the load warp takes tickets and tells the other roles."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.examples import example_band
from jax_fa4.kernels.common.ring import wait
from jax_fa4.kernels.common.tiles import query_tiles, up
from jax_fa4.kernels.sm90.bwd import order
from jax_fa4.kernels.sm90.bwd.plan import abreast, sectioned
from jax_fa4.mask import Band


def visit(ctx, i):
    """The query tile that is visited in the i-th place of [first, last)."""
    return order.visited(i, (ctx.first, ctx.last), ctx.rising) if ctx.plan.rises else i


def together(ctx):
    """See `order.together`."""
    return order.together(ctx.ends[0], ctx.keys)


@cute.jit
def first_keys_first(ctx):
    """1 where of a query tile's key tiles the first has the first turn, else 0."""
    rising = ctx.rising if ctx.plan.mirrored else 0
    if const_expr(ctx.plan.alternates):
        rising = Int32(1) if together(ctx) else rising
    return rising


@cute.jit
def nest(ctx):
    """Turns of the outer loop over a tile's work and of the inner one, with `alternates`."""
    span = ctx.last - ctx.first
    outer = span if together(ctx) else ctx.group
    inner = ctx.group if together(ctx) else span
    return outer, inner


@cute.jit
def within(ctx, a, b):
    """(head of the group, place of the query tile in [first, last)) in turn a of the outer loop, b of the inner one."""
    g = b if together(ctx) else a
    i = a if together(ctx) else b
    return g, ctx.first + i


@cute.jit
def alternate(ctx, index, counts, otherwise):
    """(key tile, line, rising) of a place in the order of work with `alternates`; otherwise: where a window hides keys.

    counts: of key tiles, of lines.
    """
    (key_tiles, lines), plan, section = counts, ctx.plan, ctx.section
    tile, line, rising = otherwise
    if const_expr(plan.ordered):
        section = abreast(plan.workers, key_tiles, cutlass.max)
        first_tile, its_line = sectioned(index, key_tiles, lines, section, False, cutlass.min)
        tile = first_tile if together(ctx) else tile
        line = its_line if together(ctx) else line
    way = order.alternating(index, key_tiles, section, plan.workers, cutlass.min)
    return tile, line, (way if together(ctx) else rising)


@cute.jit
def placed(ctx, index):
    """The context at a place in the order of work.

    Ordered: the last keys first, whose turn comes first. Else the first keys first: causal, they have most to do.
    """
    plan = ctx.plan
    kv_heads = ctx.heads // ctx.group
    key_tiles = up(ctx.keys, plan.keys)
    lines = ctx.total // key_tiles
    rising = ctx.rising
    if const_expr(plan.mirrored > 0):
        tile, line, rising = order.placed(
            index, key_tiles, (lines, plan.mirrored), ctx.section, cutlass.min, cutlass.max
        )
    else:
        tile, line = sectioned(index, key_tiles, lines, ctx.section, plan.ordered, cutlass.min)
    if const_expr(plan.alternates):
        tile, line, rising = alternate(ctx, index, (key_tiles, lines), (tile, line, rising))
    batch, kv_head = line // kv_heads, line % kv_heads
    band = example_band(ctx.ints, batch, ctx.queries, ctx.keys, ctx.ends)
    first, last = query_tiles(tile, (plan.rows, plan.keys), band, plan.band, cutlass.min, cutlass.max)
    where = {"tile": tile, "kv_head": kv_head, "batch": batch, "rising": rising}
    return replace(ctx, **where, band=band, first=Int32(first), last=Int32(last))


@cute.jit
def take(ctx):
    """The next ticket, in lane 0; it is not awaited here."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = cute.arch.atomic_add(ctx.tickets.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
    return ticket


def known(ticket):
    """It in all lanes."""
    return cute.arch.shuffle_sync(ticket, 0)


@cute.jit
def tell(ctx, at):
    """The load warp tells the others of ctx's tile; of none where ctx.tile is negative."""
    wait(ctx.empty["item"], at)
    to = ctx.items + at.index * ctx.plan.item_words
    words = (ctx.tile, ctx.kv_head, ctx.batch, ctx.first, ctx.last, ctx.band.q_len, ctx.band.kv_len, ctx.band.offset)
    words += (ctx.rising,)
    if cute.arch.lane_idx() == 0:
        for n in cutlass.range_constexpr(ctx.plan.item_words):
            to[n] = Int32(words[n])
        cute.arch.mbarrier_arrive(ctx.full["item"] + at.index)


def another(ctx, at, uniform=True):
    """Waits for the next tile to be told: the tile, negative where there is none."""
    wait(ctx.full["item"], at)
    tile = ctx.items[at.index * ctx.plan.item_words]
    return cute.arch.make_warp_uniform(tile) if uniform else tile


@cute.jit
def told(ctx, at, uniform: cutlass.Constexpr = True):
    """What `tell` told, as a context; after `another`."""
    of = ctx.items + at.index * ctx.plan.item_words
    words = [cute.arch.make_warp_uniform(of[n]) if uniform else of[n] for n in range(ctx.plan.item_words)]
    names = ("tile", "kv_head", "batch", "first", "last", "q_len", "kv_len", "offset", "rising")
    word = dict(zip(names, words, strict=False))  # not all plans have the last
    band = Band(*ctx.ends, word.pop("offset"), word.pop("q_len"), word.pop("kv_len"))
    return replace(ctx, band=band, **word)
