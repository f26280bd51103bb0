"""The five products of a pair's step, as descriptors over tiles that lie row-major, in swizzles of 128 or 64 bytes.

Each CTA's descriptor speaks of its own shared memory: its rows of A, its half of B. At depth 128:

product           A: rows of rank r      B: rank r's half
S^T = K Q^T       its 128 keys           queries [64 r, 64 r + 64), K-major
dP^T = V dO^T     its 128 keys           likewise of dO
dV += P^T dO      tensor memory          columns [64 r, 64 r + 64) of dO, MN-major
dK += dS^T Q      tensor memory          likewise of Q
dQ = dS K         its 64 queries by      columns [64 r, 64 r + 64) of 256 keys, MN-major
                  256 keys, MN-major
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05
from cutlass.utils import blackwell_helpers as helpers

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm100 import umma

A_TURNED = 1 << 15  # of the instruction descriptor: A is MN-major


def tiles(plan, box, stages=1):
    """Row-major tiles of (rows, columns) in the swizzle that TMA writes; a third mode of so many stages."""
    kinds = {128: tcgen05.SmemLayoutAtomKind.K_SW128, 64: tcgen05.SmemLayoutAtomKind.K_SW64}
    atom = tcgen05.make_smem_layout_atom(kinds[plan.swizzle(box)], DTYPES[plan.dtype])
    return cute.tile_to_shape(atom, (*box, stages), order=(0, 1, 2))


def _operand(plan, shared, major, shape):
    """(base, offsets) for umma.issue of a tile as B of a one-CTA product: (columns of B, summed over). The descriptor
    of a pair's CTA is the same, as it speaks of that CTA's memory; A's has B's form."""
    kind, one = DTYPES[plan.dtype], tcgen05.CtaGroup.ONE
    mma = helpers.make_trivial_tiled_mma(
        kind, kind, umma.K_MAJOR, major, Float32, one, (plan.tile, shape[0]), umma.SHARED
    )
    whole = helpers.make_smem_layout_b(mma, (plan.tile, *shape), kind, 1)
    fragment = mma.make_fragment_B(cute.make_tensor(shared.iterator, whole.outer))
    return umma.in_shared(fragment[None, None, None, 0])


def rows(plan, shared):
    """A tile whose rows are the operand's, summed over depth."""
    return _operand(plan, shared, umma.K_MAJOR, (cute.size(shared, mode=[0]), cute.size(shared, mode=[1])))


def turned(plan, shared):
    """A tile whose columns are the operand's rows, summed over its rows."""
    return _operand(plan, shared, umma.MN_MAJOR, (cute.size(shared, mode=[1]), cute.size(shared, mode=[0])))


def words(plan, tmem, name):
    """P^T or dS^T in tensor memory, (base, offsets) of the steps of 16 queries.

    Query j of unit 2 i + g is number unit * i + j of group g, and two share a column.
    """
    made = []
    for s in range(plan.span // umma.K_STEP):
        unit, j = s * umma.K_STEP // plan.unit, s * umma.K_STEP % plan.unit
        i, g = unit // 2, unit % 2
        made.append((2 * plan.unit * g + plan.unit * i + j) // 2)
    return (tmem + plan.at(name)).toint(), made


def instruction(plan, rows, columns, b_turned=False, a_turned=False):
    """The instruction descriptor of a product of the pair with `rows` rows."""
    major = umma.MN_MAJOR if b_turned else umma.K_MAJOR
    return umma.instruction(plan.dtype, rows, columns, major) | a_turned * A_TURNED


def steps(depth):
    """MMA steps along a depth whose rest is known to be zero, as a range."""
    return 0, -(-depth // umma.K_STEP)
