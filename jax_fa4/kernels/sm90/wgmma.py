"""Warpgroup products: layouts of their shared operands, operand A from registers, and their issue."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
STEP = 16  # depth of one wgmma of 16-bit operands
_SWIZZLES = {
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
}


def swizzled(dtype, rows, columns, stages, swizzle):
    """Row-major tiles (rows, columns, stages) of a 16-bit type in the swizzle (bytes) that TMA writes."""
    atom = warpgroup.make_smem_layout_atom(_SWIZZLES[swizzle], dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def turned(shared):
    """The same shared tensor with rows and columns exchanged."""
    return cute.make_tensor(shared.iterator, cute.select(shared.layout, [1, 0, 2]))


def product(dtype, majors, split, tile, a_in_registers=False):
    """A tiled product with float32 accumulation. split: warpgroups along (m, n); tile: (m, n) of one warpgroup."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    return hopper_helpers.make_trivial_tiled_mma(dtype, dtype, *majors, Float32, (*split, 1), tile, source)


def as_operand(acc, dtype):
    """Registers for an accumulator in a 16-bit type: (as operand A, the same cells in the accumulator's order).

    ((2, 2, V), 1, 1) becomes ((2, 2, 2), 1, V / 2): two column blocks of 8 make one step of 16, in place.
    """
    (_, _, v), _, _ = acc.layout.shape
    half = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, v // 2), stride=((1, 2, 4), 0, 8)), dtype)
    return half, cute.make_tensor(half.iterator, acc.layout)


def uniform(x):
    """An int32 that all lanes have, as one of the warp's: redux leaves it in a uniform register.

    Bounds of loops and conditions of branches around products must be such. Otherwise ptxas takes what these need for
    different in each lane: descriptors are computed in a thread's registers and moved (R2UR) before each wgmma. A
    shuffle (make_warp_uniform) does not convince it.
    """
    return cute.arch.warp_redux_sync(x, "max")


@cute.jit
def narrow_to(half, acc):
    """The accumulator rounded into registers of a 16-bit type, in the same order; eight at a time.

    As one vector of 40 (80 keys, DSL 4.8.1) it falls apart into 16-bit registers, packed only behind the product's
    fence: the product's operands are then written after it.
    """
    count = cute.size(acc)
    to, of = (cute.make_tensor(x.iterator, cute.make_layout((8, count // 8))) for x in (half, acc))
    for n in cutlass.range_constexpr(count // 8):
        to[None, n].store(of[None, n].load().to(half.element_type))


@cute.jit
def issue(mma, acc, a, b, fresh: cutlass.Constexpr, steps: cutlass.Constexpr = None):
    """Starts acc (+)= a b, committed as one group. steps: of 16 along k, where the rest is known to be zero.

    Make the mma at each call: `set` rebinds a value inside it, which must not leave a loop.
    """
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, not fresh)
    count = cute.size(a, mode=[2]) if const_expr(steps is None) else steps
    for step in cutlass.range_constexpr(count):
        cute.gemm(mma, acc, a[None, None, step], b[None, None, step], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
