"""What every role of a CTA of a pair may read. Nothing in it changes after the prologue."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound."""

    plan: Any
    warp: Any  # uniform warp index
    thread: Any  # within the CTA
    rank: Any  # of the CTA in its pair; 0 leads
    pair: Any  # tile of 256 keys
    tile: Any  # of 128 keys, this CTA's
    kv_head: Any
    batch: Any
    heads: Any  # N
    group: Any  # query heads of this key head
    first: Any  # query tiles [first, last), the pair's
    last: Any
    course: Any  # order.Course through them
    tiles: Any  # M, the query tiles of a head
    queries: Any  # T
    keys: Any  # S
    band: Any  # mask.Band of this example
    scale: Any
    cap: Any  # (scale / cap, cap), or None
    segments: Any  # (pointer to this example's query ids, to its key ids), or None
    maps: Any  # name of an operand or gradient -> (atom, coordinate tensor, shared tensor (rows, columns, 1))
    ds: Any  # shared tensor (256 keys, 64 queries): dS of this CTA's queries
    parcel: Any  # shared tensor (128 keys, 64 queries): dS of the other CTA's queries, to be sent
    part: Any  # shared pointer: slices of float32 dQ
    held: Any  # shared pointer: statistics by stage
    stats: Any  # pointers to scratch
    work: Any
    turns: Any  # or None
    copies: Any  # of dQ, or None
    tmem: Any  # base of the 512 columns
    full: Any  # ring name -> pointer to its barriers
    empty: Any
