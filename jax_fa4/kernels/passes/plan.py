"""The backward preprocess as a plan: one launch of a backward's call, and an object of its own for tests."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from jax_fa4.ffi.buffers import INTS, Buffer, value_extents
from jax_fa4.kernels.common.gradients import SEGMENTS
from jax_fa4.kernels.common.parts import Kernel
from jax_fa4.kernels.common.tiles import up

FRAGMENT = 16  # rows whose statistics lie together where threads of a main kernel have fragments


def in_fragments(row: Any) -> Any:
    """Where a row's statistics lie among those of a tile: of each 16 rows 8 b + 2 q + e those of a q together, for the
    lanes that have rows 2 q and 2 q + 1 of each eight, 16 bytes at a time. Runs on ints and on the DSL's integers."""
    b, q, e = row % FRAGMENT // 8, row % 8 // 2, row % 2
    return row // FRAGMENT * FRAGMENT + 4 * q + 2 * b + e


@dataclass(frozen=True)
class BwdPre:
    """delta = rowsum(dO * O) - dLSE, the LSE in base 2, and mostly a dQ workspace of zeros; one CTA for `rows` queries.

    A backward's plan holds one of these with its own tile, so that both sides agree on the padding: M, the number of
    query tiles, is an extent of the scratch buffers, and every padded row is written.
    """

    arch: str
    dtype: str
    value_depth: int
    rows: int  # queries of one tile of the main kernel
    work_depth: int  # float32 numbers of dQ workspace a query, whatever their order; 0 = no workspace
    _: KW_ONLY  # three plans make these: a flag put between others must not move theirs
    turns: int = False  # numbers of each query tile that it also zeroes: they count those that added to its dQ
    tickets: bool = False  # also zeroes the ticket counter of work that CTAs take
    copies: bool = False  # C copies of those, and of the workspace, which is then not zeroed; C: an extent
    releases: bool = False  # lets the kernel after it be launched early; that one must wait before it reads anything
    unseen: int = 0  # keys of a tile; also zeroes dQ of query tiles that see no key, where nobody else writes it
    band: bool = False  # as the main kernel's, for `unseen`
    fragments: bool = False  # the statistics of a tile lie in the order of `in_fragments`
    workers: int = 0  # where CTAs of the main kernel zero the workspace ahead of use: how many there are, see `ahead`
    ranges: int = 0  # keys of a tile; also writes which query tiles each of these visits, by band and segments
    spill_allowance: int = 0

    launcher = "jax_fa4.kernels.passes.bwd_pre"
    direction = "bwd_pre"
    threads = 256

    def __post_init__(self) -> None:
        assert self.dtype in ("bfloat16", "float16"), self.dtype
        assert self.value_depth % 8 == 0 and 8 <= self.value_depth <= 256, self.value_depth
        assert not (self.workers and self.copies), "whoever zeroes ahead knows of one copy"
        assert not self.fragments or self.rows % FRAGMENT == 0, self.rows
        assert not self.workers or (self.unseen and self.work_depth), "workers need the tile of keys"
        assert not (self.turns > 1 and self.copies), "each copy has one count"
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
        ) + SEGMENTS * (self.ranges > 0)

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """stats holds, a tile: `rows` times LSE in base 2, then `rows` times delta; by row, or see `in_fragments`."""
        tile = ("B", "N", "M")
        stats = Buffer("stats", "float32", (*tile, 2 * self.rows), "scratch")
        each = (*tile, *("C",) * self.copies)
        work = Buffer("work", "float32", (*each, self.rows * self.work_depth), "scratch")
        made: tuple[Buffer, ...] = (stats, work) if self.work_depth else (stats,)
        counts: tuple[str | int, ...] = (*each, self.turns) if self.turns > 1 else each
        made += (Buffer("turns", "int32", counts, "scratch"),) * (self.turns > 0)
        made += (Buffer("tickets", "int32", (1,), "scratch"),) * self.tickets
        made += (Buffer("cleared", "int32", ("B", "K"), "scratch"),) * (self.workers > 0)
        made += (Buffer("ranges", "int32", ("B", "L", 2), "scratch"),) * (self.ranges > 0)
        return made + (Buffer("dq", self.dtype, ("B", "T", "N", self.work_depth), "out"),) * (self.unseen > 0)

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T and N; with `ranges` also from S. L: key tiles."""
        more = {"C": 1} if self.copies else {}
        more |= {"L": up(shapes["S"], self.ranges)} if self.ranges else {}
        return {**shapes, **value_extents(shapes["B"]), "M": up(shapes["T"], self.rows), **more}


def ahead(workers: int, key_tiles: Any) -> Any:
    """How many key heads ahead the workspace is zeroed by the main kernel's CTAs, each a share with each tile of keys.

    Tickets of a head are then taken when those that zero for it have been taken by all CTAs, and two heads before.
    """
    return workers // key_tiles + 3


def bind(plan: BwdPre, e: dict[str, Any], dependent: bool = False) -> Kernel:
    """The launch. Runs on ints and on the DSL's integers."""
    pointers = tuple(b.name for b in plan.inputs + plan.outputs)
    grid = (e["M"] * e["N"] * e["B"], 1, 1)
    extents = ("T", "N", "M") + ("S",) * (plan.unseen > 0 or plan.ranges > 0)
    extents += ("K",) * (plan.workers > 0) + ("C",) * plan.copies
    smem = plan.threads // 2 * (plan.ranges > 0)
    return Kernel("bwd_pre", grid, plan.threads, dependent=dependent, smem=smem, pointers=pointers, extents=extents)
