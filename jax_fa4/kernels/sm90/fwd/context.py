"""What every role of the Hopper forward may read. Nothing in it changes during a query tile."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound."""

    plan: Any
    warp: Any  # uniform warp index
    thread: Any  # 0.. within the CTA
    queries: Any  # T
    keys: Any  # S
    heads: Any
    batches: Any
    group: Any  # query heads of a key head
    scale: Any  # times log2(e): what a score (capped, where there is a cap) is multiplied with; and its power of two
    cap: Any  # (scale / cap, cap), or None
    q: Any  # (atom, coordinate tensor, shared tensor)
    k: Any
    v: Any
    out: Any
    full: Any  # dict: ring name -> pointer to its barriers
    empty: Any
    # Of one query tile:
    tile: Any = None
    head: Any = None
    kv_head: Any = None
    batch: Any = None
    first: Any = None  # key tiles [first, last)
    last: Any = None
    band: Any = None  # mask.Band of this example
    sink: Any = None  # of this head, natural log, or None
    segments: Any = None  # (pointer to this example's query ids, to its key ids), or None
    lse: Any = None  # pointer to this head's line
    part: Any = None  # pointer to this head's rows of the float32 output of a part of the keys, where keys are split
