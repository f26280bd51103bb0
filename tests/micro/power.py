"""y = 2^x, 128 columns a thread: the forward's own mixture of MUFU and polynomial."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.parts import Kernel
from jax_fa4.kernels.sm100.exp2 import exp2_line
from micro.build import Micro

ROWS, COLUMNS = 32, 128
MICRO = Micro(
    "power",
    (Buffer("x", "float32", (ROWS, COLUMNS)),),
    (Buffer("y", "float32", (ROWS, COLUMNS), "out"),),
    Kernel("power", (1, 1, 1), ROWS, pointers=("x", "y")),
)


def emulated(column):
    """All but the first quarter."""
    return column >= COLUMNS // 4


@cute.kernel
def power(x: cute.Pointer, y: cute.Pointer):
    thread = cute.arch.thread_idx()[0]
    source, to = [cute.make_tensor(p + thread * COLUMNS, cute.make_layout(COLUMNS)) for p in (x, y)]
    line = cute.make_rmem_tensor(COLUMNS, Float32)
    for c in cutlass.range_constexpr(COLUMNS):
        line[c] = source[c]
    exp2_line(line, 0, emulated, 4)
    for c in cutlass.range_constexpr(COLUMNS):
        to[c] = line[c]


@cute.jit
def host(x: cute.Pointer, y: cute.Pointer):
    power(x, y).launch(grid=(1, 1, 1), block=(ROWS, 1, 1))
