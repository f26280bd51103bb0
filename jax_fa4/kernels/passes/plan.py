"""The backward preprocess as a plan: one launch of a backward's call, and an object of its own for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa4.ffi.buffers import INTS, Buffer, value_extents
from jax_fa4.kernels.common.parts import Kernel
from jax_fa4.kernels.common.tiles import up


@dataclass(frozen=True)
class BwdPre:
    """delta = rowsum(dO * O) - dLSE, the LSE in base 2, and a dQ workspace of zeros; one CTA for `rows` queries.

    A backward's plan holds one of these with its own tile, so that both sides agree on the padding: M, the number of
    query tiles, is an extent of the scratch buffers, and every padded row is written.
    """

    arch: str
    dtype: str
    value_depth: int
    rows: int  # queries of one tile of the main kernel
    work_depth: int  # float32 numbers of dQ workspace a query, whatever their order; 0 = no workspace
    turns: bool = False  # also zeroes a turn for each query tile and one ticket counter, for an ordered dQ
    releases: bool = False  # lets the kernel after it be launched early; that one must wait before it reads anything
    spill_allowance: int = 0

    launcher = "jax_fa4.kernels.passes.bwd_pre"
    direction = "bwd_pre"
    threads = 256

    def __post_init__(self) -> None:
        assert self.dtype in ("bfloat16", "float16"), self.dtype
        assert self.value_depth % 8 == 0 and 8 <= self.value_depth <= 256, self.value_depth
        assert self.rows % 8 == 0 and self.rows * self.work_depth % 4 == 0, (self.rows, self.work_depth)

    @property
    def lanes(self) -> int:
        """Lanes that share a row: a power of two, 16 bytes each; the last ones of a row may have nothing to load."""
        lanes = 1
        while 8 * lanes < self.value_depth:
            lanes *= 2
        return lanes

    @property
    def rows_at_once(self) -> int:
        return self.threads // self.lanes

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        query, line = ("B", "T", "N", self.value_depth), ("B", "N", "T")
        return (
            Buffer("out", self.dtype, query),
            Buffer("dout", self.dtype, query),
            Buffer("lse", "float32", line),
            Buffer("dlse", "float32", line),
            INTS,
        )

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """stats holds, a tile: `rows` times LSE in base 2, then `rows` times delta."""
        tile = ("B", "N", "M")
        stats = Buffer("stats", "float32", (*tile, 2 * self.rows), "scratch")
        work = Buffer("work", "float32", (*tile, self.rows * self.work_depth), "scratch")
        made = (stats, work) if self.work_depth else (stats,)
        if self.turns:
            made += (Buffer("turns", "int32", tile, "scratch"), Buffer("tickets", "int32", (1,), "scratch"))
        return made

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T and N."""
        return {**shapes, **value_extents(shapes["B"]), "M": up(shapes["T"], self.rows)}


def bind(plan: BwdPre, e: dict[str, Any], dependent: bool = False) -> Kernel:
    """The launch. Runs on ints and on the DSL's integers."""
    pointers = tuple(b.name for b in plan.inputs + plan.outputs)
    grid = (e["M"] * e["N"] * e["B"], 1, 1)
    return Kernel("bwd_pre", grid, plan.threads, dependent=dependent, pointers=pointers, extents=("T", "N", "M"))
