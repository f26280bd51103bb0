"""Whether a result is right: exact values in float64, and error bounds known before the call, element by element.

The tests' usual rule (twice the error of an unfused computation) needs many elements: of a few, the unfused ones may be
exact by luck. Here the bound is a running one. With `u` the spacing of the operands' dtype and `a` that of the
accumulation dtype, a weight P has the relative error

    e_i = DTYPE u + ACC a (1 + max_j L_ij),     L = scale |q||k| + |bias|   (a logit is off by a multiple of a L)

and everything that is summed from weights has that error times the sum of its absolute terms: out: sum P |v|; dS:
P (A + sum P A + |dLSE|) with A = |dO||v|; then dQ, dK, dV, dbias, dsinks, dscale by their sums of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from compare import Result, attend, visibility
from problems import Case, Inputs

DTYPE, ACC = 2.0, 8.0  # largest ratios seen are in the results of a run
SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Where small numbers end: XLA flushes float32 below 2^-126 to 0, in each of up to 1000 terms of a sum.
SMALLEST = {"float64": 1e-300, "float32": 2.0**-116, "float16": 2.0**-24, "bfloat16": 2.0**-116}
LARGEST = {"float64": 1e300, "float32": 1e38, "float16": 6e4, "bfloat16": 1e38}


class Fault(NamedTuple):
    """An element that is wrong, or the worst one that is right."""

    name: str
    ratio: float  # error / bound
    text: str


def bounds(case: Case, inp: Inputs, see: Any, dtypes: tuple[str, str], exact: Result, xp: Any = np) -> Result:
    """Largest allowed error of each element."""
    dtype, bias_dtype = dtypes
    u, a, tiny = SPACING[dtype], SPACING["float64" if dtype == "float64" else "float32"], SMALLEST[dtype]
    scale, group = case.scale_value, case.n // case.k
    q, k, v, do = (xp.abs(x).swapaxes(1, 2) for x in (inp.query, inp.key, inp.value, inp.dout))
    k, v = xp.repeat(k, group, 1), xp.repeat(v, group, 1)
    signed = [x.swapaxes(1, 2) for x in (inp.query, inp.key)]
    x = scale * signed[0] @ xp.repeat(signed[1], group, 1).swapaxes(2, 3)
    size = scale * q @ k.swapaxes(2, 3)
    if case.bias:
        x = x + inp.bias
        size = size + xp.where(xp.isfinite(inp.bias), xp.abs(inp.bias), 0)
    bent = xp.tanh(x / case.soft_cap) if case.soft_cap is not None else xp.zeros_like(x)
    x = case.soft_cap * bent if case.soft_cap is not None else x
    finite = xp.where(xp.isfinite(exact.lse), exact.lse, 0)
    p = xp.where(see, xp.exp(xp.minimum(x - finite[..., None], 0)), 0)
    sink = xp.abs(inp.sinks)[:, None] if case.sinks else 0.0
    logit = ACC * a * (1 + xp.max(xp.where(see, size, 0), axis=3, initial=0) + sink)[..., None]
    relative = DTYPE * u + logit
    absolute = tiny * see
    dp = do @ v.swapaxes(2, 3)
    dlse = xp.where(xp.isfinite(exact.lse), xp.abs(inp.dlse), 0)
    spread = dp + (p * dp).sum(axis=3, keepdims=True) + dlse[..., None]
    ds = (DTYPE * u * (1 - bent**2) + logit) * p * spread + absolute * (1 + spread)

    def heads(y: np.ndarray) -> np.ndarray:
        return y.reshape(case.b, case.k, group, *y.shape[2:]).sum(axis=2).swapaxes(1, 2) + tiny

    dq = (scale * ds @ k + u * xp.abs(exact.dq.swapaxes(1, 2)) + tiny).swapaxes(1, 2)
    p_sink = xp.exp(xp.minimum((inp.sinks[:, None] if case.sinks else -np.inf) - finite, 0))
    delta = (p * dp).sum(axis=3) + dlse
    small_out = p_sink * tiny * do.sum(axis=3)  # delta comes from out, whose small values are rounded coarsely
    dbias = None
    if case.bias:
        dbias = ds.sum(axis=tuple(i for i in range(4) if case.bias[i] == 1), keepdims=True)
        dbias = dbias + SPACING[bias_dtype] * xp.abs(exact.dbias) + tiny + SMALLEST[bias_dtype]
    return Result(
        ((relative * p + absolute) @ v + tiny).swapaxes(1, 2),
        logit[..., 0] + (ACC * a + SPACING["float32"]) * xp.abs(finite),
        dq, heads(scale * ds.swapaxes(2, 3) @ q), heads((relative * p + absolute).swapaxes(2, 3) @ do),
        dbias, ((relative[..., 0] * p_sink + tiny) * delta + small_out).sum(axis=(0, 2)) + tiny if case.sinks else None,
        (dq * xp.abs(inp.query)).sum() / scale + tiny,
    )  # fmt: skip


class Worst(NamedTuple):
    """A tensor's element with the largest error against its bound."""

    ratio: Any
    at: Any  # place in the flat tensor
    got: Any
    wanted: Any
    allowed: Any


def measure(got: Result, case: Case, inp: Inputs, see: Any, dtypes: tuple[str, str], xp: Any = np) -> dict[str, Worst]:
    """Each tensor's worst element. `xp`: numpy, or jax.numpy with 64 bits, where all but shapes may be traced."""
    exact, _ = attend(case, inp, see, np.float64, lambda x: x, xp)
    allowed = bounds(case, inp, see, dtypes, exact, xp)
    found = {}
    for name, value in got._asdict().items():
        wanted, limit = getattr(exact, name), getattr(allowed, name)
        if value is None or not value.size:
            continue
        assert value.shape == wanted.shape, f"{name}: shape {value.shape}, not {wanted.shape}"
        value = value.astype(np.float64)
        ratio = xp.where(value == wanted, 0.0, xp.abs(value - wanted) / limit)
        ratio = xp.where(xp.isnan(ratio), np.inf, ratio)
        ratio = xp.where(xp.abs(wanted) > LARGEST[dtypes[0]], 0.0, ratio) if name != "lse" else ratio
        at = ratio.argmax()
        found[name] = Worst(*(x.reshape(-1)[at] if x is not at else x for x in (ratio, at, value, wanted, limit)))
    return found


def judge(got: Result, case: Case, inp: Inputs, dtype: str, bias_dtype: str | None = None) -> Fault:
    """The element with the largest error against its bound; above 1 it is wrong."""
    got = Result(*(None if x is None else np.asarray(x) for x in got))
    with np.errstate(all="ignore"):
        found = measure(got, case, inp, visibility(case, inp), (dtype, bias_dtype or dtype))
    return worst_of(found, got)


def worst_of(found: dict[str, Worst], got: Result) -> Fault:
    """The worst of the worst, in words."""
    name = max(found, key=lambda name: found[name].ratio, default="")
    if not name or not found[name].ratio > 0:
        return Fault("", 0.0, "")
    worst = found[name]
    where = [int(i) for i in np.unravel_index(int(worst.at), getattr(got, name).shape)]
    text = f"{name}{where}: {worst.got:.9g}, exactly {worst.wanted:.9g}, allowed error {worst.allowed:.3g}"
    return Fault(name, float(worst.ratio), text)
