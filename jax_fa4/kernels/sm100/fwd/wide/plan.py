"""Plan of the Blackwell forward at depths up to 256: a pair of CTAs, one query tile each, scores double buffered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa4.kernels.common.parts import Ring
from jax_fa4.kernels.sm100.fwd.plan import DEEPEST, GROUP, WARP, Plan, Share
from jax_fa4.kernels.sm100.regions import Region
from jax_fa4.spec import Problem

DEPTH = DEEPEST


@dataclass(frozen=True)
class Wide(Plan):
    """O of one tile takes half of tensor memory, so there is no room for a second tile: instead the scores of the next
    block are computed while a block is in softmax. P V starts before P is complete, in two parts: they free K and V.

    Always on pairs of CTAs. Alone a CTA would bring and read all of K and V for one tile: 2568 clocks of shared memory
    a 128 x 128 tile where the products take 2048; a pair's half takes 1544.
    """

    pair: bool = True
    registers: tuple[int, int, int] = (200, 160, 144)
    stage_cap: int = 3  # most stages of K; V has no more than two

    queries = 1
    SOFTMAX, CORRECT, MMA, STORE, LOAD, EDGE = 0, 4, 8, 9, 10, 11
    threads = 384

    @property
    def fits(self) -> bool:
        return max(self.depth, self.value_depth) <= DEPTH and self.pair and self.early < 4

    @property
    def inner(self) -> int:
        return DEPTH

    @property
    def inner_value(self) -> int:
        return DEPTH

    @property
    def out_over_q(self) -> bool:
        """The last product of O is done after the last one that reads Q, same pipe."""
        return True

    @property
    def value_stages(self) -> int:
        return min(self.stage_cap, 2)

    @property
    def stages(self) -> int:
        """K tiles in flight."""
        return self.stage_cap

    def stages_of(self, name: str) -> int:
        return self.value_stages if name == "v" else self.stages

    @property
    def value_place(self) -> int:
        """Bytes between the first stage of K and of V."""
        return self.stages * self.stage_bytes

    @property
    def kv_bytes(self) -> int:
        return (self.stages + self.value_stages) * self.stage_bytes

    @property
    def rings(self) -> tuple[Ring, ...]:
        """Of each CTA. The leader's q, k, v, edge, probs and rest are filled from both, its products signal both."""
        warps = GROUP // WARP * self.ctas
        return (
            Ring("q", "load", "mma", 1, 1, 0, 2 * self.q_bytes),
            # freed by the commit after the first part of the P V of the same block
            Ring("k", "load", "mma", self.stages, 1, 1, 2 * self.key_bytes),
            # the commit after P V frees it, and tells correction that O holds the block
            Ring("v", "load", "mma+correct", self.value_stages, 1, 1, 2 * self.value_bytes),
            Ring("edge", "edge", "mma", 1, self.ctas, 0, 0),
            # of even and of odd blocks, also below
            Ring("scores", "mma", "softmax", 2, 1, 0, 0),
            Ring("probs", "softmax+correct", "mma", 2, 2 * warps, 0, 0),
            Ring("rest", "softmax", "mma", 2, warps, 0, 0),
            Ring("final", "correct", "store", 1, GROUP, 0, 0),
            Ring("landed", "edge", "edge", 1, 1, 0, 0),
        )

    @property
    def value_ring(self) -> str:
        return "v"

    @property
    def last_columns(self) -> int:
        """Its correction group has registers for as many."""
        return 32

    @property
    def regions(self) -> tuple[Region, ...]:
        n, half = self.tile, self.tile // 2
        why = "a row of P is stored after its thread has loaded the row of S; the next S there is issued after P V"
        scores = tuple(Region(f"s{i}", n * i, n) for i in range(2))
        probs = tuple(Region(f"p{i}", n * i + half, half, f"s{i}", why) for i in range(2))
        return (*scores, *probs, Region("o0", 2 * n, DEPTH))

    def at(self, name: str, tile: Any) -> Any:
        """First column of `o`, or of `s` or `p` of an even or odd block."""
        return 2 * self.tile if name == "o" else super().at(name, tile)


def wide(problem: Problem, arch: str) -> Wide:
    """The plan of a problem whose depths no other has.

    Exponentials are not what takes longest, products take 2048 clocks a tile; but only one warpgroup computes them, and
    what it takes is seen where the next scores are done first. The share brings MUFU from 1032 clocks to 744.
    """
    spec = problem.spec
    return Wide(
        problem.dtype,
        problem.d,
        problem.v,
        band=spec.band,
        segments=spec.segments,
        soft_cap=spec.soft_cap,
        sinks=spec.sinks,
        sections=True,
        share=None if arch == "sm_103a" else Share(16, 6, 0),
        arch=arch,
    )
