"""Tensor-memory regions of a plan: who owns which columns, and which reuse is allowed. Standard library only."""

from __future__ import annotations

from typing import NamedTuple

TMEM_COLUMNS = 512  # 32 bits each, 128 lanes


class Region(NamedTuple):
    """Columns that one tile uses. `inside` names a region whose columns it reuses, by the order that `why` states."""

    name: str
    start: int
    columns: int
    inside: str = ""
    why: str = ""

    @property
    def end(self) -> int:
        return self.start + self.columns


def check_regions(regions: tuple[Region, ...]) -> None:
    """Regions fit, and overlap only where one declares that it reuses the other and lies inside it."""
    table = "\n".join(f"  {r.name}: {r.start}..{r.end - 1}" + (f" in {r.inside}" * bool(r.inside)) for r in regions)
    for i, a in enumerate(regions):
        assert 0 <= a.start and a.end <= TMEM_COLUMNS, f"{a.name} leaves the {TMEM_COLUMNS} columns:\n{table}"
        assert not a.inside or a.why, f"{a.name} reuses {a.inside} and does not say why that is safe:\n{table}"
        for b in regions[i + 1 :]:
            if a.start < b.end and b.start < a.end:
                inner, outer = (b, a) if b.inside == a.name else (a, b)
                nested = inner.inside == outer.name and outer.start <= inner.start and inner.end <= outer.end
                assert nested, f"{a.name} and {b.name} overlap:\n{table}"
