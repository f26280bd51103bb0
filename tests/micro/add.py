"""c = a + b over two CTAs, the last of which is partly idle."""

import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Kernel
from micro.build import Micro

COUNT, BLOCK = 200, 128
MICRO = Micro(
    "add",
    (Buffer("a", "float32", (COUNT,)), Buffer("b", "float32", (COUNT,))),
    (Buffer("c", "float32", (COUNT,), "out"),),
    Kernel("add", (2, 1, 1), BLOCK, pointers=("a", "b", "c"), extents=("n",)),
    (("n", COUNT),),
)


@cute.kernel
def add(a: cute.Pointer, b: cute.Pointer, c: cute.Pointer, n: Int32):
    i = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
    x, y, z = [cute.make_tensor(p, cute.make_layout(COUNT)) for p in (a, b, c)]
    if i < n:
        z[i] = x[i] + y[i]


@cute.jit
def host(a: cute.Pointer, b: cute.Pointer, c: cute.Pointer, n: Int32):
    add(a, b, c, n).launch(grid=(2, 1, 1), block=(BLOCK, 1, 1))
