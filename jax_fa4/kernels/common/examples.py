"""What a call's run-time values say of one example."""

import cutlass

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.mask import Band


def example_band(ints, batch, queries, keys, ends=None, banded=True):
    """The Band of one example, its lengths inside [0, T] and [0, S]. ends: (left, right), where they have been read.

    Without `banded` only the lengths are read, and the sides are None.
    """
    at = VALUES.example(batch)
    q_len = cutlass.max(cutlass.min(ints[at + VALUES.q_len], queries), 0)
    kv_len = cutlass.max(cutlass.min(ints[at + VALUES.kv_len], keys), 0)
    if not banded:
        return Band(None, None, None, q_len, kv_len)
    left, right = ends or (ints[VALUES.left], ints[VALUES.right])
    return Band(left, right, ints[at + VALUES.offset], q_len, kv_len)
