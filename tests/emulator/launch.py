"""What one kernel launch is: plain records, in the order of the PTX parameter list. Nothing here knows a plan or a
kernel.

A buffer is a numpy array (bfloat16 as uint16) or `Uninitialised(shape, dtype)`; reading a byte that nobody wrote is a
finding.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

SWIZZLES = ("none", "32B", "64B", "128B")
ELEMENT_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "uint16": 2, "float32": 4, "int32": 4, "uint32": 4}


@dataclass(frozen=True)
class Uninitialised:
    """A global buffer whose content is poison until the kernel writes it."""

    shape: tuple
    dtype: object


@dataclass(frozen=True)
class Tma:
    """A tensor copy descriptor: the documented inputs of the encoding call, innermost dimension first.

    `strides` are bytes of dimensions 1..rank-1, `box` elements, `offset` bytes from the start of `buffer`, `fill`
    "zero" or "nan".
    Raises ValueError with the numbers if the hardware would refuse it.
    """

    buffer: str
    dtype: str
    dims: tuple
    strides: tuple
    box: tuple
    swizzle: str = "none"
    fill: str = "zero"
    offset: int = 0

    def __post_init__(self):
        rank, size = len(self.dims), self.element_bytes
        if not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError(f"rank {rank} with {len(self.strides)} strides and {len(self.box)} box extents")
        if any(not 1 <= b <= 256 for b in self.box) or any(d < 1 or d > 2**32 for d in self.dims):
            raise ValueError(f"box {self.box} must be in 1..256, dims {self.dims} in 1..2^32")
        if self.offset % 16 or any(s % 16 or s >= 2**40 for s in self.strides):
            raise ValueError(
                f"offset {self.offset} and strides {self.strides} must be multiples of 16 bytes, below 2^40"
            )
        if self.swizzle not in SWIZZLES or self.fill not in ("zero", "nan"):
            raise ValueError(f"swizzle {self.swizzle!r} not in {SWIZZLES}, or fill {self.fill!r}")
        inner = self.box[0] * size
        if inner % 16 or (self.swizzle != "none" and inner > int(self.swizzle[:-1])):
            raise ValueError(f"inner box of {inner} bytes: multiple of 16, at most the {self.swizzle} span")

    @property
    def element_bytes(self):
        return ELEMENT_BYTES[self.dtype]

    @property
    def box_bytes(self):
        return int(np.prod(self.box)) * self.element_bytes


@dataclass(frozen=True)
class Pointer:
    """A 64-bit device pointer into `buffer`."""

    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Scalar:
    """A number; its size is the parameter's."""

    value: object


@dataclass(frozen=True)
class Opaque:
    """Parameter bytes given as they are (for example the extents of a coordinate tensor that no instruction reads)."""

    data: bytes


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `roles` names warps for the counters: {"load": (0,), "math": (4, 5, ...)}."""

    params: tuple
    grid: tuple = (1, 1, 1)
    block: tuple = (32, 1, 1)
    cluster: tuple = (1, 1, 1)
    shared_bytes: int = 0
    entry: str | None = None
    roles: dict = field(default_factory=dict)


PARAM_STATE = 0x7C << 40  # a parameter's own address; cvta.param makes it a generic one
PARAM_SPACE = 0x7D << 40  # where the parameter block lies in the emulated 64-bit space
SHARED_SPACE = 0x7E << 40  # generic addresses of shared memory


def pack(kernel, params, address_of):
    """Parameter block bytes and {byte offset: Tma}. `address_of(buffer)` gives a buffer's emulated address."""
    if len(params) != len(kernel.params):
        raise ValueError(f"{len(params)} launch parameters, kernel {kernel.name} takes {len(kernel.params)}")
    block, maps = bytearray(kernel.param_bytes), {}
    for given, want in zip(params, kernel.params, strict=True):
        if isinstance(given, Tma):
            if want.size != 128 or want.align < 64:
                raise ValueError(f"descriptor given for {want.name} of {want.size} bytes aligned to {want.align}")
            maps[want.offset] = given
            continue
        if isinstance(given, Pointer):
            data = struct.pack("<Q", address_of(given.buffer) + given.offset)
        elif isinstance(given, Opaque):
            data = given.data
        elif isinstance(given, Scalar):
            data = _scalar(given.value, want)
        else:
            raise TypeError(f"launch parameter {given!r}")
        if len(data) != want.size:
            raise ValueError(f"{len(data)} bytes given for {want.name}, which takes {want.size}")
        block[want.offset : want.offset + want.size] = data
    return bytes(block), maps


def _scalar(value, want):
    if isinstance(value, (float, np.floating)):
        return struct.pack("<f" if want.size == 4 else "<d", value)
    return int(value).to_bytes(want.size, "little", signed=int(value) < 0)
