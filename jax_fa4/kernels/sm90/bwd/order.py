"""In which order CTAs take tiles of keys and go through their queries: plain arithmetic on any integers.

Key tiles that add to a query tile's dQ in turn do so in the order in which CTAs take them. So who waits, waits for a
CTA that has started before, and the first that is not done waits for nobody: no circle, whatever runs at a time.

`mirrored` (bands): most lines (a key head of an example) have their last keys taken first and visit queries ascending.
The last lines go the other way round: first keys first, queries descending. Causal, the first kind goes from short
tiles to long ones and the second back to short ones, so that all SMs end together; and in both a tile comes to a query
tile where the one before it has been.

`alternates` (bands, heads that share keys): what the key tiles of a key head read and add to, 4 MiB a query head at 4k
and D128, should be in L2 while all of them are at it. Head after head, long tiles and short ones are soon at different
heads: of 32:4 heads at 4k, causal, all 32 of four key heads are in use, 128 MiB, and by an arithmetic model (a step
takes one time, L2 holds 25 MiB) 66 % of the tiles are not there when they are wanted. So a query tile is visited by all
heads of the group before the next one. The CTAs of a round start together: they go down from the last queries, and all
are at the same ones until they reach their diagonal. They end one after the other, the first keys last. Who starts so,
the first keys first, goes up from its diagonal: then again all are at the same queries, and end together. Missed: 6 %.
With turns the same. Of a query tile's key tiles the first has the first turn, whichever way each of them goes: that is
the order in which they are taken. Each waits a turn or two where its diagonal is: by a simulation in which a turn takes
0.55 of a step 4 to 5 % of a call, where head by head has 9 and misses L2 besides.
"""

from __future__ import annotations

from typing import Any

from jax_fa4.kernels.sm90.bwd.plan import sectioned


def placed(
    index: Any, tiles: Any, lines: tuple[Any, int], section: Any, low: Any = min, high: Any = max
) -> tuple[Any, Any, Any]:
    """(key tile, line, rising) of a place in the order of work of a `mirrored` plan.

    rising: 1 where the first keys have the first turns. lines: (how many, how many of them rise at most). These are
    mixed: in one of them alone each tile would wait for the one before.
    """
    lines, late = lines[0], low(lines[0] // 2, lines[1])
    early = lines - late
    rising = low(high(index - early * tiles + 1, 0), 1)
    width = early + rising * (late - early)
    section = section + rising * (late - section)
    tile, line = sectioned(index - rising * early * tiles, tiles, width, section, True, low)
    return tile + rising * (tiles - 1 - 2 * tile), line + rising * early, rising


def alternating(index: Any, tiles: Any, section: Any, workers: int, low: Any = min) -> Any:
    """rising of a place in the order of work of an `alternates` plan: 1 in the first round of CTAs, 0 in the next."""
    return 1 - index // low(tiles * section, workers) % 2


def together(left: Any, keys: Any) -> Any:
    """Whether `alternates` work visits a query tile with all heads before the next one: not where a window hides keys.
    There a key tile is head by head two steps behind its neighbour, always, and with all heads at a time twice a group
    (16k, 32:4 heads, window 1024: 15 % missed; with all heads at a time 95 %)."""
    return left >= keys


def visited(i: Any, visits: tuple[Any, Any], rising: Any) -> Any:
    """The query tile that is visited where an ascending walk through [first, last) visits i."""
    first, last = visits
    return i + rising * (first + last - 1 - 2 * i)


def turn(tile: Any, visitors: tuple[Any, Any], rising: Any) -> Any:
    """How many key tiles add before `tile` to a query tile that those of [first, last) visit.

    Not rising, they come descending: the first query tile that a causal key tile visits is one where its turn is 0.
    """
    first, last = visitors
    before = last - 1 - tile
    return before + rising * (tile - first - before)
