"""What every role of the Hopper forward may read. Nothing in it changes after the prologue."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound."""

    plan: Any
    warp: Any  # uniform warp index
    thread: Any  # 0.. within the CTA
    tile: Any  # of queries
    head: Any
    kv_head: Any
    batch: Any
    first: Any  # key tiles [first, last)
    last: Any
    queries: Any  # T
    keys: Any  # S
    band: Any  # mask.Band of this example
    scale: Any  # times log2(e): what a score (capped, where there is a cap) is multiplied with; and its power of two
    cap: Any  # (scale / cap, cap), or None
    sink: Any  # of this head, natural log, or None
    segments: Any  # (pointer to this example's query ids, to its key ids), or None
    q: Any  # (atom, coordinate tensor, shared tensor)
    k: Any
    v: Any
    out: Any
    lse: Any  # pointer to this head's line
    full: Any  # dict: ring name -> pointer to its barriers
    empty: Any
