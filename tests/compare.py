"""What attention should give: an unfused numpy oracle, the same with a dtype's roundings, and the error rule.

The error rule: the error against float64 is at most twice that of an unfused computation in the same dtype, plus a
floor. The floor is half a spacing of the dtype at the largest exact value (one rounding of the result), plus 16
spacings of the accumulation dtype at the largest sum of absolute terms (sums that cancel, as dq of constant inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from problems import DTYPES, Case, Inputs

Array = np.ndarray


class Result(NamedTuple):
    """Outputs and gradients of one problem; None where the case has no such operand."""

    out: Array  # [b, t, n, v]
    lse: Array  # [b, n, t]
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None  # [n]
    dscale: Array  # []


def visibility(case: Case, inp: Inputs) -> Array:
    """bool [b, n, t, s], n being 1 without a dense mask; straight from the definitions, not through jax_fa4.mask, which
    is under test too."""
    see = np.ones((case.b, 1, case.t, case.s), bool)
    i, j = np.arange(case.t)[:, None], np.arange(case.s)[None, :]
    left, right = case.window or (None, None)
    for e in range(case.b):
        q_len = case.t if case.q_lens is None else case.q_lens[e]
        kv_len = case.s if case.kv_lens is None else case.kv_lens[e]
        off = kv_len - q_len if case.bottom_right else 0
        rule = (i < q_len) & (j < kv_len)
        rule &= (j <= i + off) | (not case.causal)
        rule &= True if left is None else i + off - left <= j
        rule &= True if right is None else j <= i + off + right
        if case.segments:
            rule &= inp.q_segments[e][:, None] == inp.kv_segments[e][None, :]
        see[e] = rule[None]
    return see & inp.mask if case.mask else see


def attend(
    case: Case, inp: Inputs, see: Array, acc: type, cut: Callable[[Array], Array], xp: Any = np,
    stored: Callable[[Array], Array] | None = None,
) -> tuple[Result, Result]:  # fmt: skip
    """(result, the same sums over absolute values). Arithmetic in `acc`; `cut` rounds what an unfused computation in
    the inputs' dtype would keep in that dtype: probabilities, their cotangent, the scores' cotangent, results. `xp` is
    numpy or jax.numpy; with the latter arrays, scale and cap may be traced. `stored` rounds `out` for delta."""
    group, scale = case.n // case.k, xp.asarray(case.scale_value, acc)
    cap = None if case.soft_cap is None else xp.asarray(case.soft_cap, acc)
    q, k, v, do = (x.astype(acc).swapaxes(1, 2) for x in (inp.query, inp.key, inp.value, inp.dout))  # [b, n, ., .]
    k, v = xp.repeat(k, group, 1), xp.repeat(v, group, 1)
    dlse = inp.dlse.astype(acc)
    x = scale * (q @ k.swapaxes(2, 3)) + (inp.bias.astype(acc) if case.bias else acc(0))
    bent = xp.zeros_like(x) if cap is None else xp.tanh(x / cap)
    x = xp.where(see, x if cap is None else cap * bent, -np.inf).astype(acc)
    sink = inp.sinks.astype(acc)[None, :, None] if case.sinks else xp.full((1, case.n, 1), -np.inf, acc)
    top = xp.maximum(x.max(axis=3, initial=-np.inf), sink)
    base = xp.where(xp.isneginf(top), acc(0), top)
    with np.errstate(divide="ignore", under="ignore"):
        total = xp.exp(x - base[..., None]).sum(axis=3) + xp.exp(sink - base)
        lse = xp.log(total) + base
    finite = xp.where(xp.isneginf(lse), acc(0), lse)
    with np.errstate(under="ignore"):
        p = xp.exp(x - base[..., None]) / xp.where(total == 0, acc(1), total)[..., None]
        p_sink = xp.exp(sink - finite)
    dlse = xp.where(xp.isneginf(lse), acc(0), dlse)
    pc = cut(p)
    out = pc @ v
    dp = cut(do @ v.swapaxes(2, 3))
    delta = ((p * dp).sum(axis=3) if stored is None else (do * stored(out)).sum(axis=3)) - dlse
    slope = 1 - bent**2
    dx = cut(p * (dp - delta[..., None]) * slope)
    sizes = p * (xp.abs(do) @ xp.abs(v).swapaxes(2, 3) + (p * xp.abs(dp)).sum(axis=3, keepdims=True))
    sizes = (sizes + p * xp.abs(dlse)[..., None]) * slope

    def heads(y: Array) -> Array:  # [b, n, s, .] summed over the group -> [b, s, k, .]
        return y.reshape(case.b, case.k, group, *y.shape[2:]).sum(axis=2).swapaxes(1, 2)

    def broadcast(y: Array) -> Array:
        return y.sum(axis=tuple(a for a in range(4) if case.bias[a] == 1), keepdims=True)

    def gradients(out: Array, p: Array, dx: Array, q: Array, k: Array, do: Array, delta: Array) -> Result:
        return Result(
            cut(out.swapaxes(1, 2)), lse,
            cut((scale * (dx @ k)).swapaxes(1, 2)), cut(heads(scale * (dx.swapaxes(2, 3) @ q))),
            cut(heads(p.swapaxes(2, 3) @ do)), cut(broadcast(dx)) if case.bias else None,
            -(p_sink * delta).sum(axis=(0, 2)) if case.sinks else None, (dx * (q @ k.swapaxes(2, 3))).sum(),
        )  # fmt: skip

    result = gradients(out, pc, dx, q, k, do, delta)
    total_sizes = gradients(pc @ xp.abs(v), pc, sizes, xp.abs(q), xp.abs(k), xp.abs(do), xp.abs(delta))
    return result, total_sizes


def oracle(case: Case, inp: Inputs) -> tuple[Result, Result]:
    """(exact in float64, sizes: the same sums over absolute terms, which scale the floor)."""
    return attend(case, inp, visibility(case, inp), np.float64, lambda x: x)


def unfused(case: Case, inp: Inputs, dtype: str) -> Result:
    """A dense computation in `dtype` with float32 sums (float64 for float64)."""
    acc = np.float64 if dtype == "float64" else np.float32
    with np.errstate(over="ignore"):
        return attend(case, inp, visibility(case, inp), acc, lambda x: x.astype(DTYPES[dtype]).astype(acc))[0]


def _eps(dtype: str) -> float:
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]


def excess(
    name: str, got: Array, exact: Array, plain: Array, size: Array, dtype: str, true: Array | None = None
) -> str | None:
    """What is wrong with `got`, in words with numbers, or None. The rule is applied to the largest and to the root mean
    square error. `true`: what `plain` is compared with, if that is another one."""
    got = np.asarray(got).astype(np.float64)
    if got.shape != exact.shape:
        return f"{name}: shape {got.shape}, not {exact.shape}"
    odd = ~np.isfinite(exact)
    if not np.array_equal(got[odd], exact[odd]):
        return f"{name}: {got[odd].ravel()[:4]} where {exact[odd].ravel()[:4]} is exact"
    true = (exact if true is None else true)[~odd]
    got, exact, plain = got[~odd], exact[~odd], plain.astype(np.float64)[~odd]
    if got.size == 0:
        return None
    if not np.isfinite(got).all():
        return f"{name}: {np.sum(~np.isfinite(got))} of {got.size} values are not finite"
    acc = "float64" if dtype == "float64" else "float32"
    own = acc if name in ("lse", "dsinks", "dscale") else dtype
    big = max(np.abs(size[np.isfinite(size)]).max(initial=0), 1.0 if name == "lse" else 0.0)
    floor = _eps(own) / 2 * np.abs(exact).max() + 16 * _eps(acc) * big
    for kind, measure in (("largest", lambda x: np.abs(x).max()), ("rms", lambda x: np.sqrt(np.mean(x * x)))):
        error, allowed = measure(got - exact), 2 * measure(plain - true) + floor
        if not error <= allowed:
            return f"{name}: {kind} error {error:.3g}, allowed {allowed:.3g} = 2 x unfused + floor {floor:.3g}"
    return None


def of_stored_out(case: Case, inp: Inputs, dtype: str) -> Result:
    """Exact but for delta, a sum over `out` as the forward stores it: all that a fused backward can know."""

    def stored(out: Array) -> Array:
        return out.astype(DTYPES[dtype]).astype(np.float64)

    return attend(case, inp, visibility(case, inp), np.float64, lambda x: x, stored=stored)[0]


def check(got: Result, case: Case, inp: Inputs, dtype: str, from_stored: bool = False) -> None:
    """Fails, naming every tensor that breaks the error rule. Fields of `got` that are None are not looked at.

    from_stored: compare with what the stored `out` determines, by the same rule. Where channels have a common mean,
    what the rounding of `out` takes is left in dQ times the keys' mean.
    """
    exact, size = oracle(case, inp)
    plain = unfused(case, inp, dtype)
    given = of_stored_out(case, inp, dtype) if from_stored else exact
    found = []
    for name, value in got._asdict().items():
        if value is not None:
            spare = (getattr(r, name) for r in (given, plain, size))
            found.append(excess(name, value, *spare, dtype, getattr(exact, name)))
    wrong = [x for x in found if x]
    assert not wrong, f"{case.name} in {dtype}: " + "; ".join(wrong)
