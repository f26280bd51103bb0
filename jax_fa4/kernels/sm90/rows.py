"""Online softmax over accumulator rows: a thread holds two, r and r + 8, each spread over the four lanes of a quad."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


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


@cute.jit
def weigh(scores, peak, total, scale):
    """Scores become exp2(scale * score - base); peak and total move on. Returns what older sums shrink by.

    A row that saw nothing yet keeps peak -inf: its base is 0, so that nothing becomes NaN.
    """
    view = by_row(scores)
    shrink = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        line = view[r, None]
        top = across_quad(line.load().reduce(cute.ReductionOp.MAX, peak[r], 0), cute.arch.fmax)
        base = 0.0 if top == -Float32.inf else top * scale
        weights = cute.math.exp2(line.load() * scale - base, fastmath=True)
        shrink[r] = cute.math.exp2(peak[r] * scale - base, fastmath=True)
        total[r] = total[r] * shrink[r] + weights.reduce(cute.ReductionOp.ADD, Float32(0), 0)
        peak[r] = top
        line.store(weights)
    return shrink


@cute.jit
def scale_rows(acc, factor):
    view = by_row(acc)
    for r in cutlass.range_constexpr(2):
        view[r, None].store(view[r, None].load() * factor[r])
