"""The Blackwell backward at depths that leave no room for dK and dV together: a sweep for each gradient, by pairs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from jax_fa4.ffi.buffers import value_extents
from jax_fa4.kernels.common.parts import ITEM_BYTES, REGISTER_FILE, SMEM_LIMIT, Kernel, Ring, rows_of
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.passes.plan import BwdPre
from jax_fa4.kernels.passes.plan import bind as bind_pre
from jax_fa4.kernels.sm100.bwd.base import Backward
from jax_fa4.kernels.sm100.bwd.plan import ARCHS, DEEPEST, GROUP, WARP
from jax_fa4.kernels.sm100.bwd.plan import NATIVE_DEPTHS as SHALLOW
from jax_fa4.kernels.sm100.regions import Region, check_regions
from jax_fa4.spec import KERNEL_DTYPES, Problem

# Depths in shared memory: TMA reads what the true one lacks as zeros, and clips stores.
NATIVE_DEPTHS = (128, 192, DEEPEST)
# What each sweep reads, by its part in the products; see Sweep.
OPERANDS = {
    "dv": {"score_a": "k", "score_b": "q", "turned": "dout"},
    "dk": {"score_a": "k", "score_b": "q", "slope_a": "v", "slope_b": "dout", "turned": "q"},
    "dq": {"score_a": "q", "score_b": "k", "slope_a": "dout", "slope_b": "v", "turned": "k"},
}


@dataclass(frozen=True)
class WidePlan(Backward):
    """dV, dK and dQ, each by a kernel of its own that computes the scores again: see docs/decisions.

    Nothing is added up in global memory: no workspace, no turns, no order of CTAs that a sum depends on. So results are
    the same bits in every run, and a deterministic call has this plan too.
    """

    dtype: str
    depth: int  # of queries and keys
    value_depth: int
    band: bool = False  # causal or windows; their sides are run-time values. Lengths always are
    segments: bool = False
    soft_cap: bool = False
    registers: tuple[int, int] = (208, 96)  # a thread of compute, of the other warps
    dependent: bool = True  # kernels of a call start while those before them end, and wait before they read
    arch: str = "sm_100a"
    direction: str = "bwd"
    spill_allowance: int = 0

    pair = True
    DEPTHS = NATIVE_DEPTHS
    ROLES = ("COMPUTE", "MMA", "LOAD")
    launcher = "jax_fa4.kernels.sm100.bwd.wide.kernel"
    tile = 128  # rows of a CTA, and rows of the other side that a step takes
    ctas = 2
    leader = 0  # of a pair: issues its products
    # First warp of each role; compute has two warpgroups of four warps. The last two warps idle.
    COMPUTE, MMA, LOAD = 0, 8, 9
    threads = 384

    def __post_init__(self) -> None:
        compute, rest = self.registers
        assert self.arch in ARCHS and self.dtype in KERNEL_DTYPES, self
        assert fits(self.depth, self.value_depth), self
        assert all(x % 8 == 0 for x in self.registers), f"registers come in steps of 8: {self.registers}"
        used = GROUP * (2 * compute + rest)
        assert used <= REGISTER_FILE, f"{self.registers} take {used} registers of {REGISTER_FILE}"
        for sweep in self.sweeps:
            assert sweep.smem <= SMEM_LIMIT, f"{sweep.smem} bytes of shared memory, {SMEM_LIMIT} are there: {sweep}"
            check_regions(sweep.regions)

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        """In the order in which they are launched."""
        same = {f.name: getattr(self, f.name) for f in fields(WidePlan)}
        return tuple(Sweep(**same, gradient=gradient) for gradient in OPERANDS)

    # Operands ------------------------------------------------------------------------------------------------------
    @property
    def pre(self) -> BwdPre:
        """The preprocess of this plan's tile: statistics, and no workspace."""
        return BwdPre(self.arch, self.dtype, self.value_depth, self.tile, 0, releases=self.dependent)

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T, S, N and K. M: query tiles."""
        return {**shapes, **value_extents(shapes["B"]), "M": up(shapes["T"], self.tile)}


@dataclass(frozen=True)
class Sweep(WidePlan):
    """One gradient: a pair of CTAs has 256 rows of it, 128 each, in tensor memory, and takes 128 rows of the other side
    a step. The rows are keys of dV and dK, whose other side are queries; of dQ it is the other way round.

    scores = score_a score_b^T        dP = slope_a slope_b^T        gradient += (P or dS) turned

    Every product is one of the pair (cta_group::2): each CTA brings its own 128 rows of A and half of B. What is B of
    two products comes twice, by rows for scores and dP, by depth where it is summed over its rows (`turned`).
    """

    gradient: str = "dv"

    def __post_init__(self) -> None:
        assert self.gradient in OPERANDS, self

    @property
    def slopes(self) -> bool:
        """Whether dP is wanted: dV takes P as it is."""
        return self.gradient != "dv"

    @property
    def by_query(self) -> bool:
        """Whether the rows are queries."""
        return self.gradient == "dq"

    @property
    def places(self) -> int:
        """Of what changes with each step, in shared memory and of scores in tensor memory. dV has no dP there, so the
        scores of the next step need not wait until those of this one were read."""
        return 1 if self.slopes else 2

    @property
    def width(self) -> int:
        """Columns of the gradient in tensor memory."""
        return self.depth_of(self.gradient)

    # Shared memory -------------------------------------------------------------------------------------------------
    @property
    def operands(self) -> dict[str, str]:
        """Part in the products -> buffer."""
        return OPERANDS[self.gradient]

    @property
    def boxes(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each part's tile in a CTA's shared memory; `out`: of the gradient, in score_a's place."""
        n, found = self.tile, {}
        for part, buffer in self.operands.items():
            depth = self.depth_of(buffer)
            halves = {"score_b": (n // 2, depth), "slope_b": (n // 2, depth), "turned": (n, depth // 2)}
            found[part] = halves.get(part, (n, depth))
        return found | {"out": (n, self.width)}

    @staticmethod
    def swizzle(box: tuple[int, int]) -> int:
        """Bytes of a row that are swizzled: of 96 columns a turned operand takes 32 at a time."""
        return 128 if box[1] % 64 == 0 else 64

    def tile_bytes(self, part: str) -> int:
        rows, columns = self.boxes[part]
        return ITEM_BYTES[self.dtype] * rows * columns

    def stages_of(self, part: str) -> int:
        """Tiles of a part in shared memory."""
        return 1 if part in ("score_a", "slope_a", "out") else self.places

    @property
    def rings(self) -> tuple[Ring, ...]:
        """Every product signals both CTAs, and is waited for by whoever takes its result and whoever refills its
        operands. What compute hands over it hands to the leader, which issues products; counts are in warps of both
        CTAs. A tile that changes is full in the leader when it is in both CTAs: see `arrivals`.
        """
        compute, places = 2 * 2 * GROUP // WARP, self.places
        size = {part: self.tile_bytes(part) for part in self.boxes}
        made = [
            Ring("score_a", "load", "mma", 1, 1, 0, size["score_a"]),
            # freed by `scores`
            Ring("score_b", "load", "mma", places, 1, 0, size["score_b"]),
            Ring("turned", "load", "mma", places, 1, 1, size["turned"]),
            # Scores are there; empty: they were read. Two places: freed by the product that reads P there.
            Ring("scores", "mma", "compute", places, 1, compute * self.slopes, 0),
        ]
        if self.slopes:
            made += [
                Ring("slope_a", "load", "mma", 1, 1, 0, size["slope_a"]),
                # freed by `slopes`
                Ring("slope_b", "load", "mma", 1, 1, 0, size["slope_b"]),
                # dP is there; freed by `weights`, as the next one is issued behind the product that reads dS there
                Ring("slopes", "mma", "compute", 1, 1, 0, 0),
            ]
        if not self.by_query:  # LSE and delta of a query tile, of this CTA alone; a thread with one query keeps its own
            made.append(Ring("stats", "load", "compute", 2, 1, compute // 2, 8 * self.tile))
        # P or dS is in tensor memory
        made.append(Ring("weights", "compute", "mma", places, compute, 0, 0))
        # The gradient is done, and with it everything
        return (*made, Ring("final", "mma", "compute", 1, 1, 0, 0))

    # Full in the leader when the other CTA says that it is full there too, so that one wait is enough.
    PAIRED = ("score_b", "slope_b", "turned")

    def arrivals(self, ring: Ring, rank: Any) -> Any:
        """Arrivals that fill a stage of the ring in the CTA of that rank."""
        return ring.full + (1 - rank) if ring.name in self.PAIRED else ring.full

    @property
    def own_bytes(self) -> int:
        """Of score_a's place, which the gradient takes at the end."""
        return max(self.tile_bytes("score_a"), self.tile_bytes("out"))

    @property
    def smem(self) -> int:
        """Bytes: tiles with their statistics, barriers, the address of tensor memory, and what segments add."""
        filled = sum(ring.stages * ring.bytes for ring in self.rings) + self.own_bytes - self.tile_bytes("score_a")
        barriers = sum(ring.barrier_bytes for ring in self.rings)
        return filled + barriers + 16 + 16 * (self.threads // WARP) * self.segments

    # Tensor memory -------------------------------------------------------------------------------------------------
    @property
    def regions(self) -> tuple[Region, ...]:
        """P, or dS, lies in two halves over what its own warpgroup has read, as where a CTA is alone."""
        n, half, quarter = self.tile, self.tile // 2, self.tile // 4
        own = "a thread has read its half of a row before it writes there; the next {} is issued after the product"
        made = [Region("s", 0, n)]
        made.append(Region("dp", n, n) if self.slopes else Region("s_next", n, n))
        kept = (("ds", "dp"),) if self.slopes else (("p", "s"), ("p_next", "s_next"))
        for name, square in kept:
            start = n if square != "s" else 0
            made += [
                Region(f"{name}{g}", start + half * g, quarter, square, own.format(square.upper())) for g in range(2)
            ]
        return (*made, Region(self.gradient, 2 * n, self.width))

    def at(self, name: str) -> int:
        """First column of a region."""
        return next(r.start for r in self.regions if r.name == name)


def fits(depth: int, value_depth: int) -> bool:
    """Whether sweeps take these depths."""
    return all(d % 8 == 0 and 8 <= d <= NATIVE_DEPTHS[-1] for d in (depth, value_depth))


def wanted(depth: int, value_depth: int) -> bool:
    """Whether no other plan takes these depths: dV and dK leave their CTA no columns for the scores."""
    deep = max(depth, value_depth) > SHALLOW[-1] or min(depth, value_depth) > 128
    return deep and fits(depth, value_depth)


def bind(plan: WidePlan, e: dict[str, Any], wide: Any = int) -> tuple[Kernel, ...]:
    """What one call launches. e: extents by symbol. Runs on ints (tests, verifier) and on DSL integers (launcher)."""
    buffers = {b.name: b for b in plan.inputs + plan.outputs}
    made = [bind_pre(plan.pre, e)]
    for sweep in plan.sweeps:
        boxes = sweep.boxes
        maps = [
            rows_of(buffers[buffer], boxes[part], e, wide, swizzle=sweep.swizzle(boxes[part]))
            for part, buffer in sweep.operands.items()
        ]
        maps.append(rows_of(buffers[sweep.gradient], boxes["out"], e, wide, store=True))
        rows, lines = (e["T"], e["N"]) if sweep.by_query else (e["S"], e["K"])
        kernel = Kernel(
            sweep.gradient,
            (plan.ctas * up(rows, plan.ctas * plan.tile) * lines * e["B"], 1, 1),
            plan.threads,
            tuple(maps),
            dependent=plan.dependent,
            cluster=plan.ctas,
            smem=sweep.smem,
            pointers=("stats", "ints", "floats", *(("q_segments", "kv_segments") if plan.segments else ())),
            extents=("T", "S", "N", "K", "M"),
        )
        made.append(kernel)
    return tuple(made)


def wide(problem: Problem, arch: str) -> WidePlan:
    """The plan of a problem whose depths no other has."""
    spec = problem.spec
    kinds = {"band": spec.band, "segments": spec.segments, "soft_cap": spec.soft_cap}
    return WidePlan(problem.dtype, problem.d, problem.v, **kinds, arch=arch)
