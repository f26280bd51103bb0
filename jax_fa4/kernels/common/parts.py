"""The words of a plan: rings, descriptors and kernels as data. Standard library only, so tests need no compiler."""

from __future__ import annotations

from typing import Any, NamedTuple

SMEM_LIMIT = 232448  # bytes one CTA may have on sm_90a and sm_100a
REGISTER_FILE = 65536  # 32-bit registers of an SM


class Ring(NamedTuple):
    """A pipeline: who fills it, who drains it, how many arrivals complete a stage on each side, and its bytes."""

    name: str
    producer: str
    consumer: str
    stages: int
    full: int  # arrivals that fill a stage; the transaction's bytes come on top
    empty: int  # arrivals that free it; 0 where it is never reused
    bytes: int  # transaction bytes a stage


class Descriptor(NamedTuple):
    """A TMA tensor map: innermost dimension second in `dims` as in [rows, depth, heads, batch]."""

    tensor: str  # a buffer's name
    dims: tuple[Any, ...]
    strides: tuple[Any, ...]  # in elements, 64 bits
    box: tuple[int, ...]
    store: bool = False


class Kernel(NamedTuple):
    """One launch of a call."""

    name: str
    grid: tuple[Any, Any, Any]
    block: int
    descriptors: tuple[Descriptor, ...] = ()
    dependent: bool = False  # launched with programmatic dependence on the one before
    cluster: int = 1
    smem: int = 0
