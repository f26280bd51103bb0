"""What every role of the forward may read. Nothing here changes after the prologue."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound."""

    plan: Any
    warp: Any  # uniform warp index
    thread: Any  # within the CTA
    rank: Any  # of this CTA in its pair; None without one
    queries: Any  # T
    keys: Any  # S
    heads: Any  # N
    batches: Any
    each: Any  # rows of a query: 1, or the heads that share a key head, where these are rows beside each other
    length: Any  # rows of a line: T * each
    lines: Any  # of an example: heads, or key heads
    group: Any  # lines of a key head
    before: Any  # soft cap: scores times this are the exponent in tanh; else None
    scale: Any  # what then turns scores into log2 units
    sinks: Any  # pointer to a logit a head; else None
    q: Any  # (copy atom, coordinate tensor, shared tensor), likewise k, v, out
    q_rows: Any  # (None, pointer, shared tensor (rows, columns, tiles)) where threads bring the rows
    k: Any
    v: Any
    out: Any
    stats: Any  # shared float32: [2][128] factor, finally row sum; then [2][128] row maximum
    tmem: Any  # base of the 512 columns
    full: Any  # ring name -> pointer to its barriers
    empty: Any
    # Of one pair of query tiles, or the two pairs of a pair of CTAs:
    tile: Any = None
    head: Any = None  # the line
    kv_head: Any = None
    batch: Any = None
    last: Any = None  # key blocks are visited from last - 1 downward,
    blocks: Any = None  # so many of them, at least one;
    lead: Any = None  # the first tile starts so many later,
    trail: Any = None  # the second ends so many earlier; both keep at least one
    band: Any = None  # mask.Band of this example; left and right are None in a plan without a band
    segments: Any = None  # (pointer to this example's query ids, to its key ids), or None
    lse: Any = None  # pointer to this line's
    part: Any = None  # pointer to this line's rows of the float32 output of a part of the keys, where keys are split
    counted: Any = True  # whether the sink counts here: once, with the first part of a row's keys
    # Of this CTA's earlier pairs:
    turn: Any = 0  # how many
    turns: Any = 1  # with this one and the later ones
    uses: Any = 0  # tiles of K and V that they took
    rounds: Any = (0, 0)  # blocks that their first and second tiles took


def query_tile(ctx, s):
    """Number of this CTA's query tile `s`: a product of a pair has a tile of each CTA, so their tiles alternate."""
    which = ctx.plan.queries * ctx.tile + s
    return which if ctx.rank is None else 2 * which + ctx.rank


def query_of(ctx, row):
    """The query of a row of a line."""
    return row // ctx.each if ctx.plan.packed else row
