"""What every role of the Hopper backward may read. Nothing in it changes after the prologue."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """State that moves is not here: it is returned and rebound."""

    plan: Any
    warp: Any  # uniform warp index
    thread: Any  # 0.. within the CTA
    tile: Any  # of keys
    kv_head: Any
    batch: Any
    heads: Any  # N
    group: Any  # query heads of this key head
    first: Any  # query tiles [first, last)
    last: Any
    rising: Any  # 1 where `mirrored` work visits them descending
    tiles: Any  # M, the query tiles of a head
    queries: Any  # T
    keys: Any  # S
    band: Any  # mask.Band of this example
    scale: Any
    cap: Any  # (scale / cap, cap), or None
    segments: Any  # (pointer to this example's query ids, to its key ids), or None
    k: Any  # (atom, coordinate tensor, shared tensor)
    v: Any
    q: Any
    dout: Any
    dk: Any  # dK and dV are stored from K's and V's places
    dv: Any
    ds: Any  # shared tensor (keys, rows, buffers): dS^T
    weights: Any  # shared pointer: P^T in float32 in the order of one warpgroup's registers, where the other needs it
    part: Any  # shared pointer: float32 dQ tiles in the order of the math threads' registers, or None
    held: Any  # shared pointer: statistics by stage
    stats: Any  # pointers to scratch
    work: Any
    turns: Any  # or None
    tickets: Any  # pointer to the counter of work taken, or None
    cleared: Any  # pointer to counts of the workspace's zeroed shares by key head, or None
    ranges: Any  # pointer to the query tiles [first, last) that each key tile visits (of its example), or None
    reach: Any  # shared pointer: see chain.reach, or None
    dq: Any  # pointer to dQ, or None where a postprocess writes it
    total: Any  # tiles of keys in all
    section: Any  # key heads whose tiles are mixed
    ends: Any  # (left, right) of the band, run-time values
    ints: Any  # pointer to the run-time ints
    items: Any  # shared pointer: what tells of the next tiles of keys, or None
    done: Any  # shared pointer: complete query tiles, by place of the ring done; or None
    sums: Any  # shared pointer: a complete tile of dQ in float32, or None
    full: Any  # dict: ring name -> pointer to its barriers
    empty: Any
