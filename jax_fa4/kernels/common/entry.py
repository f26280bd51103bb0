"""The host function of every object: opens the handler's descriptors and starts the plan's kernels."""

import importlib

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64

from jax_fa4.kernels.common.dtypes import DTYPES


def opened(descriptor, buffer):
    """A typed device pointer, and the extents that the buffer's shape names.

    Only 16-byte alignment is promised, no divisibility of extents: with or without it the kernel code is the same
    (DSL 4.8.1), and the DSL's default would bake in whatever length it saw.
    """
    words = cute.make_tensor(descriptor, cute.make_layout(2))
    data = cute.make_ptr(DTYPES[buffer.dtype], words[0], AddressSpace.gmem, assumed_align=16)
    shape = cute.make_ptr(Int64, words[1], AddressSpace.generic, assumed_align=8)
    extents = cute.make_tensor(shape, cute.make_layout(len(buffer.shape)))
    return data, {s: extents[i].to(Int32) for i, s in enumerate(buffer.shape) if isinstance(s, str)}


@cute.jit
def entry(stream: cuda.CUstream, *descriptors: cute.Pointer, plan: cutlass.Constexpr):
    data, e = {}, {}
    for buffer, descriptor in zip(plan.inputs + plan.outputs, descriptors):
        data[buffer.name], found = opened(descriptor, buffer)
        e.update(found)
    importlib.import_module(plan.launcher).launch(stream, plan, data, e)
