"""What one Hopper forward object is: complete before tracing, pure Python, no batch, no length, no run-time value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa4.ffi.buffers import FLOATS_BUFFER, INTS, Buffer, value_extents
from jax_fa4.kernels.common.parts import ITEM_BYTES, REGISTER_FILE, SMEM_LIMIT, Descriptor, Kernel, Ring, rows_of
from jax_fa4.kernels.common.tiles import up
from jax_fa4.spec import Problem, Unsupported

NATIVE_DEPTHS = (64, 96, 128, 192, 256)
SMS = 132  # of an H100 or H200
MOST_PARTS = 64  # of a query tile's keys
START = 2.0  # of a CTA, with its end: about as long as so many key tiles
COMBINE_ROWS = 4  # rows that a CTA of the combining kernel takes, a warp each
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
    blocks: int = 1  # CTAs of an SM: one's start and end beside the other's work
    workers: int = 0  # CTAs in all, each takes its share of the query tiles, loads run ahead; 0: a CTA for each
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
        parts = (
            Buffer("part", "float32", ("P", "B", "N", "T", self.value_depth), "scratch"),
            Buffer("part_lse", "float32", ("P", "B", "N", "T"), "scratch"),
        )
        return base + parts * self.splits

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T, S, N and K. P: see `parts_for`."""
        e = {**shapes, **value_extents(shapes["B"])}
        if self.splits:
            e["P"] = parts_for(query_tiles(self, e), up(e["S"], self.keys), SMS * self.blocks)
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
        return tiles + sum(ring.barrier_bytes for ring in self.rings) + minima


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
    rows = up(e["B"] * e["N"] * e["T"], COMBINE_ROWS)
    taken = ("part", "part_lse", "out", "lse")
    return (main, Kernel("combine", (rows, 1, 1), 32 * COMBINE_ROWS, pointers=taken, extents=("B", "N", "T", "K", "P")))


def query_tiles(plan: Plan, e: dict[str, Any]) -> Any:
    """Of one call: `rows` queries of a head, or rows of a key head."""
    if plan.packed:
        return up(e["T"] * (e["N"] // e["K"]), plan.rows) * e["K"] * e["B"]
    return up(e["T"], plan.rows) * e["N"] * e["B"]


def parts_for(tiles: int, key_tiles: int, places: int) -> int:
    """Parts of a query tile's keys, for `places` CTAs at a time: the fewest that take the least time, counted in key
    tiles, a CTA's start and end as START of them. At least two key tiles a part.
    """

    def time(parts: int) -> float:
        return up(tiles * parts, places) * (up(key_tiles, parts) + START)

    return min(range(1, max(min(key_tiles // 2, MOST_PARTS), 1) + 1), key=time)


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


_THREE = {"rows": 192, "groups": 3, "registers": (32, 160), "overlap": False}
_LIGHT = {"chains": 4, "slack": 8.0}
# (depth of Q and K, of V and O in shared memory, band) -> fields in place of tiles_for's. Measured on an H200,
# 2026-11-29 (docs/measured/2026-11-29_h200_forward_variants.json, 25 variants of depth 64, 15 of 128): the largest
# geometric mean over sequences of 1k, 4k and 16k. TFLOP/s there; of cuDNN 9.19 in the same run; without these fields:
MEASURED: dict[tuple[int, int, bool], dict[str, Any]] = {
    # 402, 469, 493; 369, 419, 437; 313, 358, 379
    (64, 64, False): {**_THREE, **_LIGHT, "turns": True, "workers": SMS, "sections": True},
    # 274, 395, 468; 298, 375, 439; 220, 305, 363
    (64, 64, True): {"rows": 64, "groups": 1, "registers": (24, 232), "blocks": 2},
    # 527; 452; 497 (4k only)
    (96, 96, False): {**_THREE, **_LIGHT, "keys": 96, "turns": True},
    # 554, 614, 630; 497, 565, 584; 477, 593, 610
    (128, 128, False): {"workers": SMS, "sections": True},
    # 350, 513, 607; 369, 488, 538; 334, 509, 610
    (128, 128, True): {**_LIGHT, "turns": True},
    # 575; 488; 559 (4k only)
    (256, 256, True): {**_LIGHT, "turns": True},
}


FEW_QUERIES = 64  # rows of half a tile

def decode_for(depth: int, value_depth: int) -> dict[str, Any]:
    """Fields of calls with at most FEW_QUERIES queries: decoding, one token or some at a time.

    K and V are read once for all heads that share them, by as many CTAs as the card has places for. Memory is the
    limit, so bytes on their way count: two CTAs of three stages where they fit.
    """
    inner, inner_value = native(depth), native(value_depth)
    fields: dict[str, Any] = {"rows": 64, "groups": 1, "registers": (24, 240), "splits": True, "packed": True}
    if inner + inner_value <= 256:
        keys = 128 if inner + inner_value <= 128 else 64
        fields |= {"keys": keys, "blocks": 2, "stages": 3, "registers": (24, 232)}
    return fields


def few_queries(problem: Problem) -> bool:
    """Whether a call is served as decode_for says. Lengths that are symbols are not known, the plan is then that of any."""
    t, s = problem.t, problem.s
    return isinstance(t, int) and isinstance(s, int) and t <= FEW_QUERIES and s >= 512 and not problem.spec.segments


def choose(problem: Problem, any_shape: bool = False) -> Plan:
    """The plan for a forward problem, or Unsupported with what would work.

    Shapes decide between few plans, each of which serves any shape; any_shape: the one for long sequences.
    """
    spec = problem.spec
    for name, depth in (("query and key", problem.d), ("value", problem.v)):
        if depth % 8 or not 8 <= depth <= NATIVE_DEPTHS[-1]:
            raise Unsupported(f"depth {depth} of {name}: the Hopper forward takes {DEPTHS}")
    crowded = spec.segments or spec.soft_cap
    fields = tiles_for(problem.d, problem.v, crowded)
    if few_queries(problem) and not any_shape:
        fields |= decode_for(problem.d, problem.v)
    elif not crowded:
        fields |= MEASURED.get((native(problem.d), native(problem.v), spec.band), {})
    return Plan(
        problem.dtype,
        problem.d,
        problem.v,
        band=spec.band,
        segments=spec.segments,
        soft_cap=spec.soft_cap,
        sinks=spec.sinks,
        **fields,
    )
