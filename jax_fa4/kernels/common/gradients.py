"""The operands and gradients that every backward plan has, whatever the arch: one table for all of them."""

from __future__ import annotations

from typing import Any

from jax_fa4.ffi.buffers import FLOATS_BUFFER, INTS, Buffer

SEGMENTS = (Buffer("q_segments", "int32", ("B", "T")), Buffer("kv_segments", "int32", ("B", "S")))


def backward_inputs(plan: Any) -> tuple[Buffer, ...]:
    """q, k, v, out, dout, lse, dlse and the run-time values; segment ids where the plan has them."""
    query, key = ("B", "T", "N", plan.depth), ("B", "S", "K", plan.depth)
    value, line = ("B", "T", "N", plan.value_depth), ("B", "N", "T")
    base = (
        Buffer("q", plan.dtype, query),
        Buffer("k", plan.dtype, key),
        Buffer("v", plan.dtype, (*key[:3], plan.value_depth)),
        Buffer("out", plan.dtype, value),
        Buffer("dout", plan.dtype, value),
        Buffer("lse", "float32", line),
        Buffer("dlse", "float32", line),
        INTS,
        FLOATS_BUFFER,
    )
    return base + SEGMENTS * plan.segments


def gradients(plan: Any) -> tuple[Buffer, ...]:
    """dq, dk, dv of the true depths."""
    return (
        Buffer("dq", plan.dtype, ("B", "T", "N", plan.depth), "out"),
        Buffer("dk", plan.dtype, ("B", "S", "K", plan.depth), "out"),
        Buffer("dv", plan.dtype, ("B", "S", "K", plan.value_depth), "out"),
    )
