"""The deterministic order of work and of additions to dQ: plain arithmetic on any integers.

Key tiles that add to one place take turns, in the order in which CTAs take them. So who waits, waits for a CTA that
has started before, and the first that is not done waits for nobody: no circle, whatever runs at a time. What is left
to choose is which tiles are taken first, in which order a tile visits its queries, and how many copies of dQ there are,
which the postprocess adds up. All of it serves that a turn has come before it is wanted:

* Bands. Most lines (a head of an example) have their last keys taken first and visit queries ascending; then come lines
  with the first keys first, which visit descending. Causal, the first kind goes from short tiles to long ones and the
  second back to short ones, so that all SMs end together; and in both a tile comes to a place where the one
  before it has been. With two copies, even and odd tiles add to one each.
* Segments. Key tiles visit the query tiles that segments leave them, and wait for one another by name
  (chain.py). With a band as above; without one a tile starts where it would without segments, if it visits that.
* Full masks. A tile starts one query tile after where the tile behind it starts, goes on to the last and then from the
  first to its own start; what comes after the last goes to another copy. So each copy is visited in the order of work,
  and tiles that run at once never meet. Without a second copy all start at the first query.

The same lines run on Python ints (tests, simulation) and on the DSL's integers; `low` and `high` are its min and max.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_fa4.kernels.common.tiles import sectioned, up

COPIES_BYTES = 16 << 20  # of dQ in all its copies: an eighth of the L2 of a B200, as they are zeroed and read again
CROWDED = 64  # lines from which few tiles of one run at a time, so that more copies do not pay


class Course(NamedTuple):
    """The query tiles that a key tile visits: `begin`, then `way` further each time; `back` stands for `edge`."""

    begin: Any
    way: Any
    edge: Any
    back: Any
    rising: Any = 0  # 1: the first keys have the first turns
    share: Any = 1  # key tiles that start at a query tile
    stride: Any = 1  # query tiles from a start to the next


def copies(wanted: int, nbytes: Any, lines: Any, tiles: tuple[Any, Any], banded: bool) -> int:
    """How many copies of dQ there are. wanted: where memory allows; nbytes: of one; tiles: of (queries, keys).

    One where a length is not known when it is traced. Full masks have an even number, or one.
    """
    if not all(isinstance(n, int) for n in (nbytes, lines, *tiles)) or lines >= CROWDED or min(tiles) < 2:
        return 1
    made = wanted
    while not banded and made * tiles[0] < 2 * tiles[1]:  # few queries: more key tiles start at each
        made *= 2
    while made > 1 and made * nbytes > COPIES_BYTES:
        made //= 2
    return made


def placed(
    index: Any, tiles: Any, lines: Any, section: int, banded: bool, low: Any = min, high: Any = max
) -> tuple[Any, Any, Any]:
    """(key tile, line, rising) of a place in the order of work, see above."""
    if not banded:
        return *sectioned(index, tiles, lines, section, True, low), 0
    late = low(lines // 2, section)
    early = lines - late
    rising = low(high(index - early * tiles + 1, 0), 1)
    width = early + rising * (late - early)
    tile, line = sectioned(index - rising * early * tiles, tiles, width, section, True, low)
    return tile + rising * (tiles - 1 - 2 * tile), line + rising * early, rising


def plain(first: Any, last: Any) -> Course:
    """Ascending, without turns."""
    return Course(first, 1, last, first)


def course(
    tile: Any,
    visits: tuple[Any, Any],
    rising: Any,
    sizes: tuple[Any, Any],
    banded: bool,
    low: Any = min,
    high: Any = max,
) -> Course:
    """How key tile `tile` goes through the query tiles [first, last) of `visits`. sizes: (key tiles of the example,
    copies of dQ)."""
    first, last = visits
    if banded:
        begin = first + rising * (last - 1 - first)
        return Course(begin, 1 - 2 * rising, last - rising * (last - first + 1), begin, rising)
    keys, count = high(sizes[0], 1), sizes[1]
    queries = high((last - first) * low(count - 1, 1), 1)  # with one copy all start at the first
    share, stride = up(keys, queries), high(queries // keys, 1)
    return Course(tile // share * stride, 1, last, first, 0, share, stride)


def start_of(tile: Any, visits: tuple[Any, Any], share: Any, stride: Any, low: Any = min, high: Any = max) -> Any:
    """Where key tile `tile` starts among the query tiles [first, last) that segments leave it, without a band: where it
    would without segments (near its diagonal, if queries are keys), or at the first."""
    first, last = visits
    wanted = tile // share * stride
    inside = low(high(wanted - first + 1, 0), 1) * low(high(last - wanted, 0), 1)
    return first + inside * (wanted - first)


def among(
    tile: Any,
    visits: tuple[Any, Any],
    rising: Any,
    sizes: tuple[Any, Any, Any],
    banded: bool,
    low: Any = min,
    high: Any = max,
) -> Course:
    """`course` where segments leave [first, last). sizes: (query tiles and key tiles of the example, copies of dQ)."""
    queries, keys, count = sizes
    if banded:
        return course(tile, visits, rising, (keys, count), True, low, high)
    every = course(tile, (0, queries), rising, (keys, count), False, low, high)
    first, last = visits
    begin = start_of(tile, visits, every.share, every.stride, low, high)
    return Course(begin, 1, last, first, 0, every.share, every.stride)


def leg(tile: Any, visits: tuple[Any, Any], m: Any, path: Course, low: Any = min, high: Any = max) -> Any:
    """1 where key tile `tile` comes to m from its last query tile, without a band. path: of any key tile."""
    return low(high(start_of(tile, visits, path.share, path.stride, low, high) - m, 0), 1)


def lane(tile: Any, again: Any, count: Any, banded: bool, high: Any = max) -> tuple[Any, Any]:
    """(copy of dQ that a key tile adds to, key tiles from one that does to the next), among segments; again: `leg`."""
    if banded:
        return tile % count, count
    apart = high(count // 2, 1)
    return 2 * (tile % apart) + again, apart


def turn(
    tile: Any, m: Any, keys: tuple[Any, Any], path: Course, count: Any, banded: bool, low: Any = min, high: Any = max
) -> tuple[Any, Any]:
    """(copy of dQ, key tiles that add there before) of key tile `tile` at query tile m. keys: [first, last) of the key
    tiles that visit m; count: copies."""
    first, last = keys
    if banded:
        before = last - 1 - tile
        before = before + path.rising * (tile - first - before)
        return tile % count, before // count
    again = low(high(path.begin - m, 0), 1)  # it came from the last query tile
    apart = high(count // 2, 1)
    started = low((m // path.stride + 1) * path.share, last)  # key tiles that start at m or before
    end = started + again * (last - started)
    return 2 * (tile % apart) + again, (end - 1 - tile) // apart


def visit(i: Any, visits: tuple[Any, Any], path: Course, banded: bool, low: Any = min, high: Any = max) -> Any:
    """The query tile that is visited when a plain course visits i. visits: [first, last) of them; without a band from 0
    on."""
    first, last = visits
    if banded:
        return i + path.rising * (first + last - 1 - 2 * i)
    m = i + path.begin
    return m - last * low(high(m - last + 1, 0), 1)


def visit_among(i: Any, visits: tuple[Any, Any], path: Course, banded: bool, low: Any = min, high: Any = max) -> Any:
    """`visit` where segments leave [first, last)."""
    first, last = visits
    if banded:
        return visit(i, visits, path, True, low, high)
    m = i + path.begin - first
    return m - (last - first) * low(high(m - last + 1, 0), 1)


def walk(path: Course, count: int) -> list[int]:
    """The next `count` query tiles, as turns.after goes through them; on Python ints."""
    made, m = [], path.begin
    for _ in range(count):
        made.append(m)
        m = path.back if m + path.way == path.edge else m + path.way
    return made
