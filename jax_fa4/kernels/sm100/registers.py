"""A warpgroup's share of the register file: given up, or asked for, at the start of its role."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa4.kernels.common.parts import REGISTER_FILE


@cute.jit
def hold(count: cutlass.Constexpr, threads: cutlass.Constexpr):
    """From here on a thread has `count` registers. By every warp of the warpgroup.

    At its start each of a CTA's `threads` has its part of the whole file. Which way it goes must be said: a request for
    fewer than a thread has frees none, and another warpgroup waits for them for ever.
    """
    if const_expr(count < REGISTER_FILE // threads // 8 * 8):
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)
