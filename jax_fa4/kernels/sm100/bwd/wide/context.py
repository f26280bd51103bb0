"""What every role of a sweep's CTA may read. Nothing in it changes after the prologue."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound. The rows are keys or queries, see plan.Sweep."""

    plan: Any  # the Sweep
    warp: Any  # uniform warp index
    thread: Any  # within the CTA
    rank: Any  # of the CTA in its pair; 0 leads
    tile: Any  # of 128 rows, this CTA's
    head: Any  # of the rows
    batch: Any
    heads: Any  # N
    ratio: Any  # query heads of a key head
    group: Any  # heads of the other side that these rows meet
    first: Any  # tiles of the other side [first, last), the pair's
    last: Any
    tiles: Any  # M, the query tiles of a head
    queries: Any  # T
    keys: Any  # S
    band: Any  # mask.Band of this example
    own: Any  # (real rows, rows of the tensor), likewise the other side's
    other: Any
    scale: Any
    cap: Any  # (scale / cap, cap), or None
    segments: Any  # (pointer to this example's query ids, to its key ids), or None
    maps: Any  # part of the products -> (atom, coordinate tensor, shared tensor (rows, columns, stages))
    held: Any  # shared pointer: statistics by stage, or None
    stats: Any  # pointer to scratch
    tmem: Any  # base of the 512 columns
    full: Any  # ring name -> pointer to its barriers
    empty: Any
