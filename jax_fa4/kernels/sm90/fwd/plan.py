"""What one Hopper forward object is: complete before tracing, pure Python, no batch, no length, no run-time value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa4.ffi.buffers import FLOATS_BUFFER, INTS, Buffer, value_extents
from jax_fa4.kernels.common.parts import ITEM_BYTES, REGISTER_FILE, SMEM_LIMIT, Descriptor, Kernel, Ring, rows_of
from jax_fa4.kernels.common.splits import combining, parts_for, scratch
from jax_fa4.kernels.common.tiles import up

NATIVE_DEPTHS = (64, 96, 128, 192, 256)
SMS = 132  # of an H100 or H200
ITEM_WORDS = 8  # of a query tile, see told.py
DEPTHS = f"multiples of 8 up to {NATIVE_DEPTHS[-1]}"


def native(depth: int) -> int:
    """The depth in shared memory: the next native one. TMA reads the difference as zeros, and clips it when storing."""
    return next(d for d in NATIVE_DEPTHS if d >= depth)


def swizzle_of(depth: int) -> int:
    """Bytes of the swizzle of 16-bit rows of this native depth: the widest that divides a row."""
    return 128 if 2 * depth % 128 == 0 else 64


@dataclass(frozen=True)
class Plan:
    """softmax(cap(scale * Q K^T) + mask) V and its LSE, one CTA for `rows` queries of one head.

    One producer warp, `groups` math warpgroups of 64 queries each.
    """

    dtype: str
    depth: int  # of queries and keys
    value_depth: int
    band: bool = False  # causal or windows; their sides are run-time values
    segments: bool = False
    soft_cap: bool = False
    sinks: bool = False
    rows: int = 128
    keys: int = 128
    stages: int = 2
    groups: int = 2
    registers: tuple[int, int] = (24, 240)  # producer, math
    turns: bool = False  # math warpgroups issue their products in turn, one's exp2 beside the other's products
    overlap: bool = True  # exp2 of a tile also beside its own warpgroup's product of the tile before: registers for P
    held: bool = False  # with `overlap`: exp2 stays in front of the wait for that product, see `hold` in attend
    halfway: bool = False  # with `overlap`: half of exp2 stays in front of that wait, see `weigh_halfway`
    own: bool = False  # a warpgroup works on those key tiles only that its own 64 rows see, not on all of the CTA's
    blocks: int = 1  # CTAs of an SM: one's start and end beside the other's work
    workers: int = 0  # CTAs in all, each takes its share of the query tiles, loads run ahead; 0: a CTA for each
    told: bool = False  # with `workers`: the load warp, which is ahead, tells the math warps of the next query tile
    quick: bool = False  # a row is normalised by an approximate reciprocal, to 2^-23; else by a division
    bits: bool = False  # which pairs are hidden is a word of bits for each row; else two comparisons for each pair
    sections: bool = False  # order of query tiles: by length over as many heads as L2 holds; else head by head
    chains: int = 1  # independent partial maxima and sums of a row
    slack: float = -1.0  # powers of two that a row's peak may rise before older sums are shrunk; below 0: always shrunk
    splits: bool = False  # the key tiles of a query tile are shared by P CTAs, a second kernel combines what they found
    packed: bool = False  # a query's heads that share a key head are rows beside each other: few queries fill a tile
    on_fma: int = 0  # of 16 column pairs, those whose exp2 is a polynomial on the FMA pipe
    arch: str = "sm_90a"
    direction: str = "fwd"
    spill_allowance: int = 0

    launcher = "jax_fa4.kernels.sm90.fwd.kernel"

    def __post_init__(self) -> None:
        assert self.dtype in ("bfloat16", "float16"), self.dtype
        assert all(d % 8 == 0 and 8 <= d <= NATIVE_DEPTHS[-1] for d in (self.depth, self.value_depth)), self
        assert self.rows == 64 * self.groups and self.keys % 16 == 0 and self.keys <= 256, self
        assert self.smem <= SMEM_LIMIT, (self, self.smem)
        assert not self.turns or self.groups > 1, self.groups
        assert self.overlap or not (self.held or self.halfway), "without overlap no product is left to wait for"
        assert not (self.held and self.halfway), "P V is awaited behind exp2 or halfway through it"
        assert self.workers or not self.told, "a CTA of one query tile knows it"
        assert not (self.workers and self.segments), "which tiles segments share is found out by the whole CTA"
        assert not (self.workers and self.splits), "CTAs with several query tiles do not share them"
        assert not (self.packed and self.segments), "ids are looked up by row"
        assert self.splits or not self.packed, "rows of several heads are put in their places by the combining kernel"
        assert self.keys // 4 % self.chains == 0 and 0 <= self.on_fma <= 16, self
        assert self.blocks * (self.smem + 1024) <= SMEM_LIMIT + 1024, (self, self.smem)
        producer, math = self.registers
        launched = REGISTER_FILE // (self.blocks * self.threads) // 8 * 8  # of a thread; setmaxnreg moves them about
        assert producer + self.groups * math <= (1 + self.groups) * launched, (self.registers, launched)
        assert producer % 8 == math % 8 == 0, self.registers

    @property
    def form(self) -> tuple[str, ...]:
        """In words, what tells plans of one kind apart."""
        named = ("packed", "splits", "sections", "turns", "held", "halfway", "own", "workers", "told")
        chains = (f"chains {self.chains}",) * (self.chains > 1)
        return (f"{self.rows}x{self.keys}", *(name for name in named if getattr(self, name)), *chains)

    @property
    def lazy(self) -> bool:
        """Whether what few steps need, since peaks have a slack, is done in branches; see `weigh_lazily`."""
        return self.halfway and self.slack >= 0

    @property
    def hollow(self) -> bool:
        """Whether a tile of queries may have no tile of keys; else one is visited even if nothing of it is seen."""
        return self.splits or self.segments

    @property
    def inner(self) -> int:
        """Depth of Q and K in shared memory."""
        return native(self.depth)

    @property
    def inner_value(self) -> int:
        """Depth of V and O in shared memory."""
        return native(self.value_depth)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.groups)

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
            few = e["T"] * self.rows < e["S"]  # a band then hides little of S from most queries
            places, band = SMS * self.blocks, self.band and not few
            e["P"] = parts_for(query_tiles(self, e), up(e["S"], self.keys), places, band)
        return e

    @property
    def rings(self) -> tuple[Ring, ...]:
        """K and V apart, so that K's stage is free before V's; every math warp frees a stage once.

        Rows that are heads of a query lie a head apart, and a query's end: the math warps bring them themselves.
        """
        warps, item = 4 * self.groups, ITEM_BYTES[self.dtype]
        q = Ring("q", "load", "math", self.q_stages, 1, warps if self.workers else 0, item * self.rows * self.inner)
        return (q,) * (not self.packed) + (
            Ring("k", "load", "math", self.stages, 1, warps, item * self.keys * self.inner),
            Ring("v", "load", "math", self.stages, 1, warps, item * self.keys * self.inner_value),
        )

    @property
    def q_stages(self) -> int:
        """The next query tile is brought while this one is at work, where there is one."""
        return 2 if self.workers else 1

    @property
    def query_bytes(self) -> int:
        """Of the places of Q and O: O takes Q's at the end, unless the next Q is brought meanwhile."""
        q, out = self.inner, self.inner_value
        depths = self.q_stages * q + out if self.workers else max(q, out)
        return ITEM_BYTES[self.dtype] * self.rows * depths

    @property
    def smem(self) -> int:
        k, v = self.rings[-2:]
        tiles = self.query_bytes + k.stages * k.bytes + v.stages * v.bytes
        minima = 16 * (self.threads // 32) * self.segments  # two exchanges of two numbers a warp
        items = 4 * ITEM_WORDS * self.q_stages * self.told
        return tiles + sum(ring.barrier_bytes for ring in self.rings) + minima + items


def bind(plan: Plan, e: dict[str, Any], wide: Any = int) -> tuple[Kernel, ...]:
    """What one call launches. e: extents by symbol. Runs on ints (tests, verifier) and on DSL integers (launcher)."""
    buffers = {b.name: b for b in plan.inputs + plan.outputs}

    def map_of(name: str, rows: int, depth: int, store: bool = False) -> Descriptor:
        return rows_of(buffers[name], (rows, depth), e, wide, store=store, swizzle=swizzle_of(depth))

    maps = (map_of("k", plan.keys, plan.inner), map_of("v", plan.keys, plan.inner_value))
    if not plan.packed:
        maps = (map_of("q", plan.rows, plan.inner), *maps)
    if not plan.splits:
        maps = (*maps, map_of("out", 64 if plan.workers else plan.rows, plan.inner_value, store=True))
    pointers = (*(("q",) * plan.packed), "part_lse" if plan.splits else "lse", *(b.name for b in plan.inputs[3:]))
    pointers, extents = pointers + ("part",) * plan.splits, ("T", "S", "N", "K", "B") + ("P",) * plan.splits
    grid = plan.workers or query_tiles(plan, e) * (e["P"] if plan.splits else 1)
    main = Kernel("forward", (grid, 1, 1), plan.threads, maps, smem=plan.smem, pointers=pointers, extents=extents)
    if not plan.splits:
        return (main,)
    return (main, combining(e))


def query_tiles(plan: Plan, e: dict[str, Any]) -> Any:
    """Of one call: `rows` queries of a head, or rows of a key head."""
    if plan.packed:
        return up(e["T"] * (e["N"] // e["K"]), plan.rows) * e["K"] * e["B"]
    return up(e["T"], plan.rows) * e["N"] * e["B"]


def tiles_for(depth: int, value_depth: int, crowded: bool = False) -> dict[str, Any]:
    """Tile sizes by native depths. Registers of a math thread: S keys/2, P keys/4, O value_depth/2.

    crowded: segments or a soft cap, which need registers of their own.
    """
    inner, inner_value = native(depth), native(value_depth)
    if inner_value <= 128 and inner <= 192:
        return {"rows": 128, "keys": 112 if crowded and inner == 192 else 128}  # 128 spills 8 bytes there, fp16, band
    if inner_value <= 192 and inner <= 192:
        return {"rows": 128, "keys": 96}
    return {"rows": 128, "keys": 64 if crowded else 80}  # 80 spills up to 52 bytes then
