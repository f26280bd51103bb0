"""Whether a result is right: exact values in float64, and error bounds known before the call, element by element.

The tests' usual rule (twice the error of an unfused computation) needs many elements: of a few, the unfused ones may be
exact by luck. Here the bound is a running one. With `u` the spacing of the operands' dtype and `a` that of the
accumulation dtype, a weight P has the relative error

    e_i = DTYPE u + ACC a (1 + max_j L_ij),     L = scale |q||k| + |bias|   (a logit is off by a multiple of a L)

and everything that is summed from weights has that error times the sum of its absolute terms: out: sum P |v|; dS:
P (A + sum P A + |dLSE|) with A = |dO||v|; then dQ, dK, dV, dbias, dsinks, dscale by their sums of these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from compare import Result, oracle, visibility
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


def bounds(case: Case, inp: Inputs, dtypes: tuple[str, str], exact: Result) -> Result:
    """Largest allowed error of each element."""
    dtype, bias_dtype = dtypes
    u, a, tiny = SPACING[dtype], SPACING["float64" if dtype == "float64" else "float32"], SMALLEST[dtype]
    see, scale, group = visibility(case, inp), case.scale_value, case.n // case.k
    q, k, v, do = (np.abs(x).swapaxes(1, 2) for x in (inp.query, inp.key, inp.value, inp.dout))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    signed = [x.swapaxes(1, 2) for x in (inp.query, inp.key)]
    x = scale * signed[0] @ np.repeat(signed[1], group, 1).swapaxes(2, 3)
    size = scale * q @ k.swapaxes(2, 3)
    if case.bias:
        x = x + inp.bias
        size = size + np.where(np.isfinite(inp.bias), np.abs(inp.bias), 0)
    bent = np.tanh(x / case.soft_cap) if case.soft_cap else np.zeros_like(x)
    x = case.soft_cap * bent if case.soft_cap else x
    finite = np.where(np.isfinite(exact.lse), exact.lse, 0)
    p = np.where(see, np.exp(np.minimum(x - finite[..., None], 0)), 0)
    sink = np.abs(inp.sinks)[:, None] if case.sinks else 0.0
    logit = ACC * a * (1 + np.max(np.where(see, size, 0), axis=3, initial=0) + sink)[..., None]
    relative = DTYPE * u + logit
    absolute = tiny * see
    dp = do @ v.swapaxes(2, 3)
    dlse = np.where(np.isfinite(exact.lse), np.abs(inp.dlse), 0)
    spread = dp + (p * dp).sum(axis=3, keepdims=True) + dlse[..., None]
    ds = (DTYPE * u * (1 - bent**2) + logit) * p * spread + absolute * (1 + spread)

    def heads(y: np.ndarray) -> np.ndarray:
        return y.reshape(case.b, case.k, group, *y.shape[2:]).sum(axis=2).swapaxes(1, 2) + tiny

    dq = (scale * ds @ k + u * np.abs(exact.dq.swapaxes(1, 2)) + tiny).swapaxes(1, 2)
    p_sink = np.exp(np.minimum((inp.sinks[:, None] if case.sinks else -np.inf) - finite, 0))
    delta = (p * dp).sum(axis=3) + dlse
    small_out = p_sink * tiny * do.sum(axis=3)  # delta comes from out, whose small values are rounded coarsely
    dbias = None
    if case.bias:
        dbias = ds.sum(axis=tuple(i for i in range(4) if case.bias[i] == 1), keepdims=True)
        dbias = dbias + SPACING[bias_dtype] * np.abs(exact.dbias) + tiny + SMALLEST[bias_dtype]
    return Result(
        ((relative * p + absolute) @ v + tiny).swapaxes(1, 2),
        logit[..., 0] + (ACC * a + SPACING["float32"]) * np.abs(finite),
        dq, heads(scale * ds.swapaxes(2, 3) @ q), heads((relative * p + absolute).swapaxes(2, 3) @ do),
        dbias, ((relative[..., 0] * p_sink + tiny) * delta + small_out).sum(axis=(0, 2)) + tiny if case.sinks else None,
        (dq * np.abs(inp.query)).sum() / scale + tiny,
    )  # fmt: skip


def judge(got: Result, case: Case, inp: Inputs, dtype: str, bias_dtype: str | None = None) -> Fault:
    """The element with the largest error against its bound; above 1 it is wrong."""
    with np.errstate(all="ignore"):
        exact, _ = oracle(case, inp)
        allowed = bounds(case, inp, (dtype, bias_dtype or dtype), exact)
    worst = Fault("", 0.0, "")
    for name, value in got._asdict().items():
        if value is None:
            continue
        value, wanted, limit = np.asarray(value).astype(np.float64), getattr(exact, name), getattr(allowed, name)
        if value.shape != wanted.shape:
            return Fault(name, np.inf, f"{name}: shape {value.shape}, not {wanted.shape}")
        with np.errstate(invalid="ignore"):
            ratio = np.where(value == wanted, 0.0, np.abs(value - wanted) / limit)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        ratio = np.where(np.abs(wanted) > LARGEST[dtype], 0.0, ratio) if name != "lse" else ratio
        if ratio.size and ratio.max() > worst.ratio:
            at = np.unravel_index(ratio.argmax(), ratio.shape)
            where = tuple(int(i) for i in at)
            text = f"{name}{list(where)}: {value[at]:.9g}, exactly {wanted[at]:.9g}, allowed error {limit[at]:.3g}"
            worst = Fault(name, float(ratio.max()), text)
    return worst
