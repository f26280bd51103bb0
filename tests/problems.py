"""The one table of attention problems that every tier of tests draws from: shapes, options, run-time values, inputs.

A `Case` holds plain numbers; `inputs(case, dtype)` makes its arrays in float64, already rounded to `dtype`, so that a
reference in float64 sees the same numbers as the code under test. Needs numpy and ml_dtypes only.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_fa4.mask import UNBOUNDED
from jax_fa4.spec import AttentionSpec

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Case:
    """One problem. Symbols: b batch, t queries, s keys, n query heads, k key heads, d depth, v depth of values."""

    name: str
    b: int = 2
    t: int = 64
    s: int = 64
    n: int = 2
    k: int = 2
    d: int = 64
    v: int = 0  # 0 = d
    causal: bool = False
    bottom_right: bool = False
    window: tuple[int | None, int | None] | None = None
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    scale: float | None = None  # None = 1 / sqrt(d)
    soft_cap: float | None = None
    sinks: bool = False
    segments: int = 0  # number of segments; 0 = none
    bias: tuple[int, int, int, int] | None = None
    mask: tuple[int, int, int, int] | None = None
    fill: str = "normal"  # see _values
    spread: float = 1.0  # standard deviation of queries and keys

    def __post_init__(self) -> None:
        if not self.v:
            object.__setattr__(self, "v", self.d)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            band=self.causal or self.window is not None,
            lengths=self.q_lens is not None or self.kv_lens is not None,
            segments=self.segments > 0,
            soft_cap=bool(self.soft_cap),
            sinks=self.sinks,
            bias=self.bias is not None,
            mask=self.mask is not None,
        )

    @property
    def scale_value(self) -> float:
        return self.d**-0.5 if self.scale is None else self.scale

    @property
    def sides(self) -> tuple[int, int]:
        """(left, right) of the band; UNBOUNDED where there is no limit."""
        left, right = self.window or (None, None)
        right = min(UNBOUNDED if right is None else right, 0) if self.causal else right
        return UNBOUNDED if left is None else left, UNBOUNDED if right is None else right

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [b] each: real queries and real keys of each example."""
        q = np.full(self.b, self.t) if self.q_lens is None else np.array(self.q_lens)
        kv = np.full(self.b, self.s) if self.kv_lens is None else np.array(self.kv_lens)
        return q.astype(np.int32), kv.astype(np.int32)

    @property
    def offset(self) -> np.ndarray:
        """int32 [b]: the diagonal is j = i + offset."""
        q, kv = self.lengths
        return kv - q if self.bottom_right else np.zeros_like(q)


@dataclass(frozen=True)
class Inputs:
    """Arrays of one case in float64 (integers and booleans in their own), with the cotangents of out and lse."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray  # [b, n, t]
    q_segments: np.ndarray | None = None
    kv_segments: np.ndarray | None = None
    sinks: np.ndarray | None = None
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None


def rounded(x: Any, dtype: str) -> np.ndarray:
    """float64 array of the nearest values of `dtype`."""
    return np.asarray(x, np.float64).astype(DTYPES[dtype]).astype(np.float64)


def _values(rng: np.random.Generator, fill: str, shape: tuple[int, ...], spread: float) -> np.ndarray:
    """normal; constant (one number everywhere); offset (one large mean per channel); outlier (few channels x20);
    both (the last two); integers in [-2, 2], whose sums are exact in every dtype."""
    x = rng.normal(size=shape) * spread
    if fill == "normal":
        return x
    if fill == "constant":
        return np.full(shape, spread)
    if fill == "integers":
        return rng.integers(-2, 3, shape).astype(np.float64)
    channels = shape[-1]
    if fill in ("outlier", "both"):
        x[..., rng.permutation(channels)[: max(1, channels // 32)]] *= 20
    if fill in ("offset", "both"):
        x = x + rng.normal(size=channels) * 3
    if fill not in ("offset", "outlier", "both"):
        raise ValueError(f"unknown fill {fill!r}")
    return x


def inputs(case: Case, dtype: str, seed: int = 0) -> Inputs:
    """The arrays of `case`, the same for the same name and seed."""
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), seed])
    c = case
    query = _values(rng, c.fill, (c.b, c.t, c.n, c.d), c.spread)
    key = _values(rng, c.fill, (c.b, c.s, c.k, c.d), c.spread)
    value = _values(rng, c.fill, (c.b, c.s, c.k, c.v), 1.0)
    dout = rng.normal(size=(c.b, c.t, c.n, c.v))
    dlse = rng.normal(size=(c.b, c.n, c.t))
    acc = "float64" if dtype == "float64" else "float32"
    segments: tuple[Any, Any] = (None, None)
    if c.segments:
        segments = tuple(np.sort(rng.integers(0, c.segments, (c.b, x)), axis=1).astype(np.int32) for x in (c.t, c.s))
    return Inputs(
        *(rounded(x, dtype) for x in (query, key, value, dout)),
        rounded(dlse, acc),
        *segments,
        sinks=rounded(rng.normal(size=c.n), acc) if c.sinks else None,
        bias=rounded(rng.normal(size=c.bias), dtype) if c.bias else None,
        mask=rng.random(c.mask) > 0.3 if c.mask else None,
    )


def _lengths_cases() -> list[Case]:
    """Lengths at and around tile edges, T != S included."""
    pairs = [(1, 1), (1, 65), (63, 63), (64, 65), (65, 64), (127, 129), (128, 128), (129, 127), (1, 300), (200, 1)]
    plain = [Case(f"len_{t}x{s}", t=t, s=s) for t, s in pairs]
    causal = [Case(f"causal_{t}x{s}", t=t, s=s, causal=True) for t, s in pairs]
    bottom = [Case(f"bottom_{t}x{s}", t=t, s=s, causal=True, bottom_right=True) for t, s in pairs]
    return [*plain, *causal, *bottom, Case("causal_1000", b=1, t=1000, s=1000, n=1, k=1, causal=True)]


def _head_cases() -> list[Case]:
    """N / K in 1, 2, 4, 7, 8, and depths of values that differ from those of keys."""
    groups = [(3, 3), (4, 2), (4, 1), (7, 1), (14, 2), (16, 2)]
    heads = [Case(f"heads_{n}_{k}", t=65, s=70, n=n, k=k, causal=True) for n, k in groups]
    depths = [Case(f"depth_{d}_{v}", d=d, v=v) for d, v in [(64, 128), (128, 64), (16, 8), (96, 96), (72, 40), (1, 1)]]
    return heads + depths


def _mask_cases() -> list[Case]:
    lens = {"q_lens": (70, 33), "kv_lens": (90, 1)}
    return [
        Case("window_17_5", t=100, s=100, window=(17, 5)),
        Case("window_0_0", t=70, s=70, window=(0, 0)),
        Case("window_left", t=100, s=130, window=(40, None), causal=True, bottom_right=True),
        Case("window_right", t=100, s=80, window=(None, 3)),
        Case("window_far", t=140, s=70, window=(2, 2)),  # the last rows see no key
        Case("lengths", t=80, s=90, **lens),
        Case("lengths_zero", t=40, s=40, q_lens=(0, 40), kv_lens=(40, 0)),
        Case("lengths_causal", t=80, s=90, causal=True, **lens),
        Case("lengths_bottom", t=80, s=90, causal=True, bottom_right=True, **lens),
        Case("lengths_window", t=80, s=90, window=(20, 3), bottom_right=True, **lens),
        Case("segments", t=90, s=90, segments=3),
        Case("segments_causal", t=90, s=90, segments=3, causal=True),
        Case("segments_disjoint", b=1, t=20, s=70, segments=9),  # some queries find no key of their segment
        Case("mask_full", t=40, s=50, n=4, k=2, mask=(2, 4, 40, 50)),
        Case("mask_keys", t=40, s=50, mask=(2, 1, 1, 50)),
        Case("mask_shared", t=40, s=50, mask=(1, 1, 40, 50)),
        Case("mask_queries", t=40, s=50, mask=(2, 1, 40, 1)),  # whole rows see no key
    ]


def _score_cases() -> list[Case]:
    biases = [(2, 4, 40, 50), (1, 4, 40, 50), (2, 1, 40, 50), (1, 1, 1, 50), (2, 1, 40, 1), (1, 4, 1, 1), (1, 1, 1, 1)]
    bias = [Case(f"bias_{'_'.join(map(str, x))}", t=40, s=50, n=4, k=2, bias=x) for x in biases]
    everything = Case(
        "everything", t=80, s=90, n=4, k=2, v=32, window=(60, 20), bottom_right=True, q_lens=(70, 33), kv_lens=(90, 41),
        scale=0.2, soft_cap=4.0, sinks=True, segments=2, bias=(2, 1, 80, 90), mask=(1, 4, 80, 90),
    )  # fmt: skip
    return [
        *bias,
        Case("bias_causal", t=60, s=60, n=4, k=2, bias=(2, 4, 60, 60), causal=True),
        Case("soft_cap", t=100, s=100, soft_cap=5.0, spread=2.0),
        Case("soft_cap_hard", t=60, s=60, soft_cap=0.5, spread=2.0),  # nearly every logit is bent flat
        Case("soft_cap_bias", t=60, s=60, soft_cap=2.0, bias=(1, 2, 60, 60)),
        Case("sinks", t=65, s=65, n=4, k=2, sinks=True),
        Case("sinks_dead_rows", t=65, s=40, n=4, k=2, sinks=True, causal=True, bottom_right=True),
        Case("scale_small", scale=0.01),
        Case("scale_large", scale=1.0),
        everything,
    ]


def _value_cases() -> list[Case]:
    """Inputs that Gaussian tests do not stand for."""
    fills = [Case(f"fill_{f}", t=70, s=90, n=4, k=2, fill=f) for f in ("constant", "offset", "outlier", "both")]
    return [
        *fills,
        Case("fill_integers", t=70, s=90, n=4, k=2, fill="integers", causal=True),
        Case("fill_both_causal", t=130, s=130, n=8, k=1, fill="both", causal=True),
        Case("spread_4", spread=4.0),  # logits of standard deviation 16
    ]


CASES: tuple[Case, ...] = (*_lengths_cases(), *_head_cases(), *_mask_cases(), *_score_cases(), *_value_cases())
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases share a name"
