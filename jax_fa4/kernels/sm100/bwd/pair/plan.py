"""What one Blackwell backward object of CTA pairs is: three kernels, complete before tracing, pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa4.ffi.buffers import value_extents
from jax_fa4.kernels.common.parts import ITEM_BYTES, REGISTER_FILE, SMEM_LIMIT, Descriptor, Kernel, Ring, rows_of
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.passes.plan import BwdPre
from jax_fa4.kernels.passes.plan import bind as bind_pre
from jax_fa4.kernels.sm100.bwd import plan as single
from jax_fa4.kernels.sm100.bwd.base import Backward
from jax_fa4.kernels.sm100.bwd.order import copies
from jax_fa4.kernels.sm100.bwd.wide.plan import WidePlan, wanted, wide
from jax_fa4.kernels.sm100.regions import Region, check_regions
from jax_fa4.spec import KERNEL_DTYPES, Problem

ARCHS = ("sm_100a", "sm_103a")
GROUP = 128  # threads of a warpgroup, and lanes of tensor memory
WARP = 32
# Depths in shared memory: TMA reads what the true one lacks as zeros, and clips stores. Of values the first only.
NATIVE_DEPTHS = (128, 192)
SHALLOWEST = 72  # a depth that 64 columns would hold wastes half of every product here
POST_THREADS = 256
POST_ROWS = 64  # queries of one CTA of the postprocess
CAPPED_REGISTERS = (96, 176, 64)
CAPPED_BOTH_WAYS_REGISTERS = (88, 176, 72)  # 40 bytes spill in float16 with segments; with those above 96
ORDERED_REGISTERS = (104, 168, 72)
DEEP_REGISTERS = (128, 136, 112)


@dataclass(frozen=True)
class PairPlan(Backward):
    """dQ, dK and dV: a pair of CTAs holds 256 keys of one key head, 128 each, and takes 128 queries a step.

    Every product is one of the pair (cta_group::2): each CTA brings its own rows of A and half of B. S^T, dP^T, dV and
    dK have keys as rows, so each CTA has all of them for its own keys, as without a pair. dQ sums over keys: before it,
    the CTAs exchange halves of dS, so that each has 64 queries by all 256 keys, and then the sum of both for its
    queries. So a pair adds to dQ once where two CTAs would add twice.

    At depth 192 neither shared nor tensor memory holds tiles of 128 queries: a step is done in two parts of 64, but for
    dQ, of which the pair's product has 128 rows at least.

    An operand that is B of two products is brought twice, as B is cut along different axes: by rows for S^T and dP^T
    (q, dout), by depth for dK, dV and dQ (qt, doutt, kt).
    """

    dtype: str
    depth: int  # of queries and keys
    value_depth: int
    band: bool = False  # causal or windows; their sides are run-time values. Lengths always are
    segments: bool = False
    soft_cap: bool = False
    ordered: bool = False  # deterministic: pairs add to a query tile's dQ in one fixed order
    slices: int = 2  # places for slices of dQ on their way out
    registers: tuple[int, int, int] = (88, 160, 104)  # a thread of reduce, of compute, of the other warps
    dependent: bool = True  # kernels of a call start while those before them end, and wait before they read
    arch: str = "sm_100a"
    direction: str = "bwd"
    # No bfloat16 form spills at the full depths and no form that is chosen did, of 24 and 18 built (DSL 4.8.1,
    # 2026-11-30); segments in float16 do, 16 bytes. Depths between were sampled: a value must not fail a user's build.
    spill_allowance: int = 64

    pair = True
    DEPTHS = NATIVE_DEPTHS
    launcher = "jax_fa4.kernels.sm100.bwd.pair.kernel"
    tile = 128  # keys of a CTA, queries of a step
    ctas = 2
    leader = 0  # of a pair: issues its products
    # First warp of each role; compute has two warpgroups of four warps, reduce one. The last two warps idle.
    REDUCE, COMPUTE, MMA, LOAD = 0, 4, 12, 13
    threads = 512

    def __post_init__(self) -> None:
        reduce, compute, rest = self.registers
        assert self.arch in ARCHS and self.dtype in KERNEL_DTYPES, self
        assert fits(self.depth, self.value_depth), self
        assert self.parts == 1 or not self.segments, f"segments at depth {self.depth} have no pair form"
        assert all(x % 8 == 0 for x in self.registers), f"registers come in steps of 8: {self.registers}"
        used = GROUP * (reduce + 2 * compute + rest)
        assert used <= REGISTER_FILE, f"{self.registers} take {used} registers of {REGISTER_FILE}"
        assert self.smem <= SMEM_LIMIT, f"{self.smem} bytes of shared memory, {SMEM_LIMIT} are there: {self}"
        check_regions(self.regions)

    # Shapes --------------------------------------------------------------------------------------------------------
    @property
    def inner_value(self) -> int:
        """Likewise of V, dO and dV."""
        return NATIVE_DEPTHS[0]

    @property
    def parts(self) -> int:
        """Parts of a step, of `span` queries each."""
        return 2 if self.inner > 128 else 1

    @property
    def span(self) -> int:
        return self.tile // self.parts

    @property
    def unit(self) -> int:
        """Consecutive queries of one compute thread: of a part, group g has [2 i + g, 2 i + g + 1) units, i = 0, 1."""
        return self.span // 4

    @property
    def half(self) -> int:
        """Columns of a CTA's half of Q, K and dQ."""
        return self.inner // 2

    @property
    def slice(self) -> int:
        """Columns of tensor memory that leave at a time: those of 64 queries by two times as many of dQ's."""
        return 16 if self.parts == 1 else 8

    # Shared memory -------------------------------------------------------------------------------------------------
    @property
    def boxes(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each operand's tile in a CTA's shared memory."""
        n, span, value = self.tile, self.span, self.inner_value
        return {
            "k": (n, self.inner),
            "v": (n, value),
            "q": (span // 2, self.inner),
            "dout": (span // 2, value),
            "qt": (span, self.half),
            "doutt": (span, value // 2),
            "kt": (2 * n, self.half),
        }

    @staticmethod
    def swizzle(box: tuple[int, int]) -> int:
        """Bytes of a row that are swizzled: of 96 columns a turned operand takes 32 at a time."""
        return 128 if box[1] % 64 == 0 else 64

    @property
    def squares(self) -> dict[str, tuple[int, int]]:
        """Likewise of dS: this CTA's 64 queries by the pair's keys, and its keys by the queries of the other one."""
        return {"ds": (2 * self.tile, self.tile // 2), "parcel": (self.tile, self.tile // 2)}

    def tile_bytes(self, name: str) -> int:
        rows, columns = (self.boxes | self.squares)[name]
        return ITEM_BYTES[self.dtype] * rows * columns

    @property
    def rings(self) -> tuple[Ring, ...]:
        """K, V and Kt stay. Every product signals both CTAs, and is waited for by whoever takes its result and whoever
        refills its operands. What compute and reduce hand over they hand to the leader, which issues products; counts
        are in warps of both CTAs. A tile of q, dout, qt, doutt or trade is full in the leader when it is in both: see
        `arrivals`.
        """
        compute, reduce = 2 * 2 * GROUP // WARP, 2 * GROUP // WARP
        tiles = {name: self.tile_bytes(name) for name in self.boxes}
        return (
            Ring("k", "load", "mma", 1, 1, 0, tiles["k"]),
            Ring("v", "load", "mma", 1, 1, 0, tiles["v"]),
            Ring("kt", "load", "mma", 1, 1, 0, tiles["kt"]),
            # freed by `scores` and `slopes`
            Ring("q", "load", "mma", 1, 1, 0, tiles["q"]),
            Ring("dout", "load", "mma", 1, 1, 0, tiles["dout"]),
            Ring("qt", "load", "mma", 1, 1, 1, tiles["qt"]),
            Ring("doutt", "load", "mma", 1, 1, 1, tiles["doutt"]),
            # LSE and delta of a query tile, of this CTA alone
            Ring("stats", "load", "compute", 2, 1, compute // 2, 8 * self.tile),
            # S^T is there; empty: it was read, so that dQ may take half of its columns
            Ring("scores", "mma", "compute", 1, 1, compute, 0),
            Ring("probs", "compute", "mma", 1, compute, 0, 0),
            # dP^T is there
            Ring("slopes", "mma", "compute", 1, 1, 0, 0),
            # dS^T is in tensor memory
            Ring("ds", "compute", "mma", 1, compute, 0, 0),
            # dS of the CTA's own queries and keys is in its shared memory; freed by `dq`
            Ring("square", "compute", "mma", 1, compute // 2, 0, 0),
            # and what the other CTA has sent; freed by `dq`
            Ring("trade", "compute", "mma", 1, 1, 0, self.tile_bytes("parcel")),
            # dQ of a step is there, and all that was issued before it; empty: it was read
            Ring("dq", "mma", "reduce", 1, 1, reduce, 0),
        )

    # Full in the leader when the other CTA says that it is full there too, so that one wait is enough.
    PAIRED = ("q", "dout", "qt", "doutt", "trade")

    def arrivals(self, ring: Ring, rank: Any) -> Any:
        """Arrivals that fill a stage of the ring in the CTA of that rank."""
        return ring.full + (1 - rank) if ring.name in self.PAIRED else ring.full

    @property
    def slice_numbers(self) -> int:
        """float32 numbers of one slice of dQ in shared memory."""
        return GROUP * self.slice

    @property
    def smem(self) -> int:
        """Bytes: operands with statistics, dS and the parcel, slices of dQ, barriers, the address of tensor memory, and
        what segments and turns add."""
        filled = sum(ring.stages * ring.bytes for ring in self.rings if ring.name != "trade")
        squares = sum(self.tile_bytes(name) for name in self.squares)
        barriers = sum(ring.barrier_bytes for ring in self.rings)
        more = 16 + 4 * self.ordered + 16 * (self.threads // WARP) * self.narrows
        return filled + squares + 4 * self.slices * self.slice_numbers + barriers + more

    @property
    def narrows(self) -> bool:
        """Whether query tiles of other segments are left out. Ordered, ranks are counted by the band alone, so that
        every tile of it takes its turn."""
        return self.segments and not self.ordered

    # Tensor memory -------------------------------------------------------------------------------------------------
    @property
    def regions(self) -> tuple[Region, ...]:
        """Five accumulators in 512 columns: dQ, of 64 queries, takes the half of S^T's columns that P^T leaves.

        Group g of a CTA's compute warps reads its units' columns, and writes its part of P^T (dS^T) over the first of
        them: no thread waits for another's reads. Of each S^T: it is read; then P^T is there, and dQ of the last step.
        """
        n, left = self.span, self.span // 2
        own = "a thread has read all its columns before it writes there; the next {} is issued after the product"
        late = "issued when every thread has read the next S^T; the S^T after that waits until dQ was read"
        turns = max(n, left + self.half)
        return (
            Region("turns", 0, turns),
            Region("s", 0, n, "turns", late, (0, 1)),
            Region("p", 0, left, "turns", own.format("S^T"), (1, 2)),
            Region("dq", left, self.half, "turns", late, (1, 2)),
            Region("dp", turns, n),
            Region("ds", turns, left, "dp", own.format("dP^T")),
            Region("dv", turns + n, self.inner_value),
            Region("dk", turns + n + self.inner_value, self.inner),
        )

    def at(self, name: str) -> int:
        """First column of a region."""
        return next(r.start for r in self.regions if r.name == name)

    # Operands ------------------------------------------------------------------------------------------------------
    @property
    def pre(self) -> BwdPre:
        """The preprocess of this plan's tile."""
        made = dict.fromkeys(("turns", "tickets", "copies"), self.ordered) | {"releases": self.dependent}
        return BwdPre(self.arch, self.dtype, self.value_depth, self.tile, self.inner, **made)

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T, S, N and K. M: query tiles; C: copies of dQ, see ../order.py."""
        tiles = up(shapes["T"], self.tile), up(shapes["S"], self.ctas * self.tile)
        made = {**shapes, **value_extents(shapes["B"]), "M": tiles[0]}
        if self.ordered:
            size = 4 * shapes["B"] * shapes["N"] * tiles[0] * self.tile * self.inner
            most = 1 if self.band else 2  # a step takes 3336 clocks, as many as a turn may
            made["C"] = copies(most, size, shapes["B"] * shapes["K"], tiles, self.band)
        return made


# Shared name -> the buffer that fills it, in launch order; gradients leave from k's and v's places.
LOADED = {"k": "k", "v": "v", "kt": "k", "q": "q", "dout": "dout", "qt": "q", "doutt": "dout"}
STORED = {"dk": "k", "dv": "v"}


def bind(plan: PairPlan, e: dict[str, Any], wide: Any = int) -> tuple[Kernel, ...]:
    """What one call launches. e: extents by symbol. Runs on ints (tests, verifier) and on DSL integers (launcher)."""
    buffers = {b.name: b for b in plan.inputs + plan.outputs}
    boxes = plan.boxes
    maps: list[Descriptor] = [
        rows_of(buffers[b], boxes[name], e, wide, swizzle=plan.swizzle(boxes[name])) for name, b in LOADED.items()
    ]
    maps += [rows_of(buffers[name], boxes[place], e, wide, store=True) for name, place in STORED.items()]
    scratch = ("stats", "work", *(("turns", "tickets") if plan.ordered else ()))
    ordered = ("C",) * plan.ordered
    main = Kernel(
        "backward",
        (plan.ctas * up(e["S"], plan.ctas * plan.tile) * e["K"] * e["B"], 1, 1),
        plan.threads,
        tuple(maps),
        dependent=plan.dependent,
        cluster=plan.ctas,
        smem=plan.smem,
        pointers=(*scratch, "ints", "floats", *(("q_segments", "kv_segments") if plan.segments else ())),
        extents=("T", "S", "N", "K", "M", *ordered),
    )
    post = Kernel(
        "bwd_post",
        (e["M"] * (plan.tile // POST_ROWS) * e["N"] * e["B"], 1, 1),
        POST_THREADS,
        dependent=plan.dependent,
        pointers=("work", *("turns",) * plan.ordered, "dq", "floats"),
        extents=("T", "N", "M", *ordered),
    )
    return bind_pre(plan.pre, e), main, post


def worth(problem: Problem) -> bool:
    """Whether a pair is expected to be faster than two CTAs. Lengths must not decide: an object serves all of them.

    A tile at depth 128 takes 3336 clocks of shared memory, fills and statistics included, where a CTA alone takes 3912,
    and that bounds either form (tests/test_counted_*; emulator, 2026-11-30). So a pair gains where its 256 keys are
    seen by the queries that one half sees: 1.17 with many key tiles, 0.88 with three, as the fourth is empty. Under a
    band or with segments it visits every query tile that either half sees; how many more these are is a run-time matter
    (1.06 of aligned causal at 2k, half as many again of a narrow window): not chosen there.
    """
    spec = problem.spec
    return fits(problem.d, problem.v) and not (spec.band or spec.segments)


def fits(depth: int, value_depth: int) -> bool:
    """Whether there is a pair form for these depths. At 192 a tile takes 4744 clocks, and the products 3328."""
    return (
        depth % 8 == value_depth % 8 == 0
        and SHALLOWEST <= depth <= NATIVE_DEPTHS[1]
        and SHALLOWEST <= value_depth <= NATIVE_DEPTHS[0]
    )


def registers_for(depth: int, **kinds: bool) -> tuple[int, int, int]:
    """Shares with which ptxas spills nothing, by the plan's depth and fields.

    Found by trying, as spills do not fall steadily with registers (DSL 4.8.1, 2026-11-30; a test builds every form).
    """
    if depth > NATIVE_DEPTHS[0]:
        return DEEP_REGISTERS
    if kinds["soft_cap"]:
        return CAPPED_BOTH_WAYS_REGISTERS if kinds["ordered"] and kinds["band"] else CAPPED_REGISTERS
    plain = not (kinds["band"] or kinds["segments"])
    return ORDERED_REGISTERS if plain and kinds["ordered"] else PairPlan.registers


def choose(problem: Problem, arch: str = "sm_100a") -> PairPlan | WidePlan | single.Plan:
    """The plan for a backward problem: of pairs where that is worth it, else of single CTAs, or Unsupported; a sweep a
    gradient at depths that these do not take."""
    spec = problem.spec
    served = problem.dtype in KERNEL_DTYPES and arch in ARCHS and not (spec.bias or spec.mask)
    if wanted(problem.d, problem.v) and served:
        return wide(problem, arch)
    if not worth(problem) or problem.dtype not in KERNEL_DTYPES or spec.bias or spec.mask:
        return single.choose(problem, arch)  # or refuses what neither takes
    kinds = {"band": False, "segments": False, "soft_cap": spec.soft_cap, "ordered": spec.deterministic}
    return PairPlan(
        problem.dtype, problem.d, problem.v, **kinds, registers=registers_for(problem.d, **kinds), arch=arch
    )
