"""Online softmax over accumulator rows: a thread holds two, r and r + 8, each spread over the four lanes of a quad."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

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


def folded(line, op, chains):
    """op over a row's values, as `chains` independent chains: one alone waits for each result before the next."""
    parts = [line[c] for c in range(chains)]
    for c in range(chains, cute.size(line)):
        parts[c % chains] = op(parts[c % chains], line[c])
    while len(parts) > 1:
        parts = [op(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def exp2_by_fma(x):
    """2^x for x <= 127 without MUFU: adding 1.5 * 2^23 toward -inf leaves floor(x) in the low mantissa bits, a
    polynomial gives 2^(x - floor(x)), floor(x) is added to its exponent. Exactly 0 at or below -127.

    Degree 4, largest relative error 3.0e-6: with 3 the log-sum-exp of a row with one key would show it.
    """
    x = cute.arch.fmax(x, -127.0)
    cells = cute.make_rmem_tensor(2, Float32)
    cells[0] = cute.math.add(x, Float32(12582912.0), rounding=cute.math.RoundingMode.DOWN)
    f = x - (cells[0] - 12582912.0)
    p = Float32(0.01342704240232706)
    for c in (0.05224107950925827, 0.24128174781799316, 0.6930443048477173, 1.0):
        p = cute.math.fma(p, f, Float32(c))
    cells[1] = p
    bits = cute.recast_tensor(cells, Int32)
    bits[1] = bits[1] + (bits[0] << 23)
    return cells[1]


def exp2_of(x, column, plan):
    """2^x for a thread's column. plan.on_fma: of 16 column pairs, spread evenly, those without MUFU: which, depends on
    the column alone, or the same row would round differently in differently shaped calls."""
    emulated = column // 2 % 16 * plan.on_fma % 16 < plan.on_fma
    return exp2_by_fma(x) if emulated else cute.math.exp2(x, fastmath=True)


@cute.jit
def weigh(scores, state, scale, plan: cutlass.Constexpr):
    """Scores become exp2(scale * score - base); state (peak, total) moves on. Returns what older sums shrink by.

    scale: as for row_scale. plan: its chains, a power of two, on_fma and slack.
    A row that saw nothing yet keeps peak -inf: its base is 0, so that nothing becomes NaN.
    """
    view = by_row(scores)
    shrink = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        exponents_of(view[r, None], (state[0], shrink), r, scale, plan)
        shrink[r] = cute.math.exp2(shrink[r], fastmath=True)
        exponentiate(view[r, None], plan)
        add_row(view[r, None], state[1], shrink, r, plan)
    return shrink


@cute.jit
def exponents_of(line, moving, r: cutlass.Constexpr, scale, plan: cutlass.Constexpr):
    """A row's scores become scale * score - base. moving: (peak, the base that was less this one), whose r-th move on:
    older sums shrink by 2 to that."""
    peak, older = moving
    if const_expr(plan.chains > 1):
        top = cute.arch.fmax(folded(line, cute.arch.fmax, plan.chains), peak[r])
    else:
        top = line.load().reduce(cute.ReductionOp.MAX, peak[r], 0)
    top = across_quad(top, cute.arch.fmax)
    factor = row_scale(top, scale)
    if const_expr(plan.slack >= 0):
        top = peak[r] if (top - peak[r]) * factor <= plan.slack else top
    base = Float32(0.0) if top == -Float32.inf else product(top, factor)
    exponents = cute.math.fma(line.load(), cute.full_like(line, factor), cute.full_like(line, -base))
    # Where the peak has not moved this is exactly 0; the older base was product(peak, factor), its rounding too.
    older[r] = product(peak[r], factor) - base
    peak[r] = top
    line.store(exponents)


@cute.jit
def stand(peak, bases, scale, plan: cutlass.Constexpr):
    """By what a row's scores become exponents until its peak moves. bases: where they go, of both rows each: factors,
    bases, and the scores beyond which it moves."""
    factors, lows, limits = bases
    for r in cutlass.range_constexpr(2):
        factors[r] = row_scale(peak[r], scale)
        lows[r] = Float32(0.0) if peak[r] == -Float32.inf else product(peak[r], factors[r])
        limits[r] = peak[r] + plan.slack * cute.arch.rcp_approx(factors[r])


@cute.jit
def move(tops, moving, scale, plan: cutlass.Constexpr):
    """Rows with a score beyond their limit: the largest, of `tops`, is their peak now. moving: (peak, bases, where the
    base that was less the new one goes, 0 of a row that stays)."""
    peak, bases, older = moving
    was = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        was[r] = peak[r]
        peak[r] = tops[r] if tops[r] > bases[2][r] else peak[r]
    stand(peak, bases, scale, plan)
    for r in cutlass.range_constexpr(2):
        older[r] = product(was[r], bases[0][r]) - bases[1][r]


@cute.jit
def exponentiate(line, plan: cutlass.Constexpr):
    """Exponents become weights, in place."""
    if const_expr(plan.on_fma > 0):
        for c in cutlass.range_constexpr(cute.size(line)):
            line[c] = exp2_of(line[c], c, plan)
    else:
        line.store(cute.math.exp2(line.load(), fastmath=True))


@cute.jit
def add_row(line, total, shrink, r: cutlass.Constexpr, plan: cutlass.Constexpr):
    """The r-th total moves on by a row's weights."""
    if const_expr(plan.chains > 1):
        total[r] = total[r] * shrink[r] + folded(line, operator.add, plan.chains)
    else:
        total[r] = total[r] * shrink[r] + line.load().reduce(cute.ReductionOp.ADD, Float32(0), 0)


@cute.jit
def shrink_rows(acc, factor, slack: cutlass.Constexpr):
    """scale_rows, with a slack only where a row of the warp does move."""
    if const_expr(slack >= 0):
        if cute.arch.vote_any_sync((factor[0] != 1.0) | (factor[1] != 1.0)):
            scale_rows(acc, factor)
    else:
        scale_rows(acc, factor)


@cute.jit
def scale_rows(acc, factor):
    view = by_row(acc)
    for r in cutlass.range_constexpr(2):
        view[r, None].store(view[r, None].load() * factor[r])
