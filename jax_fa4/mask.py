"""One meaning of a mask: visibility as plain arithmetic, the same on Python ints, numpy, jnp and device integers.

Positions are those of one example: query `i` in [0, T), key `j` in [0, S). The band's sides are measured from the
diagonal `j = i + offset`; `offset` is 0 for top-left alignment and `kv_len - q_len` for bottom-right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# An unbounded side of the band, as a run-time value. Sums of it with any index stay inside int32.
UNBOUNDED = 1 << 30


class Band(NamedTuple):
    """The run-time values that decide which (query, key) pairs of one example see each other."""

    left: Any  # keys further than this to the left of the diagonal are hidden; UNBOUNDED = none
    right: Any  # likewise to the right; causal is right = 0
    offset: Any  # diagonal: j = i + offset
    q_len: Any  # queries at or past this see nothing
    kv_len: Any  # keys at or past this are seen by nobody


def visible(i: Any, j: Any, band: Band) -> Any:
    """Whether query `i` sees key `j`: inside both lengths and inside the band, all sides included."""
    d = j - i - band.offset
    return (i < band.q_len) & (j < band.kv_len) & (d <= band.right) & (d >= -band.left)


def keys_seen(first: Any, last: Any, band: Band, low: Any = min, high: Any = max) -> tuple[Any, Any]:
    """Range [begin, end) that covers every key visible to any query in [first, last]; empty when end <= begin.

    `low` and `high` are the caller's min and max (device integers need their own).
    """
    begin = high(first + band.offset - band.left, 0)
    end = low(last + band.offset + band.right + 1, band.kv_len)
    return begin, end


def queries_seeing(first: Any, last: Any, band: Band, low: Any = min, high: Any = max) -> tuple[Any, Any]:
    """Range [begin, end) that covers every query that sees any key in [first, last]; empty when end <= begin."""
    begin = high(first - band.offset - band.right, 0)
    end = low(last - band.offset + band.left + 1, band.q_len)
    return begin, end


def all_visible(queries: tuple[Any, Any], keys: tuple[Any, Any], band: Band) -> Any:
    """Whether every pair of the tile sees each other: query range [i0, i1] against key range [j0, j1], inclusive."""
    (i0, i1), (j0, j1) = queries, keys
    inside = (i1 < band.q_len) & (j1 < band.kv_len)
    return inside & (j1 - i0 - band.offset <= band.right) & (j0 - i1 - band.offset >= -band.left)
