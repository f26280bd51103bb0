"""How operands and results are placed: varying axes inside shard_map, and shardings in types on explicit meshes."""

from __future__ import annotations

from typing import Any

import jax
from jax import core

from jax_fa4.reference import Operands


def varying(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which `x` varies (inside shard_map with check_vma)."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def vary(xs: list[Any]) -> list[Any]:
    """Marks every operand as varying over the axes of any of them: a primitive wants them alike.

    Done outside custom_vjp it also makes autodiff sum the gradient of an operand that was replicated.
    """
    axes: frozenset[Any] = frozenset().union(*(varying(x) for x in xs))
    out = []
    for x in xs:
        missing = tuple(sorted(axes - varying(x), key=str))
        out.append(jax.lax.pcast(x, missing, to="varying") if missing else x)
    return out


def _like(aval: Any, shape: tuple[int, ...], dtype: Any, spec: Any = None) -> Any:
    """An abstract value of the given shape, placed like `aval`."""
    where = aval.sharding if spec is None else aval.sharding.update(spec=spec)
    return aval.update(shape=shape, dtype=core.ShapedArray((), dtype).dtype, weak_type=False, sharding=where)


def forward_avals(ops: Operands, out: tuple[Any, Any], lse: tuple[Any, Any]) -> list[Any]:
    """out [B, T, N, V] and lse [B, N, T], on the query's batch and head axes."""
    query = ops.query
    b, _, n, _ = query.sharding.spec if len(query.sharding.spec) == 4 else (None,) * 4
    spec = jax.sharding.PartitionSpec
    return [_like(query, *out, spec(b, None, n, None)), _like(query, *lse, spec(b, n, None))]


def backward_avals(ops: Operands) -> list[Any]:
    """Gradients placed like their operands."""
    grads = [ops.query, ops.key, ops.value] + ([ops.bias] if ops.bias is not None else [])
    return [_like(x, x.shape, x.dtype) for x in grads]
