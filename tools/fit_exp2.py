"""Fits the polynomial for 2^f on [0, 1) of the exponentials on the FMA pipe: `python tools/fit_exp2.py`.

p(f) = 1 + c1 f + ... + cn f^n with the smallest largest relative error |p(f) / 2^f - 1|, found as a linear program on a
fine grid. The constant is exactly 1, so that powers of two are exact. Coefficients are then rounded to float32 one by
one from the highest, the others refitted after each, so that the rounding of one is made up for by the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

GRID = 4001


def fit(degree: int, fixed: dict[int, float] | None = None) -> tuple[dict[int, float], float]:
    """(coefficients by power, largest relative error), those in `fixed` kept."""
    fixed = fixed or {}
    f = (1 - np.cos(np.linspace(0, np.pi, GRID))) / 2  # denser at the ends, where the error of such fits peaks
    weight = 2.0**-f
    free = [n for n in range(1, degree + 1) if n not in fixed]
    known = weight * (1 + sum((c * f**n for n, c in fixed.items()), start=np.zeros_like(f))) - 1
    if not free:
        return dict(fixed), float(np.abs(known).max())
    columns = np.stack([weight * f**n for n in free], axis=1)
    scale = 2.0**-20  # the error in units that the solver's tolerances suit
    ones = np.full((GRID, 1), -scale)
    a = np.block([[columns, ones], [-columns, ones]])
    b = np.concatenate([-known, known])
    cost = np.zeros(len(free) + 1)
    cost[-1] = 1
    bounds = [(None, None)] * len(free) + [(0, None)]
    found = linprog(cost, a, b, bounds=bounds, method="highs")
    assert found.success, found.message
    return {**fixed, **dict(zip(free, found.x[:-1].tolist(), strict=True))}, float(found.x[-1] * scale)


def coefficients(degree: int) -> tuple[float, ...]:
    """c1 ... cn, each a float32."""
    fixed: dict[int, float] = {}
    for n in range(degree, 0, -1):
        made, _ = fit(degree, fixed)
        fixed[n] = float(np.float32(made[n]))
    return tuple(fixed[n] for n in range(1, degree + 1))


def evaluate(x: np.ndarray, c: Sequence[float]) -> np.ndarray:
    """What the kernel computes, float32 rounding by rounding, for x <= 127: max, add toward -inf, two subtractions,
    fused multiply-adds, an integer add to the exponent."""
    x = np.maximum(x.astype(np.float32), np.float32(-127))
    shift = np.float32(12582912.0)
    shifted = (np.float64(shift) + np.floor(x.astype(np.float64))).astype(np.float32)  # exact: an integer below 2^24
    f = (x - (shifted - shift)).astype(np.float32)
    p = np.full_like(f, np.float32(c[-1]))
    for k in (*reversed(c[:-1]), 1.0):
        p = (p.astype(np.float64) * f.astype(np.float64) + np.float64(np.float32(k))).astype(np.float32)
    power = (shifted.view(np.int32).astype(np.int64) << 23) & 0xFFFFFFFF
    bits = (p.view(np.int32).astype(np.int64) + power) & 0xFFFFFFFF
    return bits.astype(np.uint32).view(np.float32)


def error(c: Sequence[float]) -> float:
    """Largest relative error of `evaluate` over [-24, 8], on the points of the table in the docs."""
    x = np.concatenate([np.linspace(-1, 0, 1 << 18), np.linspace(-24, 8, 1 << 18)]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    return float(np.abs(evaluate(x, c).astype(np.float64) / exact - 1).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--degree", type=int, nargs="*", default=[2, 3, 4, 5])
    for degree in parser.parse_args().degree:
        c = coefficients(degree)
        _, ideal = fit(degree)
        print(f"degree {degree}: largest relative error {error(c):.2e} in float32, {ideal:.2e} before rounding")
        for n, value in enumerate(c, start=1):
            print(f"    c{n} = {value!r}")


if __name__ == "__main__":
    main()
