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
    each: Any  # rows of a query: 1, or the heads that share a key head, where these are rows
    rows: Any  # of a line: T * each
    lines: Any  # of an example: heads, or key heads
    heads: Any  # N
    batches: Any
    group: Any  # lines of a key head
    scale: Any  # times log2(e): what a score (capped, where there is a cap) is multiplied with; and its power of two
    cap: Any  # (scale / cap, cap), or None
    q: Any  # (atom, coordinate tensor, shared tensor)
    k: Any
    v: Any
    out: Any
    full: Any  # dict: ring name -> pointer to its barriers
    empty: Any
    items: Any = None  # shared: what the load warp tells of query tiles, by stage of q
    # Of one query tile:
    tile: Any = None
    head: Any = None  # the line
    kv_head: Any = None
    batch: Any = None
    first: Any = None  # key tiles [first, last)
    last: Any = None
    band: Any = None  # mask.Band of this example
    sinks: Any = None  # pointer to those of this line, natural log, or None
    counted: Any = True  # whether the sink counts here: once, with the first part of a row's keys
    segments: Any = None  # (pointer to this example's query ids, to its key ids), or None
    lse: Any = None  # pointer to this line's
    part: Any = None  # pointer to this line's rows of the float32 output of a part of the keys, where keys are split
