"""What every role of the Blackwell backward may read. Nothing in it changes after the prologue."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound."""

    plan: Any
    warp: Any  # uniform warp index
    thread: Any  # within the CTA
    tile: Any  # of keys
    kv_head: Any
    batch: Any
    heads: Any  # N
    group: Any  # query heads of this key head
    first: Any  # query tiles [first, last)
    last: Any
    ranges: Any  # pointer to the query tiles [first, last) that each key tile visits (of its example), or None
    course: Any  # order.Course through them
    tiles: Any  # M, the query tiles of a head
    queries: Any  # T
    keys: Any  # S
    band: Any  # mask.Band of this example
    scale: Any
    cap: Any  # (scale / cap, cap), or None
    segments: Any  # (pointer to this example's query ids, to its key ids), or None
    k: Any  # (atom, coordinate tensor, shared tensor (rows, depth, stages)), likewise the others
    v: Any
    q: Any
    dout: Any
    dk: Any  # dK and dV are stored from K's and V's places
    dv: Any
    ds: Any  # shared tensor (keys, queries)
    part: Any  # shared pointer: slices of float32 dQ
    held: Any  # shared pointer: statistics by stage
    stats: Any  # pointers to scratch
    work: Any
    turns: Any  # or None
    copies: Any  # of dQ, or None
    tmem: Any  # base of the 512 columns
    full: Any  # ring name -> pointer to its barriers
    empty: Any
