"""The ffi_call: a plan's operands in its order, layouts pinned, results without the scratch; and the value operands."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.ffi import runtime, store
from jax_fa4.ffi.artifact import Artifact
from jax_fa4.ffi.buffers import FLOATS, INTS_HEAD, INTS_PER_EXAMPLE, VALUES, Buffer
from jax_fa4.mask import UNBOUNDED

EXTENT_LIMIT = 2**31  # kernels take extents as int32


class CallPlan(Protocol):
    """What `call` reads of a plan."""

    @property
    def arch(self) -> str: ...
    @property
    def inputs(self) -> Sequence[Buffer]: ...
    @property
    def outputs(self) -> Sequence[Buffer]: ...
    def extents(self, shapes: dict[str, int]) -> dict[str, int]: ...


def compiled(plan: Any, where: store.Store | None = None) -> Artifact:
    """The plan's artifact from a store (the process's own by default), built by `ffi.compile` if it is not there.

    CompilerMissing, with the folders that were looked at, where there is neither the entry nor the DSL.
    """
    where = store.default_store() if where is None else where

    def build(plan: Any, *, host_target: str) -> Any:
        from jax_fa4.ffi import compile as compiler  # only now: a filled store needs no compiler

        try:
            return compiler.build(plan, host_target=host_target)
        except compiler.CompilerMissing as error:
            folders = "; ".join(where.mismatches()) or ", ".join(map(str, where.folders)) or "none"
            raise compiler.CompilerMissing(
                f"the kernel for {plan.arch} is in no store and cannot be built: {error}. Folders looked at: {folders}"
                f" (set {store.ENV} to others); entry {where.key(plan)[:16]}..., plan {plan!r}"
            ) from None

    return where.get(plan, build=build)


def missing(plan: Any) -> str | None:
    """What keeps this process from running the plan's kernels, in words: no compiler for an object that is in no store,
    or no runtime library beside a GPU. None where nothing does; the object is then in memory."""
    from jax_fa4.ffi import compile as compiler

    try:
        compiled(plan)
        runtime.register_if_cuda()
    except (compiler.CompilerMissing, runtime.RuntimeMissing) as error:
        return str(error)
    return None


def call(
    plan: CallPlan, artifact: Artifact, operands: Mapping[str, Any], shapes: dict[str, int], *, scratch: bool = False
) -> dict[str, jax.Array]:
    """Runs the plan's kernels on `operands` (by buffer name) and gives the results by name.

    Scratch is dropped, unless `scratch` asks for it (tests of a kernel whose results are another's scratch).

    `shapes` are the extents that the plan cannot know (B, T, S, N, K, ...); `plan.extents` adds what follows from them.
    Works on concrete arrays, under any trace, with symbolic dimensions, and in `shard_map`: the results vary over every
    manual axis that an operand varies over.
    Wrong operands are a bug of ours: AssertionError with the numbers.
    """
    extents = plan.extents(shapes)
    for symbol, extent in extents.items():
        if isinstance(extent, int):
            assert 0 <= extent < EXTENT_LIMIT, f"extent {symbol} is {extent}; kernels take 0 to {EXTENT_LIMIT - 1}"
    arrays = _checked(plan.inputs, operands, extents)
    # ffi_call itself makes its operands vary over the same axes (jax 0.10.0 to 0.11.2), but not its results.
    axes = frozenset[str]().union(*(_varying(array) for array in arrays))
    results = [_result(buffer, extents, axes) for buffer in plan.outputs]
    runtime.register_if_cuda()
    run = jax.ffi.ffi_call(
        runtime.TARGET,
        results,
        input_layouts=[_row_major(buffer) for buffer in plan.inputs],
        output_layouts=[_row_major(buffer) for buffer in plan.outputs],
    )
    made = run(*arrays, module=artifact.object, key=artifact.digest)
    return {b.name: array for b, array in zip(plan.outputs, made, strict=True) if scratch or b.role != "scratch"}


def disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """For `jax.export.export(..., disabled_checks=...)`: the handler's name and contract are versioned ("_v2")."""
    return [jax.export.DisabledSafetyCheck.custom_call(runtime.TARGET)]


def value_operands(
    window: tuple[Any, Any], q_len: Any, kv_len: Any, offset: Any, scale: Any, soft_cap: Any = None
) -> tuple[Any, Any]:
    """The two run-time value operands (ints [2 + 3 B], floats [2]), in the order that `buffers.VALUES` states.

    `window` is (left, right), None = unbounded; q_len, kv_len, offset are [B] (a scalar stands for all, but for one of
    them at least); scale and soft_cap are scalars (None or 0 = off). Anything may be traced; if nothing is, the result
    is numpy, which XLA keeps as a constant instead of computing it in each call.
    """
    left, right = (UNBOUNDED if side is None else side for side in window)
    soft_cap = 0.0 if soft_cap is None else soft_cap
    fixed = all(_is_fixed(x) for x in (left, right, q_len, kv_len, offset, scale, soft_cap))
    xp: Any = np if fixed else jnp
    columns = [xp.asarray(x) for x in (q_len, kv_len, offset)]
    for name, x in zip(("q_len", "kv_len", "offset"), columns, strict=True):
        assert x.ndim <= 1, f"{name} must have shape [B]; it has {x.shape}"
        assert np.issubdtype(x.dtype, np.integer), f"{name} must be integers; it is {x.dtype}"
    assert any(x.ndim for x in columns), "one of q_len, kv_len and offset must have shape [B]: it says what B is"
    columns = xp.broadcast_arrays(*columns)
    each = [None] * INTS_PER_EXAMPLE
    for place, x in zip((VALUES.q_len, VALUES.kv_len, VALUES.offset), columns, strict=True):
        each[place] = xp.clip(x, -UNBOUNDED, UNBOUNDED).astype(np.int32)
    head: list[Any] = [None] * INTS_HEAD
    head[VALUES.left] = xp.clip(xp.asarray(left), -UNBOUNDED, UNBOUNDED).astype(np.int32)
    head[VALUES.right] = xp.clip(xp.asarray(right), -UNBOUNDED, UNBOUNDED).astype(np.int32)
    floats: list[Any] = [None] * FLOATS
    floats[VALUES.scale] = xp.asarray(scale).astype(np.float32)
    floats[VALUES.soft_cap] = xp.asarray(soft_cap).astype(np.float32)
    return xp.concatenate([xp.stack(head), xp.stack(each, axis=1).reshape(-1)]), xp.stack(floats)


def _is_fixed(x: Any) -> bool:
    return isinstance(x, (numbers.Number, np.ndarray, np.generic))


def _checked(inputs: Sequence[Buffer], operands: Mapping[str, Any], extents: dict[str, int]) -> list[Any]:
    """The operands in the plan's order, each of its buffer's dtype and shape."""
    names = [buffer.name for buffer in inputs]
    assert set(names) == set(operands), f"the plan takes the operands {names}; it was given {sorted(operands)}"
    arrays = []
    for buffer in inputs:
        array = operands[buffer.name]
        dtype, shape = jnp.dtype(array.dtype).name, tuple(array.shape)
        assert dtype == buffer.dtype, f"operand {buffer.name} must be {buffer.dtype}; it is {dtype}"
        wanted = buffer.sized(extents)
        assert shape == wanted, f"operand {buffer.name} must have shape {wanted} {buffer.shape}; it has {shape}"
        arrays.append(array)
    return arrays


def _varying(array: Any) -> frozenset[str]:
    return getattr(getattr(jax.typeof(array), "manual_axis_type", None), "varying", frozenset())


def _result(buffer: Buffer, extents: dict[str, int], axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    shape, dtype = buffer.sized(extents), jnp.dtype(buffer.dtype)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    # The axes that a type varies over are those of the mesh in its sharding: one without the other is refused.
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    varying = jax.sharding.ManualAxisType(varying=axes)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=varying)


def _row_major(buffer: Buffer) -> tuple[int, ...]:
    """Major to minor. Row-major is ffi_call's default too, but kernels depend on it, so it is said."""
    return tuple(range(len(buffer.shape)))
