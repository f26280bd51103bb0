"""Plan of the Blackwell forward: tiles, rings, memory maps and registers of one object, and what one call launches.

Pure Python and complete before tracing; no batch, no length, no run-time value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax_fa4.ffi.buffers import FLOATS_BUFFER, INTS, Buffer, value_extents
from jax_fa4.kernels.common.parts import ITEM_BYTES, REGISTER_FILE, SMEM_LIMIT, Kernel, Ring, rows_of
from jax_fa4.kernels.common.splits import combining, parts_for, scratch
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.sm100.regions import Region, check_regions
from jax_fa4.spec import KERNEL_DTYPES, Problem, Unsupported

ARCHS = ("sm_100a", "sm_103a")
GROUP = 128  # threads of a warpgroup, and lanes of tensor memory
WARP = 32
PIECE = 64  # 16-bit columns of a 128-byte swizzled row
TILE_BUDGET = 224 * 1024  # bytes for tiles; the rest of the 227 KiB holds statistics and barriers
FEW_STAGES = 3  # O takes Q's place rather than leave fewer than this for K and V
NATIVE_DEPTHS = ((64, 64), (128, 128), (192, 128))  # (queries and keys, values) in shared memory
DEEPEST = 256  # of a pair's plan with one query tile a CTA, see wide/plan.py
DEPTHS = f"multiples of 8 up to {DEEPEST}"


def native(depth: int, value_depth: int) -> tuple[int, int] | None:
    """Depths in shared memory; TMA reads the difference as zeros and clips it on the way out. None if none fits."""
    return next(((d, v) for d, v in NATIVE_DEPTHS if depth <= d and value_depth <= v), None)


class Share(NamedTuple):
    """Which exponentials the FMA pipe computes: the last `count` of every `period` columns of a quarter of a row, from
    quarter `first` on, never in the last quarter (the tensor pipe waits for its weights)."""

    period: int
    count: int
    first: int
    degree: int = 4  # of the polynomial; 3 costs one FMA less and shows in the log-sum-exp


SHARE = Share(16, 4, 1)  # of a plan that says nothing else


@dataclass(frozen=True)
class Plan:
    """One object. Query tiles of 128 rows in pairs, key blocks of 128, visited from the last to the first."""

    dtype: str
    depth: int  # of queries and keys
    value_depth: int
    band: bool = False  # causal or windows; their sides are run-time values. Lengths always are
    segments: bool = False
    soft_cap: bool = False
    sinks: bool = False
    pair: bool = False  # clusters of two CTAs: products of 256 rows, half of each K and V tile in each CTA
    early: int = 3  # quarters of P that are handed over first; 4 = all at once
    lazy: float = 8.0  # a row keeps its reference maximum until it grows by more than this, log2 units; 0 = never
    share: Share | None = SHARE  # None = every exponential on MUFU
    registers: tuple[int, int, int] = (192, 80, 48)  # a thread of softmax, of correction, of the other warps
    workers: int = 0  # CTAs in all, each takes its share of the pairs of query tiles; 0: a CTA for each
    sections: bool = False  # order of pairs: by length over as many heads as L2 holds; else head by head
    splits: bool = False  # the blocks of a pair are shared by P CTAs, a second kernel combines what they found
    packed: bool = False  # heads that share a key head are rows beside each other: few queries fill a tile
    skips: bool = True  # no half of a pair meets a block that it sees nothing of
    stage_cap: int = 10  # most stages of K and V; tests lower it so that the ring wraps within two blocks
    baked_scale: float | None = None  # for equality proofs only: a constant in place of floats[scale]
    arch: str = "sm_100a"
    direction: str = "fwd"
    spill_allowance: int = 0

    launcher = "jax_fa4.kernels.sm100.fwd.kernel"
    tile = 128
    # First warp of each role; softmax has two warpgroups of four warps, correction one.
    SOFTMAX, CORRECT, MMA, STORE, LOAD, EDGE = 0, 8, 12, 13, 14, 15
    threads = 512
    queries = 2  # query tiles of a CTA; softmax has as many warpgroups

    def __post_init__(self) -> None:
        softmax, correct, rest = self.registers
        assert self.arch in ARCHS and self.dtype in KERNEL_DTYPES, self
        assert self.fits, f"depths {self.depth}, {self.value_depth} have no tile"
        assert self.depth % 8 == 0 == self.value_depth % 8, self
        assert all(x % 8 == 0 for x in self.registers), f"registers come in steps of 8: {self.registers}"
        used = GROUP * (self.queries * softmax + correct + rest)
        # A CTA starts with an equal share for every thread, in steps of 8, and never has more than it started with.
        have = REGISTER_FILE // self.threads // 8 * 8 * self.threads
        assert used <= have, f"{self.registers} take {used} registers of {have}"
        assert 1 <= self.early <= 4 and self.stages >= 2, self
        # Weights reach 2^lazy and must stay finite in the 16-bit type.
        assert 0 <= self.lazy <= 15, f"lazy={self.lazy}: weights up to 2^{self.lazy} overflow float16"
        assert self.smem <= SMEM_LIMIT, f"{self.smem} bytes of shared memory, {SMEM_LIMIT} are there: {self}"
        assert not (self.splits and (self.workers or self.pair)), "CTAs that share keys have one pair of tiles each"
        assert self.splits or not self.packed, "rows of several heads are put in their places by the combining kernel"
        assert not (self.packed and self.segments), "ids are looked up by row"
        assert not (self.workers and self.out_over_q), "the next Q would wait for O to be stored; and it spills"
        assert not (self.workers and self.pair), "no CTA leaves its pair between two query tiles, nor counts for both"
        assert not (self.workers and self.segments), "which blocks segments share is found out by the whole CTA"
        check_regions(self.regions)

    @property
    def form(self) -> tuple[str, ...]:
        """What tells it from other plans of the same kind of call, in words."""
        words = {"packed": "few queries", "splits": "shared keys", "pair": "pairs", "workers": "persistent"}
        return tuple(word for name, word in words.items() if getattr(self, name))

    @property
    def fits(self) -> bool:
        """Whether this kind of plan has the depths."""
        return native(self.depth, self.value_depth) is not None

    @property
    def ctas(self) -> int:
        """That share K and V."""
        return 2 if self.pair else 1

    @property
    def leader(self) -> int | None:
        """Rank of the CTA of a pair that issues the products and holds the barriers that they wait for."""
        return 0 if self.pair else None

    @property
    def rows(self) -> int:
        """Queries of one product."""
        return self.ctas * self.tile

    @property
    def span(self) -> int:
        """Queries of a CTA or of a pair."""
        return self.queries * self.rows

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Warps by role, for counters and reports."""
        first = {"softmax": self.SOFTMAX, "correct": self.CORRECT, "mma": self.MMA, "store": self.STORE}
        first |= {"load": self.LOAD, "edge": self.EDGE}
        ends = [*list(first.values())[1:], self.threads // WARP]
        return {name: tuple(range(a, b)) for (name, a), b in zip(first.items(), ends, strict=True)}

    # Shared memory -------------------------------------------------------------------------------------------------
    @property
    def inner(self) -> int:
        """Depth of Q and K in shared memory."""
        return (native(self.depth, self.value_depth) or (0, 0))[0]

    @property
    def inner_value(self) -> int:
        """Depth of V and O in shared memory and of O in tensor memory."""
        return (native(self.depth, self.value_depth) or (0, 0))[1]

    @property
    def q_bytes(self) -> int:
        """Of a tile of Q."""
        return ITEM_BYTES[self.dtype] * self.tile * self.inner

    @property
    def out_bytes(self) -> int:
        """Of a tile of O."""
        return ITEM_BYTES[self.dtype] * self.tile * self.inner_value

    @property
    def key_bytes(self) -> int:
        """Of what a CTA has of a tile of K: all, or the keys of its half."""
        return self.q_bytes // self.ctas

    @property
    def value_bytes(self) -> int:
        """Of what a CTA has of a tile of V: all, or the columns of its half."""
        return self.out_bytes // self.ctas

    @property
    def value_piece(self) -> int:
        """Columns of V in one swizzled row of shared memory."""
        return min(PIECE, self.inner_value // self.ctas)

    @property
    def stage_bytes(self) -> int:
        """A stage holds a CTA's part of a tile of K or of V."""
        return max(self.key_bytes, self.value_bytes)

    @property
    def out_over_q(self) -> bool:
        """Whether O takes Q's place: the last product of O is done after the last one that reads Q, same pipe."""
        return not self.splits and TILE_BUDGET - 2 * (self.q_bytes + self.out_bytes) < FEW_STAGES * self.stage_bytes

    @property
    def query_bytes(self) -> int:
        """The tiles of Q and of O."""
        q, out = self.queries * self.q_bytes, 0 if self.splits else self.queries * self.out_bytes
        return max(q, out) if self.out_over_q else q + out

    @property
    def stages(self) -> int:
        """K and V tiles in flight."""
        return min(self.stage_cap, (TILE_BUDGET - self.query_bytes) // self.stage_bytes)

    @property
    def kv_bytes(self) -> int:
        return self.stages * self.stage_bytes

    def stages_of(self, name: str) -> int:
        """Of "k" or "v"."""
        return self.stages

    @property
    def value_place(self) -> int:
        """Bytes between the first stages of K and of V: they share theirs."""
        return 0

    @property
    def value_ring(self) -> str:
        return "kv"

    @property
    def rings(self) -> tuple[Ring, ...]:
        """Of each CTA. In a pair the leader's q, kv, edge, probs and rest are filled from both, and its products signal
        both; what crosses arrives by warps."""
        ctas = self.ctas
        again = int(self.workers > 0)  # for the next pair of tiles
        join = 2 * GROUP // WARP * ctas if self.pair else 2 * GROUP
        return (
            Ring("q", "softmax", "mma", 2, GROUP, 0, 0)
            if self.packed
            else Ring("q", "load", "mma", 2, 1, again, ctas * self.q_bytes),
            # K0 V0 K1 V1 ...; a stage is freed by the commit after the second product that reads it
            Ring("kv", "load", "mma", self.stages, 1, 1, ctas * self.stage_bytes),
            # V's rows past the length in the first visited block are zero
            Ring("edge", "edge", "mma", 1, ctas, again, 0),
            # S is complete; freed by `probs`, as the product that overwrites it is issued after the one that reads P
            Ring("scores", "mma", "softmax", 2, 1, 0, 0),
            # the join before P V: the first part of P is stored (softmax) and O is rescaled (correction)
            Ring("probs", "softmax+correct", "mma", 2, join, 0, 0),
            # the last quarter of P; a warp arrives as one
            Ring("rest", "softmax", "mma", 2, GROUP // WARP * ctas, 0, 0),
            # the last product of O is done
            Ring("acc", "mma", "correct", 2, 1, 0, 0),
            # filled through named barriers, a warp of softmax to the warp of correction with the same rows
            Ring("stats", "softmax", "correct", 2, 0, GROUP, 0),
            # O, normalised, in shared memory
            *(Ring("final", "correct", "store", 2, GROUP, again, 0),) * (not self.splits),
            # the leader, that the other's half of the first V is there too: its bytes count on the leader's barrier
            *(Ring("landed", "edge", "edge", 1, 1, 0, 0),) * self.pair,
        )

    @property
    def stats_words(self) -> int:
        """float32 words: factor or row sum of two tiles, then row maximum of two tiles."""
        return 4 * self.tile

    @property
    def smem(self) -> int:
        """Bytes: tiles, statistics, barriers, the address of tensor memory."""
        barriers = sum(ring.barrier_bytes for ring in self.rings)
        minima = 16 * (self.threads // WARP) * self.segments  # two exchanges of two numbers a warp
        return self.query_bytes + self.kv_bytes + 4 * self.stats_words + barriers + 16 + minima

    # Tensor memory -------------------------------------------------------------------------------------------------
    @property
    def regions(self) -> tuple[Region, ...]:
        n, half = self.tile, self.tile // 2
        why = "a row of P is stored after its thread has loaded the row of S; the next S is issued after P V"
        scores = tuple(Region(f"s{i}", n * i, n) for i in range(2))
        probs = tuple(Region(f"p{i}", n * i + half, half, f"s{i}", why) for i in range(2))
        out = tuple(Region(f"o{i}", 2 * n + self.inner_value * i, self.inner_value) for i in range(2))
        return scores + probs + out

    def at(self, name: str, tile: Any) -> Any:
        """First column of region `s`, `p` or `o` of a query tile; the tile may be a run-time integer."""
        first, second = (next(r.start for r in self.regions if r.name == f"{name}{i}") for i in range(2))
        return first + (second - first) * tile

    # Arithmetic ----------------------------------------------------------------------------------------------------
    def emulated(self, column: int) -> bool:
        """Is the exponential of the pair (column, column + 1) computed on the FMA pipe?"""
        if self.share is None:
            return False
        quarter = self.tile // 4
        place = column % quarter % self.share.period
        return self.share.first <= column // quarter < 3 and place >= self.share.period - self.share.count

    @property
    def last_columns(self) -> int:
        """Of O in registers of the correction group at a time, when it leaves. Beside 32 and their 16-bit copies 4 to
        32 bytes of what outlives them spill (ptxas of DSL 4.8.1, 2026-11-30): where a soft cap leaves that group few
        registers (see `choose`), with segments, or where rows are put one by one and have sinks; and 12 bytes in
        bfloat16 with segments and sinks, without a cap or a band, at depths above 64."""
        capped = self.soft_cap and (self.segments or (self.splits and self.sinks))
        deep = self.inner > 64 and self.segments and self.sinks and not self.band
        return 16 if capped or deep else 32

    @property
    def emulated_columns(self) -> int:
        """Of the tile's columns."""
        return sum(2 * self.emulated(c) for c in range(0, self.tile, 2))

    # Operands ------------------------------------------------------------------------------------------------------
    @property
    def inputs(self) -> tuple[Buffer, ...]:
        base = (
            Buffer("q", self.dtype, ("B", "T", "N", self.depth)),
            Buffer("k", self.dtype, ("B", "S", "K", self.depth)),
            Buffer("v", self.dtype, ("B", "S", "K", self.value_depth)),
            INTS,
            FLOATS_BUFFER,
        )
        ids = (Buffer("q_segments", "int32", ("B", "T")), Buffer("kv_segments", "int32", ("B", "S")))
        return base + ids * self.segments + (Buffer("sinks", "float32", ("N",)),) * self.sinks

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        base = (
            Buffer("out", self.dtype, ("B", "T", "N", self.value_depth), "out"),
            Buffer("lse", "float32", ("B", "N", "T"), "out"),
        )
        return base + scratch(self.value_depth) * self.splits

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T, S, N and K. P: see `parts_for`."""
        e = {**shapes, **value_extents(shapes["B"])}
        if self.splits:
            e["P"] = parts_for(pairs_of(self, e), up(e["S"], self.tile), SMS)
        return e


def bind(plan: Plan, e: dict[str, Any], wide: Callable[[Any], Any] = int) -> tuple[Kernel, ...]:
    """The launches of one call. `e`: extents by symbol, ints or the DSL's integers; `wide` makes one 64-bit."""
    buffers = {b.name: b for b in plan.inputs + plan.outputs}
    piece = 2 * plan.value_piece
    maps = (
        *(rows_of(buffers["q"], (plan.tile, plan.inner), e, wide),) * (not plan.packed),
        rows_of(buffers["k"], (plan.tile // plan.ctas, plan.inner), e, wide),
        rows_of(buffers["v"], (plan.tile, plan.inner_value // plan.ctas), e, wide, swizzle=piece),
        *(rows_of(buffers["out"], (plan.tile, plan.inner_value), e, wide, store=True),) * (not plan.splits),
    )
    grid = (plan.workers or pairs_of(plan, e) * plan.ctas * (e["P"] if plan.splits else 1), 1, 1)
    pointers = (*("q",) * plan.packed, "part_lse" if plan.splits else "lse", *(b.name for b in plan.inputs[3:]))
    pointers, extents = pointers + ("part",) * plan.splits, ("T", "S", "N", "K", "B") + ("P",) * plan.splits
    more = {"cluster": plan.ctas, "smem": plan.smem, "pointers": pointers, "extents": extents}
    main = Kernel("forward", grid, plan.threads, maps, **more)
    return (main, combining(e)) if plan.splits else (main,)


def pairs_of(plan: Plan, e: dict[str, Any]) -> Any:
    """Pairs of query tiles of one call (of two pairs, for a pair of CTAs)."""
    if plan.packed:
        return up(e["T"] * (e["N"] // e["K"]), 2 * plan.rows) * e["K"] * e["B"]
    return up(e["T"], plan.span) * e["N"] * e["B"]


def share_of(depth: int, band: bool, arch: str) -> Share | None:
    """By the counters, clocks of a 128 x 128 tile: at depth 64 the products take 512 and all exponentials on MUFU 1024,
    with this share 768; from depth 65 on the products take 1024 or more, full 832, with a band 896. sm_103's MUFU is
    twice as wide and needs no help."""
    if arch == "sm_103a":
        return None
    if depth <= 64:
        return Share(8, 4, 1)
    return Share(16, 4, 1) if band else Share(10, 4, 1)


def clocks(plan: Plan) -> dict[str, float]:
    """Clocks that each unit is busy for one 128 x 128 tile, by the rules that the emulator's counts confirm."""
    d, v, n = plan.inner, plan.inner_value, plan.tile
    mufu = 32 if plan.arch == "sm_103a" else 16
    return {
        "tensor": 4 * (d + v),
        "exp": n * (n + 1 - plan.emulated_columns) / mufu,  # one more a row: the factor of a new maximum
        # Operands: Q, K and V, of a pair half of K and V; fills: K and V once for all query tiles; 1 KiB of statistics.
        "shared memory": 2 * d + (2 * d + 2 * v) / plan.ctas * (1 + 1 / plan.queries) + 8,
    }


LONG = 1024  # queries and keys from which a pair is considered: what it costs to start one is not counted above
PAIR_REGISTERS = {  # by whether there is a band: what spills nothing (ptxas of DSL 4.8.1, 2026-11-30)
    True: (192, 88, 40),
    False: (184, 88, 56),
}
PAIR_REGISTERS_192 = (184, 80, 64)  # at depths 192 and 128, without a band


def paired(plan: Plan) -> Plan:
    """The same plan on pairs of CTAs."""
    registers = PAIR_REGISTERS[plan.band]
    if plan.inner > 128 and not plan.band:
        registers = PAIR_REGISTERS_192
    return replace(plan, pair=True, registers=registers, workers=0)


def pair_pays(plan: Plan, queries: int, keys: int) -> bool:
    """By the counters: whether the longest unit's clocks, over all CTAs that are launched for a head, are fewer.

    A pair has 512 queries, so up to 256 more are computed for nothing. With a band each of its tiles visits what any of
    the four sees: a tile more in the mean, which the 8 clocks of 1032 that it saves at depth 128 never repay.
    """
    if plan.band or plan.segments or plan.soft_cap or min(queries, keys) < LONG:
        return False
    one, two = max(clocks(plan).values()), max(clocks(paired(plan)).values())
    return 2 * up(queries, 4 * plan.tile) * two < up(queries, 2 * plan.tile) * one


FEW_QUERIES = 64  # a pair of tiles of theirs alone would be three quarters empty
FEW_KEYS = 512  # fewer are not worth a second kernel
SMS = 148  # of a B200; a card with more leaves some idle, one with fewer would do some pairs last and alone


def persistent(depth: int, value_depth: int, arch: str) -> dict[str, Any]:
    """Fields of calls whose pairs of query tiles all take equally long: as many CTAs as SMs share them, so that loads
    of a pair run beside the end of the one before. At depth 128 the single warps' loops then want 64 registers (244
    bytes spill with 48), softmax keeps 184, which without a polynomial are too few (36 bytes spill): not on sm_103. Nor
    where O takes Q's place: no load could run ahead."""
    tiles = native(depth, value_depth)
    if tiles == (64, 64):
        return {"workers": SMS}
    return {"workers": SMS, "registers": (184, 80, 64)} if tiles == (128, 128) and arch != "sm_103a" else {}


def few_queries(problem: Problem) -> bool:
    """Decoding, one token or some at a time: K and V are read once for all heads that share them, by as many CTAs as
    the card has places for. Lengths that are symbols are not known."""
    t, s = problem.t, problem.s
    known = isinstance(t, int) and isinstance(s, int)
    return known and t <= FEW_QUERIES and s >= FEW_KEYS and not problem.spec.segments


def stand_ins(problem: Problem) -> list[Problem]:
    """Problems of the same kind, so that each plan that shapes may decide for is the plan of one."""
    return [replace(problem, t=t, s=4 * LONG) for t in (4 * LONG, 4 * LONG + 100, LONG - 1, 1)]


def choose(problem: Problem, arch: str = "sm_100a", any_shape: bool = False) -> Plan:
    """The plan that serves this problem, or Unsupported with the argument's name and what would work.

    Shapes decide between few plans, each of which is right for any shape; any_shape: one that no shape decides for.
    """
    spec = problem.spec
    if arch not in ARCHS:
        raise Unsupported(f"arch {arch!r}: this kernel is built for {' and '.join(ARCHS)}")
    if problem.dtype not in KERNEL_DTYPES:
        raise Unsupported(f"dtype {problem.dtype}: the Blackwell forward takes {' and '.join(KERNEL_DTYPES)}")
    for name, depth in (("query and key", problem.d), ("value", problem.v)):
        if depth % 8 or depth < 8:
            raise Unsupported(f"depth {depth} of {name}: the Blackwell forward takes {DEPTHS}")
    if max(problem.d, problem.v) > DEEPEST:
        raise Unsupported(f"depths {problem.d} (query, key), {problem.v} (value): the Blackwell forward takes {DEPTHS}")
    for name, wanted in (
        ("bias", spec.bias),
        ("mask", spec.mask),
    ):
        if wanted:
            raise Unsupported(f"{name}: the Blackwell forward has no kernel for it; implementation='xla' computes it")
    if native(problem.d, problem.v) is None:
        from jax_fa4.kernels.sm100.fwd.wide.plan import wide

        return wide(problem, arch)
    more: dict[str, Any] = {"sections": True}
    if not (spec.band or spec.segments or spec.soft_cap):
        more = persistent(problem.d, problem.v, arch)
    few = few_queries(problem) and not any_shape
    if few:
        more = {"splits": True, "packed": True}
    if spec.soft_cap:
        # Its temporaries want registers, and two more results of MUFU a score. So: the largest share, and a band, which
        # may be unbounded; without one 8 bytes spill.
        # Of parts, correction puts its rows itself and wants more.
        more |= {"soft_cap": True, "registers": (200, 72, 40) if few else (208, 56, 40), "band": True}
    plan = Plan(
        problem.dtype,
        problem.d,
        problem.v,
        segments=spec.segments,
        sinks=spec.sinks,
        **{"band": spec.band, **more},
        share=share_of(64 if spec.soft_cap else problem.d, spec.band, arch),
        arch=arch,
    )
    known = isinstance(problem.t, int) and isinstance(problem.s, int) and not any_shape
    return paired(plan) if known and not few and pair_pays(plan, problem.t, problem.s) else plan
