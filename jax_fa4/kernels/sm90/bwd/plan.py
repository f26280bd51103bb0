"""What one Hopper backward object is: three kernels, complete before tracing, pure Python, no batch, no length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa4.ffi.buffers import Buffer, value_extents
from jax_fa4.kernels.common.gradients import backward_inputs, gradients
from jax_fa4.kernels.common.parts import ITEM_BYTES, REGISTER_FILE, SMEM_LIMIT, Descriptor, Kernel, Ring, rows_of
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.passes.plan import BwdPre
from jax_fa4.kernels.passes.plan import bind as bind_pre
from jax_fa4.spec import Unsupported

NATIVE_DEPTHS = (64, 128, 192, 256)
DEPTHS = f"multiples of 8 up to {NATIVE_DEPTHS[-1]}"
DS_BUFFERS = 2  # so that one barrier a step is enough
POST_THREADS = 256
REACH = 4  # int32 numbers that tell a reduce warp whom it may have to wait for; three are used
SMS = 132  # of an H100 or H200; another number only changes how long the last tiles of a call take
DONE = 8  # finished query tiles of dQ that may wait to be converted


def native(depth: int) -> int:
    """The depth in shared memory: the next native one. TMA reads the difference as zeros, and clips it when storing.

    96 is none: its half, 48, is no multiple of a swizzle atom's width, and dQ is shared by halves of the depth.
    """
    return next(d for d in NATIVE_DEPTHS if d >= depth)


@dataclass(frozen=True)
class Plan:
    """dQ, dK and dV: a CTA holds `keys` keys of one key head, and takes `rows` queries a step, of each of its heads.

    One load warp, reduce warps, `groups` math warpgroups. Either each of these has 64 keys of its own; or (`apart`)
    both have the same 64 keys, the one S, P and dV of them, the other dP, dS and dK, and P goes through shared memory.
    P^T and dS^T go from registers into dV and dK. Registers of a math thread decide: dK and dV take (D + Dv) / 2 of
    them in the first form, the greater of D / 2 and Dv / 2 in the second.
    """

    dtype: str
    depth: int  # of queries and keys
    value_depth: int
    band: bool = False  # causal or windows; their sides are run-time values
    segments: bool = False
    soft_cap: bool = False
    ordered: bool = False  # deterministic: key tiles add to a query tile's dQ in one fixed order
    apart: bool = False  # one warpgroup has exp2, P and dV, the other dS and dK
    rows: int = 64  # queries of a step: 64, of whose dQ the warpgroups share the depth, or 64 for each of them
    query_stages: int = 2  # of Q and its statistics
    dout_stages: int = 2
    parts: int = 2  # float32 dQ tiles on their way out; `apart`: pieces of each warpgroup's half
    pieces: int = 1  # `apart`: in how many products a warpgroup makes its half of a dQ tile
    groups: int = 2
    registers: tuple[int, int] = (24, 240)  # load and reduce, math
    held: bool = False  # exp2 is kept before the wait for dP, which ptxas else moves up over it
    lagged: bool = False  # dK of a step runs beside exp2 of the next
    turns: bool = False  # the two warpgroups exponentiate in turn, one beside the other's products
    values_first: bool = False  # with turns: dV starts before dS is laid down, not after dQ
    early: bool = False  # the LSE is read before S and dP are awaited; in step before S starts, see `by_fours`
    late: bool = False  # dQ laid down is told to the reduce warp a step later, when the next S and dP have started
    kept: int = 0  # steps of 16 along V's depth whose rows stay in registers for dP: shared memory is read less
    direct: bool = False  # dQ leaves the registers by vector reductions to global memory: no parts, no reduce warp
    section: int = 0  # MiB of L2 for heads whose key tiles are mixed, the longest of all first; 0: see section_of
    dependent: bool = False  # main and postprocess are launched with programmatic dependence on the kernel before
    workers: int = 0  # CTAs in all: each takes tiles of keys by ticket, loads run ahead; 0 = a CTA for each
    clears: bool = False  # CTAs zero the workspace for heads to come, which stays in L2 until it is added to
    defers: bool = False  # `ordered` and `apart`: a turn is given up a step later where dQ is waiting to be added
    alternates: bool = False  # with `workers` and `band`: the heads of a query tile one after the other, see order.py
    mirrored: int = 0  # with `ordered` and `band`: key heads, the last ones, whose work goes in reverse, see order.py
    finishes: bool = False  # whoever adds last to a query tile's dQ converts it: no postprocess
    each_lane: bool = False  # every lane frees a stage of Q: compute-sanitizer follows no lane that speaks for its warp
    arch: str = "sm_90a"
    direction: str = "bwd"
    spill_allowance: int = 0

    launcher = "jax_fa4.kernels.sm90.bwd.kernel"

    def __post_init__(self) -> None:
        assert self.dtype in ("bfloat16", "float16"), self.dtype
        assert all(d % 8 == 0 and 8 <= d <= NATIVE_DEPTHS[-1] for d in (self.depth, self.value_depth)), self
        assert self.rows in (64, 64 * self.groups), self
        if self.apart:
            alone = self.turns or self.lagged or self.held or self.workers
            assert self.groups == 2 and self.rows == 64 and not alone, self
            assert self.inner // self.groups // self.pieces % 32 == 0, self
        assert not self.defers or (self.ordered and self.apart), self
        assert self.mirrored == 0 or (self.ordered and self.band and (self.turns or self.apart)), self
        assert not self.alternates or (self.workers and self.band and not self.finishes), self
        assert not (self.alternates and self.ordered) or self.mirrored, "for windows, which do not alternate"
        if self.turns:
            assert self.groups == self.query_stages == self.dout_stages == DS_BUFFERS == 2, self
            assert not (self.lagged or self.held or self.direct), self
        assert not self.early or not (self.apart or self.lagged), self
        if self.kept or self.late:
            assert not (self.apart or self.lagged or self.direct), self
            assert 16 * self.kept <= self.inner_value and (not self.late or self.parts <= 2), self
        # Reduce warps stand beside the load warp in one warpgroup; turns are taken by them.
        assert self.parts == 0 and not self.ordered if self.direct else 1 <= self.parts <= 3, self
        assert self.smem <= SMEM_LIMIT, (self, self.smem)
        if self.workers or self.finishes:
            assert self.workers and not (self.segments or self.direct or self.lagged), self
            same = self.swizzle_of("dk") == self.swizzle_of("dv")  # else dV is wrong: 64 queries a step at depth 64
            assert self.inner == self.inner_value and same, "dK and dV leave through the places of dQ"
            assert not self.clears or (self.finishes and not self.section), "heads are worked on in order"
            assert not (self.finishes and self.ordered), "with turns the last to add is always the same tile of keys"
        # What a kernel of so many threads is given at its start (ptxas counts in eights) is all that setmaxnreg shares.
        least, math = self.registers
        given = REGISTER_FILE // self.threads // 8 * 8 * self.threads
        assert 128 * (least + self.groups * math) <= given and least % 8 == math % 8 == 0, self.registers

    @property
    def form(self) -> tuple[str, ...]:
        """In words, what tells plans of one kind apart."""
        named = ("turns", "workers", "section", "kept", "late", "values_first", "early", "alternates")
        named += ("defers", "finishes", "clears")
        mirrored = (f"mirrored {self.mirrored}",) if self.mirrored else ()  # two numbers of it are chosen, by length
        return (f"{self.rows}x{self.keys}", *(name for name in named if getattr(self, name)), *mirrored)

    @property
    def keys(self) -> int:
        return 64 * self.sharing

    @property
    def sharing(self) -> int:
        """Warpgroups that share a product of scores, dK or dV, each with 64 keys of its own."""
        return 1 if self.apart else self.groups

    @property
    def crowded(self) -> bool:
        """Whether the statistics are read only where they are used; read ahead they make 4 to 212 bytes spill here."""
        return self.segments or self.soft_cap or self.rows_shared or self.inner > 128

    @property
    def by_fours(self) -> bool:
        """Whether statistics of 16 queries are loaded at once, 16 bytes a lane. D128 full in step: 0.96 to 0.98 of the
        speed without an early LSE, and three or four steps of V in registers spill with it."""
        return self.early and not self.turns

    @property
    def rows_shared(self) -> bool:
        """Whether each warpgroup makes dQ of its own 64 queries; else each makes its part of the depth."""
        return self.rows > 64

    @property
    def reducers(self) -> int:
        """Reduce warps. With `ordered` one for each part: a turn's way through L2 takes about as long as a step."""
        if self.apart:
            return 0 if self.direct else self.groups  # each has its own half of dQ's depth
        return self.parts if self.ordered or self.direct else 1

    @property
    def finishers(self) -> int:
        """Warps that convert finished query tiles of dQ."""
        return 2 * self.finishes

    @property
    def counted(self) -> bool:
        """Whether those that add to a query tile's dQ are counted."""
        return self.ordered or self.finishes

    @property
    def chained(self) -> bool:
        """Whether turns are told by name, since segments decide who adds: a query tile's says which key tile added
        last, and the preprocess tells who visits what."""
        return self.ordered and self.segments

    @property
    def item_words(self) -> int:
        """int32 numbers that tell a role of its next tile of keys."""
        return 8 + self.rises

    @property
    def rises(self) -> bool:
        """Whether some of the work goes through its queries descending."""
        return self.alternates or self.mirrored > 0

    @property
    def places(self) -> int:
        """Tiles of dK or dV that fit where one tile of dQ stands on its way out."""
        return 4 * self.rows // (ITEM_BYTES[self.dtype] * self.keys)

    @property
    def inner(self) -> int:
        """Depth of Q and K in shared memory."""
        return native(self.depth)

    @property
    def inner_value(self) -> int:
        """Depth of V and dO in shared memory."""
        return native(self.value_depth)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.groups)

    def depth_of(self, name: str) -> int:
        """Depth of an operand or gradient in shared memory."""
        return self.inner_value if name in ("v", "dv", "dout") else self.inner

    def swizzle_of(self, name: str) -> int:
        """Bytes of the swizzle: 64 where a warpgroup reads a part of the depth that 64 columns do not divide."""
        shared = name in ("k", "dk") and not self.rows_shared
        return 128 if self.depth_of(name) // (self.groups if shared else 1) % 64 == 0 else 64

    @property
    def pre(self) -> BwdPre:
        """The preprocess of this plan's tile. The workspace holds the true depth: zero columns need no adding."""
        return BwdPre(
            self.arch,
            self.dtype,
            self.value_depth,
            self.rows,
            self.depth,
            fragments=self.by_fours,
            turns=self.halves if self.apart and self.ordered else self.counted,
            tickets=self.ordered or self.workers > 0,
            releases=self.dependent,
            unseen=self.keys * self.finishes,
            band=self.band,
            workers=self.workers * self.clears,
            ranges=self.keys * self.chained,
        )

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return backward_inputs(self)

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return gradients(self) + tuple(b for b in self.pre.outputs if b.name != "dq")

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T, S, N and K. M: query tiles; L: key tiles."""
        tiles = {"M": up(shapes["T"], self.rows), "L": up(shapes["S"], self.keys)}
        return {**shapes, **value_extents(shapes["B"]), **tiles}

    @property
    def part_numbers(self) -> int:
        """float32 numbers of one place of dQ in shared memory: a tile, or a piece of a warpgroup's half of one."""
        return self.rows * self.inner // (self.groups * self.pieces if self.apart else 1)

    @property
    def rings(self) -> tuple[Ring, ...]:
        """K and V stay; Q comes with its statistics (LSE, delta); every math warp frees and fills a stage once.

        With workers, `item` tells all roles what comes next, and K and V are freed at a tile's end. With finishes,
        `done` says of each dQ tile added whether it was the last addition.
        """
        stay = 4 * self.groups * (self.workers > 0)
        told = 4 * self.groups + self.reducers
        warps, item = 4 * self.groups, ITEM_BYTES[self.dtype]
        part_of = warps // len(self.part_rings or "1")
        query = item * self.rows * self.inner + 8 * self.rows
        return (
            Ring("k", "load", "math", 1, 1, stay, item * self.keys * self.inner),
            Ring("v", "load", "math", 1, 1, stay, item * self.keys * self.inner_value),
            Ring("q", "load", "math", self.query_stages, 1, warps * (32 if self.each_lane else 1), query),
            Ring("dout", "load", "math", self.dout_stages, 1, warps, item * self.rows * self.inner_value),
        ) + (
            tuple(Ring(name, "math", "reduce", self.parts, part_of, 1, 0) for name in self.part_rings)
            + (Ring("item", "load", "others", 2, 1, told, 0),) * (self.workers > 0)
            + (
                Ring("done", "reduce", "finish", DONE, 1, self.finishers, 0),
                Ring("landed", "finish", "finish", 1, 1, 0, 4 * self.rows * self.depth),
            )
            * self.finishes
        )

    @property
    def halves(self) -> int:
        """Warpgroups that have columns of dQ's true depth, with `apart`."""
        return min(self.groups, -(-self.groups * self.pieces * self.depth // self.inner))

    @property
    def part_rings(self) -> tuple[str, ...]:
        """Rings that dQ leaves through: one, or with `apart` one for each warpgroup."""
        if self.direct:
            return ()
        return tuple(f"dq{n}" for n in range(self.groups)) if self.apart else ("dq",)

    @property
    def smem(self) -> int:
        """Bytes of the tiles, statistics and barriers, and of what segments and turns add."""
        filled = sum(ring.stages * ring.bytes for ring in self.rings if ring.name != "landed")
        squares = ITEM_BYTES[self.dtype] * self.keys * self.rows * DS_BUFFERS
        parts = 4 * self.part_numbers * self.parts * len(self.part_rings)
        parts += 4 * self.keys * self.rows * self.apart  # P in float32, from the one warpgroup to the other
        barriers = sum(ring.barrier_bytes for ring in self.rings)
        more = 4 * REACH * self.reducers if self.chained else 16 * (self.threads // 32) * self.segments
        more += 4 * self.ordered * (not self.workers)
        more += 2 * self.item_words * 4 * (self.workers > 0) + 4 * (DONE + self.part_numbers) * self.finishes
        return filled + squares + parts + barriers + more


def bind(plan: Plan, e: dict[str, Any], wide: Any = int) -> tuple[Kernel, ...]:
    """What one call launches. e: extents by symbol. Runs on ints (tests, verifier) and on DSL integers (launcher)."""
    buffers = {b.name: b for b in plan.inputs + plan.outputs}

    def map_of(name: str, rows: int, store: bool = False) -> Descriptor:
        box = (rows, plan.depth_of(name))
        return rows_of(buffers[name], box, e, wide, store=store, swizzle=plan.swizzle_of(name))

    keys = [map_of(name, plan.keys, name[0] == "d") for name in ("k", "v", "dk", "dv")]
    maps = (*keys, map_of("q", plan.rows), map_of("dout", plan.rows))
    counts = ("turns", "tickets", "cleared", "ranges")
    scratch = ("stats", "work", *(b.name for b in plan.pre.outputs if b.name in counts))
    values = ("ints", "floats", *(("q_segments", "kv_segments") if plan.segments else ()))
    main = Kernel(
        "backward",
        (plan.workers or up(e["S"], plan.keys) * e["K"] * e["B"], 1, 1),
        plan.threads,
        maps,
        plan.dependent,
        smem=plan.smem,
        pointers=scratch + ("dq",) * plan.finishes + values,
        extents=("T", "S", "N", "K", "M", "B"),
    )
    post = Kernel(
        "bwd_post",
        (e["M"] * (plan.rows // 64) * e["N"] * e["B"], 1, 1),
        POST_THREADS,
        dependent=plan.dependent,
        pointers=("work", "dq", "floats"),
        extents=("T", "N", "M"),
    )
    return (bind_pre(plan.pre, e), main) + (post,) * (not plan.finishes)


def section_of(plan: Any, query_tiles: Any, key_tiles: Any, group: Any, high: Any = max) -> Any:
    """Key heads in a section: as many as fit in L2 with their Q, dO, dQ, K and V, at least one.

    With few queries more: CTAs at one key head come after one another to each of its query tiles, so no more of them
    should be at it than half of what each visits. Its keys, which one CTA reads once, need no place in L2 for that.

    Without a size, where tiles differ: as many as `workers` take at once, so that each turn of all CTAs has the longest
    tiles and the shortest, and nobody starts with a longest one at the end. No more data than head by head is in use.
    """
    if plan.workers and plan.band and not (plan.section or plan.ordered or plan.clears):
        return abreast(plan.workers, key_tiles, high)
    step = plan.rows * (6 * plan.depth + 2 * plan.value_depth) // 1024  # KiB; dQ is float32
    held = plan.keys * (2 * plan.depth + 2 * plan.value_depth) // 1024
    visits = high(query_tiles * group, 1)
    few = 2 * SMS // visits if plan.section else 1
    return high(plan.section * 1024 // high(visits * step + key_tiles * held, 1), high(few, 1))


def abreast(workers: int, key_tiles: Any, high: Any = max) -> Any:
    """How many key heads' key tiles are all taken at once, at least one."""
    return high(workers // high(key_tiles, 1), 1)


def sectioned(index: Any, tiles: Any, heads: Any, section: Any, last_first: bool, low: Any = min) -> tuple[Any, Any]:
    """(key tile, head) of a place in the order of work; `heads` counts those of all examples.

    Section after section; in each, the first tiles of all its heads, then the second ones: under a causal mask these
    have most to do, and the work of a call ends with its shortest. last_first: the other way round, for turns.
    """
    before = index // (tiles * section) * section
    rest = index - before * tiles
    width = low(section, heads - before)
    tile = rest // width
    return tiles - 1 - tile if last_first else tile, before + rest % width


def block_of(plan: Plan, group: Any, chunk: Any) -> Any:
    """Where 8 columns by 64 rows of dQ lie in a tile of the workspace, counted in blocks of 128 threads' 4 numbers.

    group: the warpgroup that made them; chunk: which 8 of its columns. Columns past the true depth come last, so that
    the workspace need not hold them.
    """
    chunks = plan.part_numbers // (512 * plan.groups)
    return chunk * plan.groups + group if plan.rows_shared else group * chunks + chunk


def form_for(depth: int, value_depth: int) -> dict[str, Any]:
    """The form and the stages by depths. The first that fits shared memory, in order of what a stage is worth."""
    inner, inner_value = native(depth), native(value_depth)
    apart = inner + inner_value > 256
    form: dict[str, Any] = {"apart": apart, "pieces": 2 if apart and inner > 192 else 1}
    for parts, query_stages, dout_stages in ((2, 2, 2), (1, 2, 2), (1, 2, 1)):
        form |= {"parts": parts, "query_stages": query_stages, "dout_stages": dout_stages}
        try:
            Plan("bfloat16", depth, value_depth, segments=True, ordered=True, **form)
        except AssertionError:
            continue
        return form
    raise Unsupported(f"depths {depth} and {value_depth}: the Hopper backward has no tile that fits shared memory")
