"""Compiles a micro-kernel without a GPU, and describes its launch as a plan's is."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import tempfile
from dataclasses import dataclass
from typing import Any

from launch import Launch, launches

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Kernel


@dataclass(frozen=True)
class Micro:
    """A plan of one kernel with fixed sizes: enough of one for `launches`. module: its file here, with `host`, or what
    else its host function is called."""

    module: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    kernel: Kernel
    numbers: tuple[tuple[str, int], ...] = ()  # its int32 parameters
    host: str = "host"

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        return {**dict(self.numbers), **shapes}


def missing() -> str:
    """Why nothing can be compiled here; empty if it can."""
    return (
        "" if importlib.util.find_spec("cutlass") else "the CuTe DSL is not installed: pip install 'jax_fa4[compile]'"
    )


@functools.cache
def ptx(micro: Micro, arch: str = "sm_100a") -> str:
    """The kernel's PTX. The host function takes the pointers of inputs and outputs, then the numbers."""
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import make_ptr

    from jax_fa4.ffi import compile as compiling
    from jax_fa4.kernels.common.dtypes import DTYPES

    host: Any = getattr(importlib.import_module(f"micro.{micro.module}"), micro.host)
    gmem = cute.AddressSpace.gmem
    pointers = [make_ptr(DTYPES[b.dtype], 16, gmem, assumed_align=16) for b in micro.inputs + micro.outputs]
    numbers = [Int32(value) for _, value in micro.numbers]
    with compiling._LOCK, tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder}"
        made = cute.compile(host, *pointers, *numbers, options=options)
    return made.__ptx__.rstrip("\0")


def launched(micro: Micro, text: str | None = None, **contents: list) -> Launch:
    """Its one launch, on its own PTX or on another one."""
    (made,) = launches(micro, lambda plan, e: (plan.kernel,), {}, text or ptx(micro), contents)
    return made
