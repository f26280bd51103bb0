"""Which tiles meet which: trip ranges, partial tiles and the order of work, as plain arithmetic on any integers.

The same lines run on Python ints (tests, verifier) and on the DSL's integers (kernels); `low` and `high` are the
caller's min and max. What a mask means is asked of mask.py alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


def whole_key_tiles(
    queries: tuple[Any, Any], keys: int, band: Band, banded: bool, low: Any = min, high: Any = max
) -> tuple[Any, Any]:
    """[first, last) of the tiles of `keys` keys that hide none from these queries (inclusive), as `all_keys_visible`
    says of each; first may lie past last."""
    if not banded:
        return 0, band.kv_len // keys
    begin, _ = keys_seen(queries[1], queries[1], band, low, high)
    _, end = keys_seen(queries[0], queries[0], band, low, high)
    return up(begin, keys), high(end, 0) // keys


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


class Deal(NamedTuple):
    """Items for `workers` of even shares: a front of items that take about as long, `hand` at a time, then a tail.

    The front need not fill its last round: who gets none of it gets one of the tail's first items instead, which are
    its longest. The others follow there and back: 0, 1, 2 and 2, 1, 0. Items of one length to the end would let
    workers idle for as long as one takes: 3 % of the time of 2048 tiles at 132 workers.
    """

    workers: Any
    hand: int
    front: Any  # items, a multiple of hand
    tail: Any  # items

    def rest(self) -> tuple[Any, Any]:
        """(workers with a hand of the front's last round, 0 where it is full; those without, 0 there too)."""
        begun = self.front // self.hand % self.workers
        return begun, (self.workers - begun) % self.workers


def _is(x: Any, low: Any, high: Any) -> Any:
    """1 where x > 0, else 0."""
    return low(high(x, 0), 1)


def _there_and_back(deal: Deal, worker: Any, turn: Any) -> Any:
    back = (turn + 1) % 2
    return back * (deal.workers - 1 - worker) + (1 - back) * worker


def front_of(deal: Deal, worker: Any, low: Any = min, high: Any = max) -> tuple[Any, Any]:
    """(items of the front, 1 if an item of the tail makes up for the hand that others have more) of a worker."""
    begun, without = deal.rest()
    rounds = deal.front // deal.hand // deal.workers + _is(begun - worker, low, high)
    return deal.hand * rounds, _is(worker - begun + 1, low, high) * _is(without, low, high)


def share(deal: Deal, worker: Any, low: Any = min, high: Any = max) -> Any:
    """How many items fall to a worker."""
    front, late = front_of(deal, worker, low, high)
    begun, without = deal.rest()
    left = high(deal.tail - without, 0)
    rounds, over = left // deal.workers, left % deal.workers
    last = _is(over - _there_and_back(deal, worker, rounds), low, high)
    return front + late * _is(deal.tail - (worker - begun), low, high) + rounds + last


def dealt(deal: Deal, worker: Any, n: Any, low: Any = min, high: Any = max) -> tuple[Any, Any, Any]:
    """The worker's n-th item: (1 if of the tail else 0, place in the front, place in the tail); one of them counts."""
    front, late = front_of(deal, worker, low, high)
    turn = n - front - late  # -1: the item that makes up for a hand
    tail = deal.rest()[1] + turn * deal.workers + _there_and_back(deal, worker, turn)
    return _is(n - front + 1, low, high), (n // deal.hand * deal.workers + worker) * deal.hand + n % deal.hand, tail


class Order(NamedTuple):
    """The query tiles of a call and how workers share them: tiles, lines, the lines that a Deal's tail is made of.

    longer: lengths grow with the tile. Then the front is all but the last `tail` lines, in pairs of about the same
    length (`paired`), the tail is their tiles, longest first. Otherwise the front is all tiles full of rows, and the
    tail those that are not, if any.
    """

    tiles: Any
    lines: Any
    tail: Any
    full: Any  # tiles of a line that are full of rows
    longer: bool
    section: Any = None  # not `longer`: the front's order is that of `sectioned`


def deal_of(order: Order, workers: Any) -> Deal:
    if order.longer:
        tail = order.tail + (order.lines - order.tail) * order.tiles % 2  # the front's come in pairs
        return Deal(workers, 2, (order.lines - tail) * order.tiles, tail * order.tiles)
    return Deal(workers, 1, order.full * order.lines, (order.tiles - order.full) * order.lines)


def turned(order: Order, deal: Deal, item: tuple[Any, Any, Any], low: Any = min, high: Any = max) -> tuple[Any, Any]:
    """(tile, line) of a dealt item."""
    late, front, tail = item
    if order.longer:
        tile, line = paired(front, order.tiles)
        lines = deal.tail // order.tiles
        last, its = order.tiles - 1 - high(tail, 0) // lines, order.lines - lines + high(tail, 0) % lines
    else:
        full = high(order.full, 1)
        tile, line = front % full, front // full
        if order.section is not None:
            front = low(front, high(deal.front - 1, 0))
            tile, line = sectioned(front, full, order.lines, order.section, False, low)
        last, its = order.full, high(tail, 0)
    return late * last + (1 - late) * tile, late * its + (1 - late) * line
