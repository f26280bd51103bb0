"""Online softmax over accumulator rows: a thread holds two, r and r + 8, each spread over the four lanes of a quad."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
STEEP = 2.0**24  # of a row's base, in powers of two


def by_row(acc):
    """An accumulator ((2, 2, V), 1, 1) as (2 rows, 2 V columns); column c stands at `column_of(c)` of the tile."""
    (_, _, v), _, _ = acc.layout.shape
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, v)), stride=(2, (1, 4))))


def column_of(c):
    """Place of a thread's column c, counted from the quad lane's first, which is 2 * (lane % 4)."""
    return 8 * (c // 2) + c % 2


def first_row(thread):
    """The first of a math thread's two rows of the tile."""
    return 16 * (thread // 32) + thread % 32 // 4


def across_quad(x, op):
    """op over the four lanes that share a row."""
    for offset in (1, 2):
        x = op(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def quad_sum(x):
    return across_quad(x, operator.add)


def product(x, y):
    """x * y rounded, whatever follows: ptxas fuses a plain product with a sum or difference after it."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def power_of_two(x):
    """The one at or below x > 0."""
    cell = cute.make_rmem_tensor(1, Float32)
    cell[0] = x
    bits = cute.recast_tensor(cell, Int32)
    bits[0] = bits[0] & 0x7F800000
    return cell[0]


@cute.jit
def row_scale(top, scale):
    """What scores of a row with peak `top` are multiplied with; scale: (the scale, power_of_two of it).

    An exponent is fma(score, scale, -base), base = top * scale rounded. At the peak that leaves what the rounding cut
    off: a factor common to the row, which cancels, as long as it is a number. From a base of 2^24 on it may reach
    2^(+-1), from 2^28 on nothing. There the power of two stands in: its products are exact, the peak's weight is 1, and
    any other score is at least one step below, half a base's spacing, which is less than such scores are exact to.
    """
    fine, coarse = scale
    return fine if cute.arch.fmax(top * fine, -(top * fine)) < STEEP else coarse


@cute.jit
def weigh(scores, peak, total, scale):
    """Scores become exp2(scale * score - base); peak and total move on. Returns what older sums shrink by.

    scale: as for row_scale. A row that saw nothing yet keeps peak -inf: its base is 0, so that nothing becomes NaN.
    """
    view = by_row(scores)
    shrink = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        line = view[r, None]
        top = across_quad(line.load().reduce(cute.ReductionOp.MAX, peak[r], 0), cute.arch.fmax)
        factor = row_scale(top, scale)
        base = Float32(0.0) if top == -Float32.inf else product(top, factor)
        exponents = cute.math.fma(line.load(), cute.full_like(line, factor), cute.full_like(line, -base))
        weights = cute.math.exp2(exponents, fastmath=True)
        # Where the peak has not moved this is exactly 1; the older base was product(peak, factor), its rounding too.
        shrink[r] = cute.math.exp2(product(peak[r], factor) - base, fastmath=True)
        total[r] = total[r] * shrink[r] + weights.reduce(cute.ReductionOp.ADD, Float32(0), 0)
        peak[r] = top
        line.store(weights)
    return shrink


@cute.jit
def scale_rows(acc, factor):
    view = by_row(acc)
    for r in cutlass.range_constexpr(2):
        view[r, None].store(view[r, None].load() * factor[r])
