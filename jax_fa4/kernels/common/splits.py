"""Keys of a query tile shared by several CTAs: how many parts, what they leave behind, and the kernel that combines it.

Standard library only, so that plans need no compiler; the kernel itself is combine.py.
"""

from __future__ import annotations

from typing import Any

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Kernel
from jax_fa4.kernels.common.tiles import up

MOST_PARTS = 64  # of a query tile's keys
START = 2.0  # of a CTA, with its end: about as long as so many key tiles
COMBINE_ROWS = 4  # rows that a CTA of the combining kernel takes, a warp each


def parts_for(tiles: int, key_tiles: int, places: int, band: bool = False) -> int:
    """Parts of a query tile's keys, for `places` CTAs at a time: the fewest that take the least time, counted in key
    tiles, a CTA's start and end as START of them. At least two key tiles a part.

    band: as if causal, the longest first: half of all, shared evenly, but at least the longest.
    """

    def time(parts: int) -> float:
        longest = up(key_tiles, parts) + START
        if band:
            return max(longest, tiles * parts * (key_tiles / (2 * parts) + START) / places)
        return up(tiles * parts, places) * longest

    return min(range(1, max(min(key_tiles // 2, MOST_PARTS), 1) + 1), key=time)


def scratch(value_depth: int) -> tuple[Buffer, ...]:
    """Output and LSE of every part, rows of a line after one another (of heads of a group, where these are rows)."""
    return (
        Buffer("part", "float32", ("P", "B", "N", "T", value_depth), "scratch"),
        Buffer("part_lse", "float32", ("P", "B", "N", "T"), "scratch"),
    )


def combining(e: dict[str, Any]) -> Kernel:
    """The launch behind the parts'."""
    rows = up(e["B"] * e["N"] * e["T"], COMBINE_ROWS)
    taken = ("part", "part_lse", "out", "lse")
    return Kernel("combine", (rows, 1, 1), 32 * COMBINE_ROWS, pointers=taken, extents=("B", "N", "T", "K", "P"))
