"""Order, axes and batching of what the primitives read and write: one table, used by folding and by sharding.

Arrays may have any number of leading (batch) axes, all alike in one call, written B here. They stay apart until the
code that runs on one device folds them into one, so that `vmap` and shardings of any of them cost no data movement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.reference import Operands, accumulation_dtype
from jax_fa4.spec import AttentionSpec

# B all leading axes; t queries, s keys, n query heads, k key heads, d and v depths; w two sides of the window.
AXES = {
    "query": "Btnd",
    "key": "Bskd",
    "value": "Bskv",
    "window": "w",
    "offset": "B",
    "q_len": "B",
    "kv_len": "B",
    "scale": "",
    "soft_cap": "",
    "q_segments": "Bt",
    "kv_segments": "Bs",
    "sinks": "n",
    "bias": "Bnts",  # any axis may be 1: broadcast
    "mask": "Bnts",
    "out": "Btnv",
    "lse": "Bnt",
    "dout": "Btnv",
    "dlse": "Bnt",
    "dquery": "Btnd",
    "dkey": "Bskd",
    "dvalue": "Bskv",
    "dbias": "Bnts",
}
BROADCAST = ("bias", "mask", "dbias")
UNBATCHED = tuple(name for name in Operands._fields if "B" not in AXES[name])
REQUIRED = Operands._fields[:9]


def present(spec: AttentionSpec) -> tuple[str, ...]:
    """Names of the operands of the forward pass of this spec, in order."""
    extra = {"q_segments": spec.segments, "kv_segments": spec.segments, "sinks": spec.sinks}
    extra |= {"bias": spec.bias, "mask": spec.mask}
    return REQUIRED + tuple(name for name, there in extra.items() if there)


def within(lengths: Any, full: int) -> Any:
    """Lengths as int32 in [0, full], whatever integers they came as: a narrow type cannot hold `full` (300 is 44 in
    uint8), and numpy's wide ones would wrap on the way to a jax array."""
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    wide = lengths.astype(np.int32) if lengths.dtype.itemsize < 4 else lengths
    return jnp.asarray(wide.clip(0, full).astype(np.int32))


def names_in(spec: AttentionSpec, direction: str) -> tuple[str, ...]:
    """Names of the operands of a pass, "fwd" or "bwd"."""
    return present(spec) if direction == "fwd" else (*present(spec), "out", "lse", "dout", "dlse")


def names_out(spec: AttentionSpec, direction: str) -> tuple[str, ...]:
    """Names of the results of a pass."""
    if direction == "fwd":
        return ("out", "lse")
    return ("dquery", "dkey", "dvalue", "dbias") if spec.bias else ("dquery", "dkey", "dvalue")


def flatten(ops: Operands, spec: AttentionSpec) -> list[Any]:
    return [getattr(ops, name) for name in present(spec)]


def unflatten(flat: Sequence[Any], spec: AttentionSpec) -> Operands:
    return Operands(**dict.fromkeys(Operands._fields) | dict(zip(present(spec), flat, strict=True)))


def trailing(name: str) -> int:
    """How many axes follow the leading ones."""
    return len(AXES[name].replace("B", ""))


def lead_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[: len(shape) - trailing(name)]


def result_shapes(shapes: Mapping[str, tuple[int, ...]], spec: AttentionSpec, direction: str) -> list[tuple[int, ...]]:
    """Shapes of the results, from the shapes of the operands by name."""
    if direction == "bwd":
        return [shapes[name[1:]] for name in names_out(spec, direction)]
    *lead, t, n, _ = shapes["query"]
    return [(*lead, t, n, shapes["value"][-1]), (*lead, n, t)]


def result_dtypes(dtypes: Mapping[str, Any], spec: AttentionSpec, direction: str) -> list[Any]:
    if direction == "bwd":
        return [dtypes[name[1:]] for name in names_out(spec, direction)]
    return [dtypes["query"], accumulation_dtype(dtypes["query"])]


# ---- folding all leading axes into one -----------------------------------------------------------------------------


def fold(name: str, x: Any, lead: tuple[int, ...]) -> Any:
    """[lead, ...] -> [prod(lead), ...]; a bias or mask that is the same for all of them -> [1, ...]."""
    if name in UNBATCHED:
        return x
    own, rest = lead_of(name, x.shape), x.shape[x.ndim - trailing(name) :]
    if own != lead:
        if all(n == 1 for n in own):
            return x.reshape(1, *rest)
        x = jnp.broadcast_to(x, (*lead, *rest))
    return x if len(lead) == 1 else x.reshape(math.prod(lead), *rest)


def unfold(name: str, x: Any, shape: tuple[int, ...], lead: tuple[int, ...]) -> Any:
    """A folded result in its own shape; dbias is summed over the leading axes along which bias is broadcast."""
    own = lead_of(name, shape)
    if own != lead and x.shape[0] != math.prod(own):
        axes = tuple(i for i, (a, b) in enumerate(zip(own, lead, strict=True)) if a != b)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = jnp.sum(x.reshape(*lead, *x.shape[1:]), axis=axes, dtype=wide).astype(x.dtype)
    return x.reshape(shape)


def folded(body: Callable[..., Sequence[Any]], spec: AttentionSpec, direction: str) -> Callable[..., list[Any]]:
    """`body` on operands with one batch axis, as a function of operands with any leading axes."""
    called, returned = names_in(spec, direction), names_out(spec, direction)

    def run(*flat: Any) -> list[Any]:
        shapes = {name: x.shape for name, x in zip(called, flat, strict=True)}
        lead = shapes["query"][:-3]
        results = body(*(fold(name, x, lead) for name, x in zip(called, flat, strict=True)))
        wanted = result_shapes(shapes, spec, direction)
        return [unfold(name, x, shape, lead) for name, x, shape in zip(returned, results, wanted, strict=True)]

    return run
