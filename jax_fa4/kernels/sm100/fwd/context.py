"""What every role of the forward may read. Nothing here changes after the prologue."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound."""

    plan: Any
    warp: Any  # uniform warp index
    thread: Any  # within the CTA
    tile: Any  # two query tiles of each CTA of the pair, or of the only one
    rank: Any  # of this CTA in its pair; None without one
    head: Any
    kv_head: Any
    batch: Any
    last: Any  # key blocks are visited from last - 1 downward,
    blocks: Any  # so many of them, at least one
    queries: Any  # T
    keys: Any  # S
    band: Any  # mask.Band of this example; left and right are None in a plan without a band
    before: Any  # soft cap: scores times this are the exponent in tanh; else None
    scale: Any  # what then turns scores into log2 units
    sink: Any  # this head's, in log2 units; else None
    segments: Any  # (pointer to this example's query ids, to its key ids), or None
    q: Any  # (copy atom, coordinate tensor, shared tensor), likewise k, v, out
    k: Any
    v: Any
    out: Any
    lse: Any  # pointer to the row of this head
    stats: Any  # shared float32: [2][128] factor, finally row sum; then [2][128] row maximum
    tmem: Any  # base of the 512 columns
    full: Any  # ring name -> pointer to its barriers
    empty: Any


def query_tile(ctx, s):
    """Number of this CTA's query tile `s`: a product of a pair has a tile of each CTA, so their tiles alternate."""
    which = 2 * ctx.tile + s
    return which if ctx.rank is None else 2 * which + ctx.rank
