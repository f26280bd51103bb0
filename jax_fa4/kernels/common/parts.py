"""The words of a plan: rings, descriptors and kernels as data. Standard library only, so tests need no compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax_fa4.ffi.buffers import Buffer

SMEM_LIMIT = 232448  # bytes one CTA may have on sm_90a and sm_100a
REGISTER_FILE = 65536  # 32-bit registers of an SM
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}


class Ring(NamedTuple):
    """A pipeline: who fills it, who drains it, how many arrivals complete a stage on each side, and its bytes."""

    name: str
    producer: str
    consumer: str
    stages: int
    full: int  # arrivals that fill a stage; the transaction's bytes come on top
    empty: int  # arrivals that free it; 0 where it is never reused
    bytes: int  # transaction bytes a stage

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of its barriers, 8 bytes each."""
        return 8 * self.stages * ((self.full > 0) + (self.empty > 0))


class Descriptor(NamedTuple):
    """A TMA tensor map: innermost dimension second in `dims` as in [rows, depth, heads, batch].

    The box may be wider than the depth: what lies outside the tensor is read as zero and never written.
    """

    tensor: str  # a buffer's name
    dims: tuple[Any, ...]
    strides: tuple[Any, ...]  # in elements, 64 bits
    box: tuple[int, ...]
    store: bool = False
    swizzle: int = 128  # bytes; the compiler cuts a wider box into pieces of this width


class Kernel(NamedTuple):
    """One launch of a call."""

    name: str
    grid: tuple[Any, Any, Any]
    block: int
    descriptors: tuple[Descriptor, ...] = ()
    dependent: bool = False  # launched with programmatic dependence on the one before
    cluster: int = 1
    smem: int = 0
    # What follows the descriptors in the parameter list: first pointers by buffer name, then int32 extents by symbol.
    pointers: tuple[str, ...] = ()
    extents: tuple[str, ...] = ()


class Plan(Protocol):
    """What select, compile and call know of any plan. Plans are frozen dataclasses: hashable, equal by their fields."""

    @property
    def arch(self) -> str: ...
    @property
    def direction(self) -> str: ...
    @property
    def launcher(self) -> str:
        """Module whose `launch(stream, plan, data, e)` starts the kernels; imported by ffi/compile.py alone."""
        ...

    @property
    def inputs(self) -> tuple[Buffer, ...]: ...
    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """Results, then scratch."""
        ...

    @property
    def spill_allowance(self) -> int:
        """Bytes of register spills that a build may have; 0 unless a measurement excuses more."""
        ...

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """All symbols of inputs and outputs for one call, from B, T, S, N and K."""
        ...


def label(plan: Plan) -> str:
    """What profilers show of a kernel: fa4, direction, arch, depths, mask and whatever else makes its plan another one.

    fa4_fwd_sm_90a_d128_band, fa4_bwd_sm_100a_d192v128_full_segments_deterministic.
    """
    have = {name: getattr(plan, name, False) for name in ("segments", "soft_cap", "sinks", "packed", "splits", "pair")}
    have["deterministic"] = getattr(plan, "deterministic", False) or getattr(plan, "ordered", False)
    value_depth = getattr(plan, "value_depth", 0)
    depth = getattr(plan, "depth", value_depth)
    depths = f"d{depth}" + (f"v{value_depth}" if value_depth != depth else "")
    mask = {True: ["band"], False: ["full"], None: []}[getattr(plan, "band", None)]  # a preprocess serves every mask
    return "_".join(["fa4", plan.direction, plan.arch, depths, *mask, *(name for name, has in have.items() if has)])


def labelled(kernel: Any, plan: Plan, part: str = "") -> Any:
    """The device function, whose symbol in the object will start with the plan's label, and what it is of the call."""
    kernel.set_name_prefix(label(plan) + f"_{part}" * bool(part))
    return kernel


Bind = Callable[..., tuple[Kernel, ...]]  # bind(plan, extents, wide=int)


def rows_of(buffer: Buffer, box: tuple[int, int], e: dict[str, Any], wide: Any = int, **kind: Any) -> Descriptor:
    """The tensor map of a [batch, length, heads, depth] buffer, seen as [length, depth, heads, batch]."""
    batch, length, heads, depth = buffer.shape
    strides = (wide(e[heads]) * depth, 1, depth, wide(e[length]) * e[heads] * depth)
    return Descriptor(buffer.name, (e[length], depth, e[heads], e[batch]), strides, box, **kind)
