"""Which tiles meet which: trip ranges, partial tiles and the order of work, as plain arithmetic on any integers.

The same lines run on Python ints (tests, verifier) and on the DSL's integers (kernels); `low` and `high` are the
caller's min and max. What a mask means is asked of mask.py alone.
"""

from __future__ import annotations

from typing import Any

from jax_fa4.mask import Band, all_visible, keys_seen, queries_seeing


def up(n: Any, size: int) -> Any:
    """Tiles of `size` that hold n >= 0 things."""
    return (n + size - 1) // size


def _only_if(alive: Any, first: Any, last: Any) -> tuple[Any, Any]:
    """[first, last) where alive is 1, empty where it is 0 or the range was."""
    return first, first + (last - first) * alive


def key_tiles(
    tile: Any, size: tuple[int, int], band: Band, banded: bool, low: Any = min, high: Any = max, each: Any = 1
) -> Any:
    """[first, last) of the key tiles that query tile `tile` must visit; first == last where it sees nothing.

    size: (rows, keys) of a tile. `banded` False promises an unbounded band, and saves its arithmetic. each: rows of
    a query, beside each other (heads of a group); then a tile may begin and end inside a query.
    """
    rows, keys = size
    top, after = queries_of((tile * rows, (tile + 1) * rows), each)
    begin, end = 0, band.kv_len
    if banded:
        begin, end = keys_seen(top, low(after, band.q_len) - 1, band, low, high)
    first = begin // keys
    last = high(up(high(end, 0), keys), first)
    return _only_if(low(high(band.q_len - top, 0), 1), first, last)


def queries_of(rows: tuple[Any, Any], each: Any) -> tuple[Any, Any]:
    """[first, last) of the queries that have a row in [rows[0], rows[1]), `each` rows being one query."""
    if isinstance(each, int) and each == 1:
        return rows
    return rows[0] // each, (rows[1] - 1) // each + 1


def query_tiles(tile: Any, size: tuple[int, int], band: Band, banded: bool, low: Any = min, high: Any = max) -> Any:
    """[first, last) of the query tiles that key tile `tile` must visit; first == last where nobody sees it.

    size: (queries, keys) of a tile. Exact: just those with a visible pair, so that turns can be counted by key_tiles.
    """
    rows, keys = size
    left = tile * keys
    begin, end = 0, band.q_len
    if banded:
        begin, end = queries_seeing(left, low(left + keys, band.kv_len) - 1, band, low, high)
    first = begin // rows
    last = high(up(high(end, 0), rows), first)
    seen = low(high(end - begin, 0), 1)  # begin may lie past q_len in the same tile
    return _only_if(low(high(band.kv_len - left, 0), 1) * seen, first, last)


def all_keys_visible(queries: tuple[Any, Any], keys: tuple[Any, Any], band: Band, banded: bool) -> Any:
    """Whether no pair of the tile needs hiding, were every query inside q_len. Ranges are inclusive.

    Queries past q_len are the caller's: they are cleared once at the end of a tile, not at each step.
    """
    if not banded:
        return keys[1] < band.kv_len
    return all_visible(queries, keys, band._replace(q_len=queries[1] + 1))


def work_item(index: Any, tiles: Any, heads: Any, longest_last: bool) -> tuple[Any, Any, Any]:
    """(tile, head, batch) of a linear CTA index: tiles fastest, so that a head's keys stay in L2.

    One axis, since the others of a grid end at 65,535. `longest_last`: later tiles are longer (causal), start there.
    """
    tile, rest = index % tiles, index // tiles
    if longest_last:
        tile = tiles - 1 - tile
    return tile, rest % heads, rest // heads


def sectioned(index: Any, tiles: Any, lines: Any, section: Any, longest_last: bool, low: Any = min) -> tuple[Any, Any]:
    """(tile, line) of a linear index, a line being one head of one example: `section` lines at a time, their keys small
    enough together for L2, and of those all first tiles before all second ones. Longest first, where `longest_last`.
    """
    whole, rest = index // (section * tiles), index % (section * tiles)
    width = low(section, lines - whole * section)
    tile, line = rest // width, whole * section + rest % width
    return (tiles - 1 - tile if longest_last else tile), line


def paired(index: Any, tiles: Any) -> tuple[Any, Any]:
    """(tile, line) of a linear index, line by line; of each line the last tile, the first, the last but one, ...

    Where lengths grow with the tile any two neighbours have about the same length together.
    """
    line, place = index // tiles, index % tiles
    odd = place % 2
    return odd * (place // 2) + (1 - odd) * (tiles - 1 - place // 2), line


def share(total: Any, workers: Any, worker: Any, hand: int, low: Any = min, high: Any = max) -> Any:
    """How many of `total` items fall to a worker, dealt `hand` at a time: see `dealt`."""
    rounds = total // (workers * hand)
    return rounds * hand + low(high(total - rounds * workers * hand - worker * hand, 0), hand)


def dealt(n: Any, workers: Any, worker: Any, hand: int) -> Any:
    """The worker's n-th item."""
    return (n // hand * workers + worker) * hand + n % hand
