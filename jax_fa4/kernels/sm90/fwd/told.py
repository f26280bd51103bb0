"""Query tiles of a CTA that takes several: the load warp, which is ahead, tells the math warps of the next one."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.common.ring import Place, wait
from jax_fa4.kernels.sm90 import wgmma
from jax_fa4.kernels.sm90.fwd.plan import ITEM_WORDS
from jax_fa4.mask import Band


def words_at(ctx, at: Place):
    """What is told of the query tile in a stage of q."""
    words = cute.make_tensor(ctx.items, cute.make_layout((ITEM_WORDS, ctx.plan.q_stages)))
    return words[None, at.index]


@cute.jit
def tell(ctx, at: Place):
    """By the load warp, once the stage is empty and before it is filled, by the thread that `fetch` elects: whoever
    waits for the query tile finds this there too."""
    words, band = cute.make_rmem_tensor(ITEM_WORDS, Int32), ctx.band
    told = (ctx.tile, ctx.head, ctx.batch, ctx.first, ctx.last, band.offset, band.q_len, band.kv_len)
    for n in cutlass.range_constexpr(ITEM_WORDS):
        words[n] = Int32(told[n])
    with cute.arch.elect_one():
        cute.autovec_copy(words, words_at(ctx, at))


@cute.jit
def heard(ctx, at: Place, call, memory):
    """The context of the query tile in a stage of q, which is full then. call: (left, right) of all; memory: pointers
    to LSE and sinks."""
    wait(ctx.full["q"], at)
    words = cute.make_rmem_tensor(ITEM_WORDS, Int32)
    cute.autovec_copy(words_at(ctx, at), words)
    tile, head, batch, first, last, offset, q_len, kv_len = (wgmma.uniform(words[n]) for n in range(ITEM_WORDS))
    lse, sinks = memory
    line = batch.to(Int64) * ctx.lines + head
    return replace(
        ctx,
        tile=tile,
        head=head,
        batch=batch,
        first=first,
        last=last,
        band=Band(*call, offset, q_len, kv_len),
        sinks=sinks + head * ctx.each if ctx.plan.sinks else None,
        lse=lse + line * ctx.rows,
    )
