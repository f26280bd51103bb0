"""The two products of the forward, S = Q K^T and O += P V, and the shared layouts that they imply."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.utils import blackwell_helpers as helpers

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.parts import ITEM_BYTES
from jax_fa4.kernels.sm100 import umma


def scores(plan):
    return umma.product(plan.dtype, plan.rows, plan.tile)


def output(plan):
    return umma.product(plan.dtype, plan.rows, plan.inner_value, umma.MN_MAJOR, umma.TENSOR)


def layout(name, plan):
    """(swizzle, layout) of q, k, v or out in shared memory: (MMA, rows, depth, stages), out (rows, columns, tiles).

    "rows" is q as (rows, columns, tiles).

    V's is that of V^T, depth first. Of a pair's products they are this CTA's part. K and V share stages, so both step
    by the larger of the two.
    """
    m, n, d, dv, kind = plan.rows, plan.tile, plan.inner, plan.inner_value, DTYPES[plan.dtype]
    if name in ("out", "rows"):
        dv = dv if name == "out" else d
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, kind)
        whole = cute.tile_to_shape(atom, (n, dv, plan.queries), order=(0, 1, 2))
        return whole.inner, whole.outer
    if name == "q":
        whole = helpers.make_smem_layout_a(scores(plan), (m, n, d), kind, plan.queries)
        return whole.inner, whole.outer
    if name == "k":
        whole = helpers.make_smem_layout_b(scores(plan), (m, n, d), kind, 1)
    else:
        whole = helpers.make_smem_layout_b(output(plan), (m, dv, n), kind, 1)
    one = cute.select(whole.outer, [0, 1, 2])
    stage = plan.stage_bytes // ITEM_BYTES[plan.dtype]
    return whole.inner, cute.make_layout((*one.shape, plan.stages_of(name)), stride=(*one.stride, stage))


def shared(plan, place, name):
    """The tensor of all stages of an operand at `place`, a byte pointer aligned to 1024."""
    swizzle, form = layout(name, plan)
    return cute.make_tensor(cute.recast_ptr(place, swizzle, dtype=DTYPES[plan.dtype]), form)


def one_tile(name, plan):
    """The composed layout of one tile, for a copy atom."""
    swizzle, form = layout(name, plan)
    modes = [0, 1] if name == "out" else [0, 1, 2]
    return cute.make_composed_layout(swizzle, 0, cute.select(form, modes))
