"""AttentionSpec and Problem: what is computed. Every check of the caller's arguments and its error text live here.

Works on plain tuples, ints and dtype names, so that tests, the command line and the planner need no jax.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

from jax_fa4.mask import UNBOUNDED

XLA_DTYPES = ("float16", "bfloat16", "float32", "float64")
KERNEL_DTYPES = ("float16", "bfloat16")
ALIGNMENTS = ("top_left", "bottom_right")
IMPLEMENTATIONS = ("fa4", "xla")


class Unsupported(NotImplementedError):
    """No kernel for this problem here. The text names the argument and what would work."""


@dataclass(frozen=True)
class AttentionSpec:
    """Which kinds of thing one call uses. No shapes and no values: lengths, windows, offsets, scale, cap are run-time.

    Both causal alignments are one kind: they differ only in the value `offset` (see mask.Band).
    """

    band: bool = False  # causal or a window
    lengths: bool = False  # query or key lengths below T, S may occur
    segments: bool = False
    soft_cap: bool = False
    sinks: bool = False
    bias: bool = False
    mask: bool = False  # a dense one
    deterministic: bool = False  # of the backward
    partial: bool = False  # the backward's out and lse are those of more keys than these (context parallelism)


@dataclass(frozen=True)
class Problem:
    """A spec with its shapes and its direction. Symbols: b t s n k d v as in the public docstrings."""

    spec: AttentionSpec
    b: int
    t: int
    s: int
    n: int  # query heads
    k: int  # key heads
    d: int
    v: int  # depth of the values
    dtype: str = "bfloat16"
    direction: str = "fwd"  # fwd | bwd

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.n // self.k if self.k else 1

    def backward(self) -> Problem:
        return replace(self, direction="bwd")


def check_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    """[..., T, N, D], [..., S, K, D], [..., S, K, V] that fit each other, or a ValueError with the numbers in it."""
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 3:
            raise ValueError(f"{name} must have shape [..., length, heads, depth], at least 3 axes; it has {shape}")
    if not len(query) == len(key) == len(value):
        raise ValueError(
            f"query, key and value must have the same number of axes; they have {len(query)}, {len(key)}, {len(value)}"
            f" (shapes {query}, {key}, {value})"
        )
    if not query[:-3] == key[:-3] == value[:-3]:
        raise ValueError(
            "the batch axes of query, key and value must be equal; they are"
            f" {query[:-3]}, {key[:-3]}, {value[:-3]} (shapes {query}, {key}, {value})"
        )
    if key[-3] != value[-3]:
        raise ValueError(f"key and value must have the same length; key has {key[-3]} and value has {value[-3]}")
    if key[-2] != value[-2]:
        raise ValueError(f"key and value must have the same number of heads; they have {key[-2]} and {value[-2]}")
    if query[-1] != key[-1]:
        raise ValueError(f"query and key must have the same depth; query has {query[-1]} and key has {key[-1]}")
    if value[-1] < 1:
        raise ValueError(f"the depth of value must be at least 1; it is {value[-1]}")
    check_heads(query[-2], key[-2])


def check_heads(n: int, k: int) -> None:
    """Key heads divide query heads."""
    if n == 0 and k == 0:
        return
    if k == 0 or n % k:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads; {n} is not of {k}")


def check_dtypes(query: str, key: str, value: str) -> None:
    """q, k, v of one supported dtype, or a TypeError that names both the offender and what is supported."""
    if not query == key == value:
        raise TypeError(f"query, key and value must have one dtype; they have {query}, {key}, {value}")
    if query not in XLA_DTYPES:
        raise TypeError(f"dtype {query} is not supported; supported are {', '.join(XLA_DTYPES)}")


def check_window(window: Any) -> tuple[int | None, int | None]:
    """`local_window_size` as (left, right); a side that is None is unbounded. An int means the same on both sides."""
    if window is None:
        return None, None
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"local_window_size must be an int or a pair (left, right); it has {len(sides)} entries")
    out: list[int | None] = []
    for name, side in zip(("left", "right"), sides, strict=True):
        if side is None:
            out.append(None)
            continue
        try:
            if isinstance(side, bool):
                raise TypeError
            n = operator.index(side)
        except TypeError:
            raise TypeError(
                f"local_window_size: the {name} side must be a Python int or None (unbounded); it is {side!r}"
            ) from None
        if n < 0:
            raise ValueError(f"local_window_size: the {name} side is {n}; negatives are refused, None is unbounded")
        out.append(min(n, UNBOUNDED))
    return out[0], out[1]


def band_sides(is_causal: bool, window: Any) -> tuple[int, int] | None:
    """(left, right) as run-time values, or None where nothing is limited."""
    left, right = check_window(window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    return UNBOUNDED if left is None else left, UNBOUNDED if right is None else right


def _number(name: str, x: Any) -> float:
    """A Python float of a real scalar; strings and booleans, which float() takes too, are not numbers here."""
    try:
        if isinstance(x, (str, bytes, bool)):
            raise TypeError
        return float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a real number or None; it is {x!r}") from None


def check_scale(scale: Any) -> float:
    """A concrete scale: finite and above 0."""
    scale = _number("scale", scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be finite and above 0; it is {scale}")
    return scale


def check_soft_cap(cap: Any) -> float | None:
    """None and 0 are off; anything else must be a concrete finite number above 0."""
    if cap is None:
        return None
    try:
        value = _number("logits_soft_cap", cap)
    except Exception:
        raise TypeError(
            f"logits_soft_cap must be a concrete number or None; it is {type(cap).__name__}. A traced cap would need a"
            " gradient of its own, which is not offered"
        ) from None
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"logits_soft_cap must be finite and not negative (0 or None is off); it is {value}")
    return value or None


def check_alignment(alignment: str) -> bool:
    """True for bottom-right."""
    if alignment not in ALIGNMENTS:
        raise ValueError(f"causal_alignment must be one of {ALIGNMENTS}; it is {alignment!r}")
    return alignment == "bottom_right"


def check_implementation(implementation: Any) -> tuple[str, ...]:
    """None, a name or a sequence of names, as the tuple of what may be used, in order."""
    if implementation is None:
        return IMPLEMENTATIONS
    names = (implementation,) if isinstance(implementation, str) else implementation
    names = tuple(names) if isinstance(names, (tuple, list)) else ()  # not a set: it has no order of preference
    unknown = [n for n in names if n not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(f"implementation must be None, 'fa4', 'xla' or a sequence of these; it is {implementation!r}")
    return names


def check_per_example(name: str, shape: tuple[int, ...], dtype_kind: str, batch: tuple[int, ...]) -> None:
    """Lengths: integers, one for each example."""
    if dtype_kind not in "iu":
        raise TypeError(f"{name} must be integers; its dtype is of kind {dtype_kind!r}")
    if shape != batch:
        raise ValueError(f"{name} must have the batch shape {batch}; it has {shape}")


def check_segments(name: str, shape: tuple[int, ...], dtype_kind: str, wanted: tuple[int, ...]) -> None:
    """Segment ids: integers, one for each position of each example."""
    if dtype_kind not in "iu":
        raise TypeError(f"{name} must be integers; its dtype is of kind {dtype_kind!r}")
    if shape != wanted:
        raise ValueError(f"{name} must have shape {wanted} [..., length]; it has {shape}")


def check_scores_like(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...]:
    """Bias and mask: broadcastable to [..., N, T, S]. Returns the shape with leading axes of 1 filled in."""
    if len(shape) > len(full):
        raise ValueError(f"{name} must broadcast to [..., N, T, S] = {full}; it has {len(shape)} axes: {shape}")
    padded = (1,) * (len(full) - len(shape)) + tuple(shape)
    if any(a not in (1, b) for a, b in zip(padded, full, strict=True)):
        raise ValueError(f"{name} must broadcast to [..., N, T, S] = {full}; it has shape {shape}")
    return padded
