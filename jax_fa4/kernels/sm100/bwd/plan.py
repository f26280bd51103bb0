"""What one Blackwell backward object is: three kernels, complete before tracing, pure Python, no batch, no length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa4.ffi.buffers import value_extents
from jax_fa4.kernels.common.parts import ITEM_BYTES, REGISTER_FILE, SMEM_LIMIT, Descriptor, Kernel, Ring, rows_of
from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.passes.plan import BwdPre
from jax_fa4.kernels.passes.plan import bind as bind_pre
from jax_fa4.kernels.sm100.bwd.base import Backward
from jax_fa4.kernels.sm100.bwd.order import copies
from jax_fa4.kernels.sm100.regions import TMEM_COLUMNS, Region, check_regions
from jax_fa4.spec import KERNEL_DTYPES, Problem, Unsupported

ARCHS = ("sm_100a", "sm_103a")
GROUP = 128  # threads of a warpgroup, and lanes of tensor memory
WARP = 32
PIECE = 64  # 16-bit columns of a 128-byte swizzled row
NATIVE_DEPTHS = (64, 128, 192)
DEEPEST = 256  # of bwd/wide, for what is deeper than here
SLICE = 32  # columns of dQ that leave at a time
# Where dQ has 64 columns, and with segments; found by trying, as spills do not fall steadily with registers.
SHALLOW_REGISTERS = {False: (120, 152, 88), True: (104, 160, 88)}
# Depths of 128 and 64 without a mask: dO has two stages there, and its descriptors want them in the MMA warp, where 12
# to 36 bytes spill else. That compute has 120 then suffices, but not with segments.
UNEQUAL_REGISTERS = (160, 120, 112)
CAPPED_REGISTERS = (80, 184, 64)
SERIAL_REGISTERS = (80, 168, 96)  # without a soft cap; else 8 to 92 bytes spill with these
# Heads (of all examples) whose key tiles are taken across: key tiles of one head that run at once wait for each other's
# turns, so few should; and some should, as they read the same queries. 148 SMs then hold four or five of a head.
SECTION = 32
POST_THREADS = 256
POST_ROWS = 64  # queries of one CTA of the postprocess


@dataclass(frozen=True)
class Plan(Backward):
    """dQ, dK and dV: a CTA holds 128 keys of one key head, and takes 128 queries a step, of each of its heads.

    Tensor memory holds S^T and dP^T (lanes are keys), dV and dK, and dQ of a step (lanes are queries). P^T and dS^T are
    written over S^T and dP^T by the threads that have read these, and are operand A of dV and dK from there. Where
    dV and dK leave no room for all that at a time (a depth above 128), it takes turns: see `serial`.
    """

    dtype: str
    depth: int  # of queries and keys
    value_depth: int
    band: bool = False  # causal or windows; their sides are run-time values. Lengths always are
    segments: bool = False
    soft_cap: bool = False
    ordered: bool = False  # deterministic: key tiles add to a query tile's dQ in one fixed order
    at_once: bool = True  # a whole row of dQ is read at once, which frees tensor memory early; else slice by slice
    slices: int = 2  # places for slices of dQ on their way out
    query_stages: int = 2
    registers: tuple[int, int, int] = (160, 136, 80)  # a thread of reduce, of compute, of the other warps
    dependent: bool = True  # kernels of a call start while those before them end, and wait before they read
    arch: str = "sm_100a"
    direction: str = "bwd"
    spill_allowance: int = 0

    DEPTHS = NATIVE_DEPTHS
    launcher = "jax_fa4.kernels.sm100.bwd.kernel"
    tile = 128
    # First warp of each role; compute has two warpgroups of four warps, reduce one. The last two warps idle.
    REDUCE, COMPUTE, MMA, LOAD = 0, 4, 12, 13
    threads = 512

    def __post_init__(self) -> None:
        reduce, compute, rest = self.registers
        assert self.arch in ARCHS and self.dtype in KERNEL_DTYPES, self
        assert all(d % 8 == 0 and 8 <= d <= NATIVE_DEPTHS[-1] for d in (self.depth, self.value_depth)), self
        assert all(x % 8 == 0 for x in self.registers), f"registers come in steps of 8: {self.registers}"
        used = GROUP * (reduce + 2 * compute + rest)
        assert used <= REGISTER_FILE, f"{self.registers} take {used} registers of {REGISTER_FILE}"
        assert self.inner + self.inner_value <= 320, f"dK and dV leave no room for the scores: {self}"
        # S of the next step is issued before dK of this one, which reads the same Q, unless steps are serial.
        assert self.query_stages >= 2 - self.serial and self.slices >= 1, self
        assert self.smem <= SMEM_LIMIT, f"{self.smem} bytes of shared memory, {SMEM_LIMIT} are there: {self}"
        check_regions(self.regions)

    # Shared memory -------------------------------------------------------------------------------------------------
    def stages_of(self, name: str) -> int:
        """Tiles of an operand in shared memory."""
        return {"q": self.query_stages, "dout": self.dout_stages}.get(name, 1)

    def tile_bytes(self, name: str) -> int:
        """Of one tile of an operand."""
        return ITEM_BYTES[self.dtype] * self.tile * self.depth_of(name)

    @property
    def dout_stages(self) -> int:
        """At the full depths there is room for one: dO comes while S, dK and dQ are made."""
        return 1 if self.inner + self.inner_value > 192 else 2

    @property
    def rings(self) -> tuple[Ring, ...]:
        """K and V stay. What the MMA warp fills or frees, a commit does; the others' counts are in warps."""
        compute, reduce = 2 * GROUP // WARP, GROUP // WARP
        return (
            Ring("k", "load", "mma", 1, 1, 0, self.tile_bytes("k")),
            Ring("v", "load", "mma", 1, 1, 0, self.tile_bytes("v")),
            Ring("q", "load", "mma", self.query_stages, 1, 1, self.tile_bytes("q")),
            Ring("dout", "load", "mma", self.dout_stages, 1, 1, self.tile_bytes("dout")),
            # LSE and delta of a query tile
            Ring("stats", "load", "compute", 2, 1, compute, 8 * self.tile),
            # S^T is there; freed by `probs`: the next S^T is issued after dV, which is issued after P^T was stored
            Ring("scores", "mma", "compute", 1, 1, 0, 0),
            Ring("probs", "compute", "mma", 1, compute, 0, 0),
            # dP^T is there, so the dQ before it is done, and dS in shared memory may be overwritten
            Ring("slopes", "mma", "compute", 1, 1, 0, 0),
            # dS^T is in tensor memory, and in shared memory
            Ring("ds", "compute", "mma", 1, compute, 0, 0),
            # dQ of a step is there; empty: it was read
            Ring("dq", "mma", "reduce", 1, 1, reduce, 0),
            # dK and dV are done, and with them everything
            Ring("final", "mma", "compute", 1, 1, 0, 0),
        )

    @property
    def slice_numbers(self) -> int:
        """float32 numbers of one slice of dQ in shared memory."""
        return self.tile * SLICE

    @property
    def smem(self) -> int:
        """Bytes: tiles with their statistics, dS, slices of dQ, barriers, the address of tensor memory, and what
        segments and turns add."""
        filled = sum(ring.stages * ring.bytes for ring in self.rings)
        square = ITEM_BYTES[self.dtype] * self.tile * self.tile
        barriers = sum(ring.barrier_bytes for ring in self.rings)
        more = 16 + 4 * self.ordered + 16 * (self.threads // WARP) * self.narrows
        return filled + square + 4 * self.slices * self.slice_numbers + barriers + more

    @property
    def narrows(self) -> bool:
        """Whether the main kernel finds which query tiles segments leave a key tile; else, if any, see `chained`."""
        return self.segments and not self.ordered

    @property
    def chained(self) -> bool:
        """Whether turns are told by name, since segments decide who adds, and the preprocess tells who visits what."""
        return self.segments and self.ordered

    # Tensor memory -------------------------------------------------------------------------------------------------
    @property
    def serial(self) -> bool:
        """Whether S^T, dP^T and dQ of a step take turns in the columns that dV and dK leave: a step starts when the one
        before it has ended. The tensor pipe then waits for the threads, and they for it."""
        return max(self.inner, self.inner_value) > 128

    @property
    def dq_apart(self) -> bool:
        """Whether dQ has columns of its own; else it takes those of dP^T."""
        return 2 * self.tile + 2 * self.inner + self.inner_value <= TMEM_COLUMNS and not self.serial

    @property
    def regions(self) -> tuple[Region, ...]:
        """By name, where everything lies."""
        return self._serial_regions if self.serial else self._skewed_regions

    @property
    def _serial_regions(self) -> tuple[Region, ...]:
        """In the order of the products: S, dV (reads P), dP, dK (reads dS), dQ. P and dS lie as in the skewed form."""
        n, quarter, start = self.tile, self.tile // 4, self.inner + self.inner_value
        why = "products follow each other; threads have read S before dV, dP before dK, dQ before the next S"
        dp = min(start + n, TMEM_COLUMNS - n)
        made = [Region("dv", 0, self.inner_value), Region("dk", self.inner_value, self.inner)]
        made += [Region("turns", start, TMEM_COLUMNS - start), Region("s", start, n, "turns", why, (0, 1))]
        made += [Region(f"p{g}", start + n // 2 * g, quarter, "turns", why, (1, 2)) for g in range(2)]
        made += [Region("dp", dp, n, "turns", why, (3, 4))]
        made += [Region(f"ds{g}", dp + n // 2 * g, quarter, "turns", why, (4, 5)) for g in range(2)]
        return (*made, Region("dq", start, self.inner, "turns", why, (6, 7)))

    @property
    def _skewed_regions(self) -> tuple[Region, ...]:
        """P^T and dS^T lie in two halves, each over the scores that its own warpgroup has read: no thread waits for
        another's reads. An instruction's step of 16 queries lies within a half, and has an address of its own."""
        n, half, quarter = self.tile, self.tile // 2, self.tile // 4
        own = "a thread has read its half of a row before it writes there; the next {} is issued after the product"
        made = []
        for square, name, start in (("s", "p", 0), ("dp", "ds", n)):
            made.append(Region(square, start, n))
            made += [
                Region(f"{name}{g}", start + half * g, quarter, square, own.format(square.upper())) for g in range(2)
            ]
        dv, dk = 2 * n, 2 * n + self.inner_value
        made += [Region("dv", dv, self.inner_value), Region("dk", dk, self.inner)]
        if self.dq_apart:
            made.append(Region("dq", dk + self.inner, self.inner))
        return tuple(made)

    def at(self, name: str) -> int:
        """First column of a region. Where dQ has none of its own it takes dP^T's.

        That is safe: dQ is issued after dK, which reads dS^T there, on the same pipe; every thread has read its dP^T
        before it signals dS^T, which dQ waits for; and the next dP^T waits until dQ was read.
        """
        name = "dp" if name == "dq" and not (self.dq_apart or self.serial) else name
        return next(r.start for r in self.regions if r.name == name)

    # Operands ------------------------------------------------------------------------------------------------------
    @property
    def pre(self) -> BwdPre:
        """The preprocess of this plan's tile. The workspace holds the true depth: zero columns need no adding."""
        made = dict.fromkeys(("turns", "tickets", "copies"), self.ordered) | {"releases": self.dependent}
        made |= {"ranges": self.tile, "band": self.band} if self.chained else {}
        return BwdPre(self.arch, self.dtype, self.value_depth, self.tile, self.depth, **made, fragments=True)

    @property
    def copies(self) -> int:
        """Copies of dQ that are wanted, see order.py: so many that the tile before in turn is far enough ahead.
        A turn takes 2000 to 4000 clocks, a step 3912, but at depth 64 2248."""
        return (1 if self.band else 2) * (2 if self.inner + self.inner_value <= 128 else 1)

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of one call, from B, T, S, N and K. M: query tiles; L: key tiles; C: copies of dQ."""
        tiles = up(shapes["T"], self.tile), up(shapes["S"], self.tile)
        made = {**shapes, **value_extents(shapes["B"]), "M": tiles[0], "L": tiles[1]}
        if self.ordered:
            size = 4 * shapes["B"] * shapes["N"] * tiles[0] * self.tile * self.depth
            made["C"] = copies(self.copies, size, shapes["B"] * shapes["K"], tiles, self.band)
        return made


def bind(plan: Plan, e: dict[str, Any], wide: Any = int) -> tuple[Kernel, ...]:
    """What one call launches. e: extents by symbol. Runs on ints (tests, verifier) and on DSL integers (launcher)."""
    buffers = {b.name: b for b in plan.inputs + plan.outputs}

    def map_of(name: str) -> Descriptor:
        store = name in ("dk", "dv")
        return rows_of(buffers[name], (plan.tile, plan.depth_of(name)), e, wide, store=store)

    scratch = ("stats", "work", *(("turns", "tickets") if plan.ordered else ()), *("ranges",) * plan.chained)
    ordered = ("C",) * plan.ordered
    main = Kernel(
        "backward",
        (up(e["S"], plan.tile) * e["K"] * e["B"], 1, 1),
        plan.threads,
        tuple(map_of(name) for name in ("k", "v", "dk", "dv", "q", "dout")),
        dependent=plan.dependent,
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


def choose(problem: Problem, arch: str = "sm_100a") -> Plan:
    """The plan for a backward problem, or Unsupported with the argument's name and what would work."""
    spec = problem.spec
    if arch not in ARCHS:
        raise Unsupported(f"arch {arch!r}: this kernel is built for {' and '.join(ARCHS)}")
    if problem.dtype not in KERNEL_DTYPES:
        raise Unsupported(f"dtype {problem.dtype}: the Blackwell backward takes {' and '.join(KERNEL_DTYPES)}")
    for name, depth in (("query and key", problem.d), ("value", problem.v)):
        if depth % 8 or not 8 <= depth <= DEEPEST:
            raise Unsupported(f"depth {depth} of {name}: the Blackwell backward takes multiples of 8 up to {DEEPEST}")
    for name, wanted in (("bias", spec.bias), ("mask", spec.mask)):
        if wanted:
            raise Unsupported(f"{name}: the Blackwell backward has no kernel for it; implementation='xla' computes it")
    more: dict[str, Any] = {"registers": SHALLOW_REGISTERS[spec.segments]} if problem.d <= NATIVE_DEPTHS[0] else {}
    unmasked = not (spec.band or spec.segments)
    if unmasked and NATIVE_DEPTHS[0] < problem.d <= NATIVE_DEPTHS[1] and problem.v <= NATIVE_DEPTHS[0]:
        more = {"registers": UNEQUAL_REGISTERS}
    if spec.soft_cap:  # its temporaries want the registers that hold a row of dQ: 216 bytes spill else
        more = {"at_once": False, "registers": CAPPED_REGISTERS}
    if spec.segments and spec.deterministic and problem.d > NATIVE_DEPTHS[0]:
        more |= {"at_once": False}  # whom to wait for, beside a row of dQ: 20 to 68 bytes spill else
    if max(problem.d, problem.v) > 128:  # no room for a second Q, nor registers for 192 columns of dQ
        more |= {"query_stages": 1, "at_once": False}
        if not spec.soft_cap:
            more["registers"] = SERIAL_REGISTERS
    return Plan(
        problem.dtype,
        problem.d,
        problem.v,
        **more,
        band=spec.band,
        segments=spec.segments,
        soft_cap=spec.soft_cap,
        ordered=spec.deterministic,
        arch=arch,
    )
