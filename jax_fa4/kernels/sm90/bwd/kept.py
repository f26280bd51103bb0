"""Rows of V that a math warpgroup keeps in registers, as operand A of dP, so that shared memory is read less.

At D128 a step's products read 2,048 cycles' worth of shared memory, and 950 more pass through it, for 2,560 cycles of
the tensor cores: each of these steps of 16 is worth 32 cycles. Four of eight are what 240 registers hold.
"""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm90 import wgmma
from jax_fa4.kernels.sm90.bwd import products


def value_steps(ctx):
    """V (keys, 16 of the depth) for each step of dP whose operand A is kept in registers."""
    return [cute.local_tile(ctx.v[2], (ctx.plan.keys, wgmma.STEP), (0, n, 0)) for n in range(ctx.plan.kept)]


def values_kept(ctx, whole):
    """Registers for a warpgroup's rows of these."""
    mma = products.slopes_mma(ctx.plan)
    return [mma.make_fragment_A(mma.get_slice(whole).partition_A(part)) for part in value_steps(ctx)]


@cute.jit
def keep_values(ctx, h):
    """V from shared memory to those registers."""
    matrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), DTYPES[ctx.plan.dtype])
    mine = cute.make_tiled_copy_A(matrix, products.slopes_mma(ctx.plan)).get_slice(h.thread)
    for part, kept in zip(value_steps(ctx), h.kept):
        cute.copy(matrix, mine.partition_S(part), mine.retile(kept))
