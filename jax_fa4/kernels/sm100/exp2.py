"""2^x of a register line: most pairs on MUFU, a plan-given share on the FMA pipe by a polynomial.

MUFU gives 16 results a clock and SM, which takes as long as both products of a 128 x 128 tile at depth 128 (1024
clocks); pairs computed on the FMA pipe take that load off it. Range reduction is Cody and Waite's: adding
1.5 * 2^23 toward -inf leaves floor(x) in the low mantissa bits, f = x - floor(x) is in [0, 1), a polynomial gives 2^f,
and floor(x) is added to its exponent as an integer. Needs x <= 127. At or below -127, -inf included, the result is
exactly 0; in (-127, -126) the exponent field is 0 and the result is some denormal, harmless as a weight next to 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

ROUND = 12582912.0  # 1.5 * 2^23
LOWEST = -127.0
# By degree, c1 upwards; the constant is 1. Fitted by tools/fit_exp2.py, largest relative error in float32 behind each.
# Degree 3 is below the rounding of 16-bit weights, but the row sum is of float32 weights: where a row sees one key its
# log-sum-exp is off by that error, 8.6e-5, ten times what an unfused computation has.
COEFFICIENTS = {
    3: (0.6951168179512024, 0.22764505445957184, 0.07706700265407562),  # 8.6e-5
    4: (0.6930443048477173, 0.24128174781799316, 0.05224107950925827, 0.01342704240232706),  # 3.0e-6
}


def _both(x):
    return (Float32(x), Float32(x))


def _by_fma(x, y, coefficients):
    """The two mantissas in [1, 2) and the two exponents, as bits of ROUND + floor."""
    arch = cute.arch
    pair = (arch.fmax(x, LOWEST), arch.fmax(y, LOWEST))
    shifted = arch.add_packed_f32x2(pair, _both(ROUND), rnd="rm")
    f = arch.sub_packed_f32x2(pair, arch.sub_packed_f32x2(shifted, _both(ROUND)))
    *lower, highest = coefficients
    p = _both(highest)
    for c in (*reversed(lower), 1.0):
        p = arch.fma_packed_f32x2(p, f, _both(c))  # this operand order: the static verifier knows no other
    return p, shifted


@cute.jit
def exp2_line(line, first: cutlass.Constexpr, emulated: cutlass.Constexpr, degree: cutlass.Constexpr):
    """In place; `line` holds the columns first, first + 1, ... of the tile; emulated(column): is that pair on FMA?
    degree: of the polynomial.

    The choice depends on the column only. Were it to depend on a mask or a row, the same row would round differently
    in differently shaped calls.
    """
    bits = cute.recast_tensor(line, Int32)
    for c in cutlass.range_constexpr(0, cute.size(line), 2):
        if const_expr(emulated(first + c)):
            mantissas, shifted = _by_fma(line[c], line[c + 1], COEFFICIENTS[degree])
            for j in cutlass.range_constexpr(2):
                power = cute.make_rmem_tensor(1, Float32)
                power[0] = shifted[j]
                line[c + j] = mantissas[j]
                bits[c + j] = bits[c + j] + (cute.recast_tensor(power, Int32)[0] << 23)
        else:
            for j in cutlass.range_constexpr(2):
                line[c + j] = cute.math.exp2(line[c + j], fastmath=True)  # type: ignore[attr-defined]
