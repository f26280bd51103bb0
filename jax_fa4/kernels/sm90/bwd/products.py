"""The five products. S^T = K Q^T and dP^T = V dO^T; P^T and dS^T are operand A of dV and dK, dS^T turned that of dQ."""

from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.sm90 import wgmma

K, MN = wgmma.K_MAJOR, wgmma.MN_MAJOR


def scores_mma(plan):
    """S^T and dP^T, both operands from shared memory. Warpgroups share the keys, or else the queries."""
    return wgmma.product(DTYPES[plan.dtype], (K, K), (plan.sharing, 1), (64, plan.rows))


def slopes_mma(plan):
    """Steps of dP^T with V from registers."""
    return wgmma.product(DTYPES[plan.dtype], (K, K), (plan.sharing, 1), (64, plan.rows), a_in_registers=True)


def keys_mma(plan, depth):
    """dV (depth: the native one of V) and dK. A from registers where a warpgroup has its own keys."""
    dtype = DTYPES[plan.dtype]
    return wgmma.product(dtype, (K, MN), (plan.sharing, 1), (64, depth), a_in_registers=True)


def queries_mma(plan):
    """dQ = dS K. The warpgroups share the queries, or else the depth; each needs the dS of all."""
    dtype = DTYPES[plan.dtype]
    if plan.rows_shared:
        return wgmma.product(dtype, (MN, MN), (plan.groups, 1), (64, plan.inner))
    return wgmma.product(dtype, (MN, MN), (1, plan.groups), (64, plan.inner // plan.groups // plan.pieces))


def steps(depth):
    """wgmma steps along a depth whose rest is known to be zero."""
    return -(-depth // wgmma.STEP)
