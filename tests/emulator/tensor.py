"""Tensor-core arithmetic and operand addressing, shared by wgmma and tcgen05.

Two arithmetics: `fast` (float32 BLAS) and `exact`, the truncated fused dot product of 16 terms that Hopper's wgmma
and Blackwell's
kind::f16 compute: products exact, every term truncated toward zero to a multiple of 2^(e_max - 25), integer sum,
float32 by truncation.
"""

import numpy as np

from .arith import bf16_to_f32
from .memory import CELL
from .tma import swizzle

K = 16  # elements of one k step, 16-bit types
WINDOW = 25
ATOM = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


def walk(start, leading, stride, mode, major_k, rows, k=K):
    """(rows, k) byte offsets in shared memory of a 16-bit operand. `start` is a shared offset, `leading` and `stride`
    the byte offsets
    of the descriptor, `rows` along M or N. Swizzling acts on the absolute address."""
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
    w = ATOM[mode]
    if major_k and mode != "none":
        offset = (r % 8) * w + (r // 8) * stride + 2 * c
    elif major_k:
        offset = (r % 8) * 16 + (r // 8) * stride + (2 * c // 16) * leading + (2 * c) % 16
    elif mode != "none":
        per = w // 2
        offset = (r % per) * 2 + (r // per) * leading + (c % 8) * w + (c // 8) * stride
    else:
        offset = (r % 8) * 2 + (r // 8) * stride + (c % 8) * 16 + (c // 8) * leading
    return swizzle(start + offset, mode)


_index = {}


def operand_index(start, leading, stride, mode, major_k, rows):
    """(element index array, unique cells, base) of an operand; cached by the low bits of `start`."""
    low = start & 1023
    key = (low, leading, stride, mode, major_k, rows)
    if key not in _index:
        at = walk(low, leading, stride, mode, major_k, rows)
        _index[key] = at // 2, np.unique(at // CELL)
    index, cells = _index[key]
    return index, cells, start - low


class Operand:
    """A descriptor operand of one MMA: where it lies. `read()` gives float32 (rows, 16)."""

    def __init__(self, shared, start, leading, stride, mode, major_k, rows, dtype):
        self.shared, self.dtype = shared, dtype
        self.index, cells, base = operand_index(start, leading, stride, mode, major_k, rows)
        self.base = base // 2
        self.cells = cells + base // CELL

    def begin(self, report, what):
        self.cells = self.shared.begin(self.cells, False, report, what)

    def end(self):
        self.shared.end(self.cells, False)

    def read(self, report, what):
        words = self.shared.typed(2, 1)[:, 0]
        if len(self.cells) and int(self.cells[-1]) * CELL + CELL > len(self.shared.data):
            report("out_of_bounds", f"{what} reaches beyond {self.shared.name}")
        index = self.index + self.base
        if int(index.max()) >= len(words):
            index = np.minimum(index, len(words) - 1)
        if not (self.shared.typed(8, 2, True)[self.cells] == np.uint64(0x0101010101010101)).all():
            report("uninitialised_read", f"{what} reads shared memory that nobody wrote")
        return widen(words[index], self.dtype)


def widen(words, dtype):
    """16-bit words to float32."""
    return bf16_to_f32(words) if dtype == "bf16" else words.view(np.float16).astype(np.float32)


def fast(a, b, c):
    """(rows, 16) x (columns, 16) + c in float32; `c` None = 0."""
    out = a @ b.T
    if c is not None:
        out += c
    return out


def _split(x, mantissa_bits):
    """(signed significand int64, encoded exponent int64) of float32 values that are bfloat16/float16 (or float32)
    numbers.

    Exponents are those of the format's encoding, subnormals at its minimum, so that nothing is normalised."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.int64)
    sign, exponent, fraction = bits >> 31, (bits >> 23) & 255, bits & 0x7FFFFF
    significand = np.where(exponent == 0, fraction, fraction | 0x800000) >> (23 - mantissa_bits)
    exponent = np.where(exponent == 0, 1, exponent) - 127
    return np.where(sign == 1, -significand, significand), exponent


def split16(x, dtype):
    """Significand and exponent of 16-bit operands held as float32: value = significand * 2^(exponent - bits)."""
    if dtype == "bf16":
        return (*_split(x, 7), 7)
    s, e = _split(x, 10)
    low = e < -14  # float16 subnormals: minimum encoded exponent -14, significand shifted to match
    shift = np.where(low, -14 - e, 0)
    return np.where(s < 0, -(np.abs(s) >> shift), s >> shift), np.where(low, -14, e), 10


def exact(a, b, c, dtype="bf16"):
    """The hardware's fused sum of 16 products and `c` for each output, bit by bit. Blocks of rows keep memory small."""
    m, n = a.shape[0], b.shape[0]
    out = np.empty((m, n), np.float32)
    sb, eb, frac = split16(b, dtype)
    c = np.zeros((m, n), np.float32) if c is None else c
    for r in range(0, m, 32):
        sa, ea, _ = split16(a[r : r + 32], dtype)
        out[r : r + 32] = _fused(sa, ea, sb, eb, c[r : r + 32], frac)
        plain = ~(
            np.isfinite(a[r : r + 32]).all(1)[:, None] & np.isfinite(b).all(1)[None, :] & np.isfinite(c[r : r + 32])
        )
        if plain.any():
            with np.errstate(all="ignore"):
                wide = (a[r : r + 32, None, :].astype(np.float64) * b[None].astype(np.float64)).sum(2) + c[r : r + 32]
            special = np.where(np.isnan(wide), np.uint32(0x7FFFFFFF).view(np.float32), wide.astype(np.float32))
            out[r : r + 32] = np.where(plain, special, out[r : r + 32])
    return out


def _fused(sa, ea, sb, eb, c, frac):
    product = sa[:, None, :] * sb[None, :, :]
    exponent = ea[:, None, :] + eb[None, :, :]
    sc, ec = _split(c, 23)
    lowest = -100000
    top = np.where(product != 0, exponent, lowest).max(2)
    top = np.maximum(top, np.where(sc != 0, ec, lowest))
    top = np.where(top == lowest, 0, top)
    total = _aligned(product, exponent - top[..., None] + WINDOW - 2 * frac).sum(2) + _aligned(
        sc, ec - top + WINDOW - 23
    )
    value = np.ldexp(total.astype(np.float64), top - WINDOW)
    near = value.astype(np.float32)
    over = np.abs(near.astype(np.float64)) > np.abs(value)
    return np.where(over, np.nextafter(near, np.float32(0)), near) + np.float32(0)


def _aligned(significand, shift):
    """significand * 2^shift truncated toward zero (int64)."""
    left = np.where(shift > 0, shift, 0)
    right = np.minimum(np.where(shift < 0, -shift, 0), 62)
    magnitude = (np.abs(significand) << left) >> right
    return np.where(significand < 0, -magnitude, magnitude)
