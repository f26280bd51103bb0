"""What a fuzzed call is: a signature (all that decides compilation) from a fixed table, and freely drawn values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st
from problems import DTYPES, Case, Inputs, inputs, rounded

from fuzz.wrong import WRONG
from jax_fa4 import Unsupported

SHAPES = (  # (leading axes, t, s, n, k, d, v); small, with tile edges at 8 and 16 (see runner.SMALL_TILES)
    ((2,), 7, 9, 2, 1, 8, 8),
    ((1,), 16, 16, 4, 4, 16, 16),
    ((2,), 17, 15, 4, 2, 8, 24),
    ((3,), 1, 24, 3, 1, 8, 8),
    ((2,), 24, 1, 2, 2, 24, 8),
    ((), 13, 21, 2, 2, 8, 8),
    ((2, 2), 9, 8, 2, 1, 8, 16),
    ((1,), 33, 40, 6, 2, 8, 8),
    ((2,), 5, 5, 7, 7, 1, 3),
    ((1, 3), 8, 17, 8, 2, 5, 5),
    ((2,), 40, 33, 2, 1, 64, 64),
    ((2,), 0, 9, 2, 1, 8, 8),
    ((2,), 9, 0, 2, 2, 8, 8),
    ((0,), 4, 4, 2, 1, 8, 8),
)
FILLS = ("normal", "normal", "constant", "integers", "offset", "outlier", "both")
FLAGS = ("band", "lengths", "segments", "soft_cap", "sinks")
SMALL = 64  # longer problems have lengths and windows at the edges of kernels' tiles more often


@dataclass(frozen=True)
class Signature:
    """All that decides what is compiled."""

    shape: tuple[tuple[int, ...], int, int, int, int, int, int]
    dtype: str
    band: bool
    lengths: bool
    segments: bool
    soft_cap: bool
    sinks: bool
    bias: tuple[int, int, int, int] | None  # shape; each axis full or 1
    mask: tuple[int, int, int, int] | None
    short: bool  # leading axes of 1 of bias and mask are left out
    wide_bias: bool  # bias is float32 whatever the query is
    scale: str  # default | number | traced
    residual: bool
    deterministic: bool | None
    jit: bool


def table(count: int, seed: int = 0) -> tuple[Signature, ...]:
    """`count` signatures, the same for the same arguments. Each flag is on in about half of them, bias and mask in a
    quarter."""
    rng = np.random.default_rng([seed, count])

    def scores_like(shape: tuple) -> tuple[int, int, int, int] | None:
        if rng.random() < 0.75:
            return None
        lead, t, s, n = shape[:4]
        return tuple(int(x) if rng.random() < 0.6 else 1 for x in (math.prod(lead), n, t, s))

    made: list[Signature] = []
    while len(made) < count:
        shape = SHAPES[len(made) % len(SHAPES)]
        on = rng.random(9) < 0.5
        one = Signature(
            shape, str(rng.choice(["bfloat16", "float16", "float32", "float64"], p=[0.4, 0.2, 0.25, 0.15])),
            *map(bool, on[:5]), scores_like(shape), scores_like(shape), bool(on[5]), bool(on[6]),
            str(rng.choice(["default", "number", "traced"])), bool(on[7]), [None, True][int(on[8])],
            bool(rng.random() < 0.25),
        )  # fmt: skip
        if one not in made:
            made.append(one)
    return tuple(made)


@dataclass(frozen=True)
class Trial:
    """One call. Its repr is all that is needed to run it again."""

    signature: Signature
    causal: bool
    window: Any  # as the caller writes it
    bottom_right: bool
    q_lens: tuple[int, ...] | None
    kv_lens: tuple[int, ...] | None
    int_dtype: str  # of lengths and segment ids
    scale: float
    soft_cap: float
    fill: str
    spread: float
    holes: bool  # some entries of bias are -inf
    poison: bool  # NaN past the lengths
    implementation: Any
    seed: int
    wrong: str | None  # what is wrong with the call; it must be refused then

    @cached_property
    def case(self) -> Case:
        sig = self.signature
        lead, t, s, n, k, d, v = sig.shape
        sides = self.window if isinstance(self.window, tuple) or self.window is None else (self.window, self.window)
        return Case(
            f"fuzz{self.seed}", math.prod(lead), t, s, n, k, d, v, self.causal, self.bottom_right, sides,
            self.q_lens, self.kv_lens, None if sig.scale == "default" else self.scale,
            self.soft_cap if sig.soft_cap else None, sig.sinks, 3 if sig.segments else 0, sig.bias, sig.mask,
            self.fill, self.spread,
        )  # fmt: skip

    @cached_property
    def arrays(self) -> Inputs:
        """Inputs as `problems.inputs` makes them; segments in any order, bias with holes, dLSE 0 if not asked."""
        sig, case = self.signature, self.case
        inp = inputs(case, sig.dtype, self.seed)
        rng = np.random.default_rng(self.seed)
        if sig.bias and sig.wide_bias:
            inp = replace(inp, bias=rounded(inp.bias, "float32"))
        if sig.segments and (max(self.case.t, self.case.s) <= SMALL or self.seed % 2):  # else as packed sequences are
            inp = replace(inp, q_segments=rng.permuted(inp.q_segments, axis=1))
        if sig.bias and self.holes:
            inp = replace(inp, bias=np.where(rng.random(sig.bias) < 0.3, -np.inf, inp.bias))
        there = ~self.past()[0][:, None, :]  # a query past its length does not exist: no sink learns from it
        return replace(
            inp, dlse=rounded(inp.dlse, "float32") * sig.residual * there
        )  # the log-sum-exp is float32 always

    def past(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [b, t] and [b, s]: places at or past the lengths."""
        q, kv = self.case.lengths
        return np.arange(self.case.t) >= q[:, None], np.arange(self.case.s) >= kv[:, None]

    def operands(self) -> tuple[list[np.ndarray], dict[str, Any], tuple[np.ndarray, np.ndarray]]:
        """([q, k, v], other array arguments, cotangents), as the caller passes them."""
        sig, inp, dtype = self.signature, self.arrays, DTYPES[self.signature.dtype]
        lead = sig.shape[0]
        acc = np.float64 if sig.dtype == "float64" else np.float32
        q, k, v, dout = (x.copy() for x in (inp.query, inp.key, inp.value, inp.dout))
        dlse = np.moveaxis(inp.dlse, 1, 2).copy()
        if self.poison:
            late_q, late_kv = self.past()
            q[late_q], dout[late_q], dlse[late_q], k[late_kv], v[late_kv] = (np.nan,) * 5
        first = [x.astype(dtype).reshape(*lead, *x.shape[1:]) for x in (q, k, v)]
        rest: dict[str, Any] = {}
        if sig.bias:
            rest["bias"] = self._scores_like(inp.bias.astype(np.float32 if sig.wide_bias else dtype))
        if sig.mask:
            rest["mask"] = self._scores_like(inp.mask)
        if sig.sinks:
            rest["sinks"] = inp.sinks.astype(acc)
        if sig.scale == "traced":
            rest["scale"] = np.asarray(self.scale, acc)
        if sig.segments:
            rest["query_segment_ids"] = inp.q_segments.astype(self.int_dtype).reshape(*lead, sig.shape[1])
            rest["key_value_segment_ids"] = inp.kv_segments.astype(self.int_dtype).reshape(*lead, sig.shape[2])
        for name, lens in (("query_seq_lengths", self.q_lens), ("key_value_seq_lengths", self.kv_lens)):
            if lens is not None:
                rest[name] = np.asarray(lens, self.int_dtype).reshape(lead)
        cotangents = dout.astype(dtype), dlse.astype(np.float32)
        return first, rest, tuple(x.reshape(*lead, *x.shape[1:]) for x in cotangents)

    def _scores_like(self, x: np.ndarray) -> np.ndarray:
        lead = self.signature.shape[0]
        x = x.reshape((*lead, *x.shape[1:]) if x.shape[0] == math.prod(lead) else (*[1] * len(lead), *x.shape[1:]))
        while self.signature.short and x.ndim and x.shape[0] == 1:
            x = x[0]
        return x

    def options(self) -> dict[str, Any]:
        """The arguments that are no arrays."""
        sig = self.signature
        out: dict[str, Any] = {"return_residual": sig.residual, "deterministic": sig.deterministic}
        out |= {"is_causal": self.causal, "local_window_size": self.window, "implementation": self.implementation}
        out |= {"causal_alignment": "bottom_right" if self.bottom_right else "top_left"}
        out |= {"logits_soft_cap": self.soft_cap} if sig.soft_cap else {}
        return out | ({"scale": self.scale} if sig.scale == "number" else {})


def _window(draw: Callable, s: int) -> Any:
    side = st.one_of(st.none(), st.integers(0, s + 2), st.just(2**40))
    if s > SMALL:
        side = st.one_of(side, st.sampled_from(_edges(s)))
    kind = draw(st.sampled_from(("none", "int", "pair")))
    if kind == "none":
        return None
    return draw(st.integers(0, s + 2)) if kind == "int" else (draw(side), draw(side))


def _lengths(draw: Callable, batch: int, full: int) -> tuple[int, ...]:
    any_of = st.integers(0, full)
    if full > SMALL:
        any_of = st.one_of(any_of, st.sampled_from(_edges(full)))
    return tuple(draw(any_of) for _ in range(batch))


def _edges(full: int) -> list[int]:
    """Lengths next to where tiles of 64 to 192 end, and next to 0 and to all."""
    near = {edge + by for edge in (0, 64, 80, 96, 112, 128, 160, 192, 256, 384, full) for by in (-1, 0, 1)}
    return sorted(x for x in near if 0 <= x <= full)


@st.composite
def trials(draw: Callable, sig: Signature, implementations: tuple) -> Trial:
    """A call of this signature; in one of eight one thing is wrong. A jitted one takes the first implementation."""
    lead, t, s = sig.shape[:3]
    batch = math.prod(lead)
    fixed = np.random.default_rng(zlib.crc32(repr(sig).encode()))  # for what jit compiles in
    causal, window, bottom = False, None, bool(fixed.random() < 0.5) if sig.jit else draw(st.booleans())
    cap = float(fixed.uniform(0.5, 20)) if sig.jit else draw(st.floats(0.125, 50, width=32))
    constant = sig.jit and sig.scale == "number"
    scale = float(fixed.uniform(0.02, 1)) if constant else draw(st.floats(0.015625, 2, width=32))
    if sig.band and sig.jit:
        causal, window = [(True, None), (True, (3, 0)), (False, (2, 5)), (False, 4)][int(fixed.integers(4))]
    elif sig.band:
        window = _window(draw, s)
        causal = draw(st.booleans()) or window is None or window == (None, None)
    which = ("both", "q", "kv")[int(fixed.integers(3))] if sig.jit else draw(st.sampled_from(("both", "q", "kv")))
    q_lens = _lengths(draw, batch, t) if sig.lengths and which != "kv" else None
    kv_lens = _lengths(draw, batch, s) if sig.lengths and which != "q" else None
    # Empty problems have nothing that a kernel would have to take.
    kinds = sorted(name for name, one in WRONG.items() if batch * t * s or one.error is not Unsupported)
    half = sig.dtype == "float16"  # spreads above 1 overflow its gradients
    return Trial(
        sig, causal, window, bottom, q_lens, kv_lens,
        draw(st.sampled_from(("int32", "int64", "uint8" if max(t, s) < 256 else "uint16"))) if not sig.jit else "int32",
        scale, cap, draw(st.sampled_from(FILLS)),
        draw(st.sampled_from((0.0, 0.25, 1.0) if half else (0.0, 0.25, 1.0, 4.0))),
        draw(st.booleans()), draw(st.booleans()),
        implementations[0] if sig.jit else draw(st.sampled_from(implementations)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from(kinds)) if draw(st.integers(0, 7)) == 7 else None,
    )  # fmt: skip
