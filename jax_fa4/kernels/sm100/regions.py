"""Tensor-memory regions of a plan: who owns which columns, and which reuse is allowed. Standard library only."""

from __future__ import annotations

from typing import NamedTuple

TMEM_COLUMNS = 512  # 32 bits each, 128 lanes


class Region(NamedTuple):
    """Columns that one tile uses. `inside` names a region whose columns it reuses, by the order that `why` states.

    `life`: first and last moment of a step, in any count, of those that take turns inside the same region.
    """

    name: str
    start: int
    columns: int
    inside: str = ""
    why: str = ""
    life: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.columns


def in_turn(a: Region, b: Region) -> bool:
    """Whether both use the same region, and one of them only from where the other has ended."""
    alike = bool(a.inside) and a.inside == b.inside and bool(a.life) and bool(b.life)
    return alike and (a.life[-1] <= b.life[0] or b.life[-1] <= a.life[0])


def check_regions(regions: tuple[Region, ...]) -> None:
    """Regions fit, and overlap only where one declares that it reuses the other and lies inside it, or in turn."""
    table = "\n".join(f"  {r.name}: {r.start}..{r.end - 1}" + (f" in {r.inside}" * bool(r.inside)) for r in regions)
    for i, a in enumerate(regions):
        assert 0 <= a.start and a.end <= TMEM_COLUMNS, f"{a.name} leaves the {TMEM_COLUMNS} columns:\n{table}"
        assert not a.inside or a.why, f"{a.name} reuses {a.inside} and does not say why that is safe:\n{table}"
        for b in regions[i + 1 :]:
            if a.start < b.end and b.start < a.end:
                inner, outer = (b, a) if b.inside == a.name else (a, b)
                nested = inner.inside == outer.name and outer.start <= inner.start and inner.end <= outer.end
                assert nested or in_turn(a, b), f"{a.name} and {b.name} overlap:\n{table}"
