"""In which order CTAs take tiles of keys and go through their queries: plain arithmetic on any integers.

Key tiles that add to a query tile's dQ in turn do so in the order in which CTAs take them. So who waits, waits for a
CTA that has started before, and the first that is not done waits for nobody: no circle, whatever runs at a time.

`mirrored` (bands): most lines (a key head of an example) have their last keys taken first and visit queries ascending.
The last lines go the other way round: first keys first, queries descending. Causal, the first kind goes from short
tiles to long ones and the second back to short ones, so that all SMs end together; and in both a tile comes to a query
tile where the one before it has been.
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
