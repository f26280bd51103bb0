"""The five products of a step, as descriptors over tiles that lie row-major in 128-byte swizzle.

S^T = K Q^T, dP^T = V dO^T: both operands K-major. dV += P^T dO, dK += dS^T Q: A from tensor memory, B turned.
dQ = dS K: both turned, as dS lies as (keys, queries) and K as (keys, depth) and keys are summed over. A turned operand
is the same bytes under an MN-major descriptor, so every tile is brought once.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05
from cutlass.utils import blackwell_helpers as helpers

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm100 import umma

A_TURNED = 1 << 15  # of the instruction descriptor: A is MN-major


def tiles(plan, columns, stages):
    """Row-major tiles (128 rows, columns, stages) in the 128-byte swizzle that TMA writes."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, DTYPES[plan.dtype])
    return cute.tile_to_shape(atom, (plan.tile, columns, stages), order=(0, 1, 2))


def _mma(plan, columns, a_major, b_major):
    kind, one = DTYPES[plan.dtype], tcgen05.CtaGroup.ONE
    return helpers.make_trivial_tiled_mma(kind, kind, a_major, b_major, Float32, one, (plan.tile, columns), umma.SHARED)


def _over(shared, whole):
    """The bytes of `shared` under another layout of as many; K-major and turned layouts swizzle alike."""
    return cute.make_tensor(shared.iterator, whole.outer)


def rows(plan, shared, stages, stage):
    """Operand A or B, K-major, of a stage of tiles(plan, depth, stages): (base, offsets) for umma.issue."""
    depth = cute.size(shared, mode=[1])
    mma = _mma(plan, plan.tile, umma.K_MAJOR, umma.K_MAJOR)
    whole = helpers.make_smem_layout_b(mma, (plan.tile, plan.tile, depth), DTYPES[plan.dtype], stages)
    return umma.in_shared(mma.make_fragment_B(_over(shared, whole))[None, None, None, stage])


def turned(plan, shared, stages, stage):
    """Operand B of `depth` columns, summed over the tile's rows."""
    depth = cute.size(shared, mode=[1])
    mma = _mma(plan, depth, umma.K_MAJOR, umma.MN_MAJOR)
    whole = helpers.make_smem_layout_b(mma, (plan.tile, depth, plan.tile), DTYPES[plan.dtype], stages)
    return umma.in_shared(mma.make_fragment_B(_over(shared, whole))[None, None, None, stage])


def square(plan):
    """Operand A of dQ: dS, which lies as (keys, queries), summed over keys."""
    mma = _mma(plan, plan.inner, umma.MN_MAJOR, umma.MN_MAJOR)
    whole = helpers.make_smem_layout_a(mma, (plan.tile, plan.inner, plan.tile), DTYPES[plan.dtype], 1)
    return mma, whole


def turned_square(plan, shared):
    mma, whole = square(plan)
    return umma.in_shared(mma.make_fragment_A(_over(shared, whole))[None, None, None, 0])


def halves(plan, tmem, name):
    """Operand A in tensor memory that lies in two halves: (base, offsets) of the steps of 16 queries."""
    first, second = plan.at(f"{name}0"), plan.at(f"{name}1")
    steps = plan.tile // umma.K_STEP
    half = steps // 2
    width = umma.K_STEP // 2  # columns of a step: two elements share one
    return (tmem + first).toint(), [(i // half) * (second - first) + i % half * width for i in range(steps)]


def instruction(plan, columns, b_turned=False, a_turned=False):
    """The instruction descriptor of a product with 128 rows."""
    major = umma.MN_MAJOR if b_turned else umma.K_MAJOR
    return umma.instruction(plan.dtype, plan.tile, columns, major) | a_turned * A_TURNED


def steps(depth):
    """MMA steps along a depth whose rest is known to be zero."""
    return -(-depth // umma.K_STEP)
