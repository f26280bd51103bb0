"""Scalar arithmetic of PTX on numpy arrays, rounded as the ISA says. Every function is element-wise and broadcasts.

Approximate functions (ex2, lg2, rcp, rsqrt, sqrt, tanh `.approx`) are computed in float64 and rounded once: PTX only
bounds
their error, and numpy's float32 exp2 is 1 ulp off in a fifth of the cases.
"""

import numpy as np

f4, f8, i4, i8, u2, u4, u8 = np.float32, np.float64, np.int32, np.int64, np.uint16, np.uint32, np.uint64
TINY = f4(2.0**-126)


def to_odd(high, low):
    """The float64 `high` (exact sum = high + low) with its last bit made odd when inexact, so that a second rounding
    is harmless.
    """
    bits = np.ascontiguousarray(high).view(i8)
    move = np.where((low > 0) == (high > 0), 1, -1)
    change = (low != 0) & ((bits & 1) == 0) & np.isfinite(high) & (high != 0)
    return np.where(change, bits + move, bits).view(f8)


def two_sum(a, b):
    """float64 sum and its exact error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def fma32(a, b, c):
    """float32 a*b+c rounded once. The float64 product is exact; a second rounding matters only at midpoints and below
    2^-126.
    """
    p = np.multiply(a, b, dtype=f8)
    s = p + c
    bits = s.view(i8) if isinstance(s, np.ndarray) else np.asarray(s).view(i8)
    doubtful = (bits & 0x1FFFFFFF) == 0x10000000
    if doubtful.any() or (np.abs(s) < 2.0**-126).any():
        high, low = two_sum(p, np.asarray(c, f8))
        s = to_odd(high, low)
    return s.astype(f4)


def _directed(high, low, up):
    r = high.astype(f4)
    wide = r.astype(f8)
    if up:
        return np.where((wide < high) | ((wide == high) & (low > 0)), np.nextafter(r, f4(np.inf)), r)
    return np.where((wide > high) | ((wide == high) & (low < 0)), np.nextafter(r, f4(-np.inf)), r)


def rounded(op, mode):
    """float32 add, sub, mul or fma in rounding mode rn, rz, rm or rp."""

    def exact(*x):
        x = [np.asarray(v, f8) for v in x]
        if op == "mul":
            p = x[0] * x[1]
            return p, np.zeros_like(p)
        if op == "fma":
            return two_sum(x[0] * x[1], x[2])
        return two_sum(x[0], -x[1] if op == "sub" else x[1])

    def run(*x):
        high, low = exact(*x)
        if mode == "rm":
            return _directed(high, low, False)
        if mode == "rp":
            return _directed(high, low, True)
        toward = _directed(high, low, False), _directed(high, low, True)
        return np.where(high > 0, *toward)

    return run


def ftz(x):
    """Subnormal float32 to zero of the same sign."""
    return np.where(np.abs(x) < TINY, np.copysign(f4(0), x), x)


def ex2(x):
    return np.exp2(np.asarray(x, f8)).astype(f4)


def ex2_ftz(x):
    r = np.exp2(np.asarray(x, f8)).astype(f4)
    return np.where(x < f4(-126), f4(0), r)


def lg2_ftz(x):
    return np.log2(np.asarray(ftz(x), f8)).astype(f4)


def lg2(x):
    return np.log2(np.asarray(x, f8)).astype(f4)


def rcp(x):
    return f4(1) / x


def rcp_ftz(x):
    return ftz(f4(1) / ftz(x))


def rsqrt(x):
    return (1 / np.sqrt(np.asarray(x, f8))).astype(f4)


def tanh(x):
    return np.tanh(np.asarray(x, f8)).astype(f4)


def bf16_to_f32(x):
    """bfloat16 bits (uint16) to float32."""
    return (x.astype(u4) << u4(16)).view(f4)


def f32_to_bf16(x):
    """float32 to bfloat16 bits, nearest even, NaN to 0x7FFF."""
    bits = np.ascontiguousarray(x).view(u4)
    r = ((bits + (u4(0x7FFF) + ((bits >> u4(16)) & u4(1)))) >> u4(16)).astype(u2)
    nan = (bits & u4(0x7FFFFFFF)) > u4(0x7F800000)
    return np.where(nan, u2(0x7FFF), r) if nan.any() else r


def f32_to_bf16x2(high, low):
    """Two float32 to packed bfloat16: the first operand is the upper half."""
    return (f32_to_bf16(high).astype(u4) << u4(16)) | f32_to_bf16(low)


def f32_to_f16x2(high, low):
    """Two float32 to packed float16: the first operand is the upper half."""

    def pick(x):
        return np.ascontiguousarray(np.asarray(x, f4).astype(np.float16)).view(u2).astype(u4)

    return (pick(high) << u4(16)) | pick(low)


def to_int(rounding, dtype):
    """Float to integer with saturation, NaN to 0."""
    info = np.iinfo(dtype)
    fn = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]

    def run(x):
        y = fn(np.asarray(x, f8))
        y = np.where(np.isnan(y), 0, y)
        low, high = y <= float(info.min), y >= float(info.max)
        safe = np.where(low | high, 0, y).astype(dtype)
        return np.where(low, info.min, np.where(high, info.max, safe)).astype(dtype)

    return run


def trunc_div(a, b):
    """Integer division toward zero; division by zero gives all ones, as NVIDIA hardware does for unsigned."""
    zero = b == 0
    d = np.where(zero, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        q = a // d
    else:
        q = np.abs(a.astype(i8)) // np.abs(d.astype(i8))
        q = np.where((a < 0) != (d < 0), -q, q).astype(a.dtype)
    return np.where(zero, np.array(-1).astype(a.dtype), q)


def trunc_rem(a, b):
    """a - (a / b) * b with the quotient toward zero."""
    return (a - trunc_div(a, b) * b).astype(a.dtype)


def lop3(a, b, c, table):
    """Any boolean function of three words; `table` bit (4a+2b+c)."""
    table = int(np.asarray(table).flat[0])
    out = np.zeros(np.broadcast(a, b, c).shape, u4)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a, b, selector):
    """Byte permute, default mode."""
    both = a.astype(u8) | (b.astype(u8) << u8(32))
    out = np.zeros(np.broadcast(a, b, selector).shape, u4)
    for i in range(4):
        s = (selector.astype(u8) >> u8(4 * i)) & u8(15)
        byte = (both >> ((s & u8(7)) * u8(8))) & u8(255)
        byte = np.where(s & u8(8), np.where(byte & u8(128), u8(255), u8(0)), byte)
        out |= byte.astype(u4) << u4(8 * i)
    return out


def funnel(left, wrap):
    """shf.l / shf.r .wrap / .clamp .b32 (low, high, amount)."""

    def run(a, b, c):
        n = (c & u4(31)).astype(u8) if wrap else np.minimum(c, u4(32)).astype(u8)
        both = (b.astype(u8) << u8(32)) | a
        return ((both << n) >> u8(32)).astype(u4) if left else (both >> n).astype(u4)

    return run


def popc(x):
    return np.bitwise_count(x).astype(u4)


def clz(x):
    """Leading zeros of a 32-bit word: frexp of the exact float64 gives the bit length."""
    return (32 - np.frexp(np.asarray(x, f8))[1]).astype(u4)


def bfe_u32(x, at, n):
    at, n = (at & u4(255)).astype(u8), (n & u4(255)).astype(u8)
    mask = np.where(n >= 32, u8(0xFFFFFFFF), (u8(1) << np.minimum(n, u8(32))) - u8(1))
    return np.where(at < 32, (x.astype(u8) >> np.minimum(at, u8(63))) & mask, 0).astype(u4)


def bfi(a, b, at, n):
    """`b` with `n` bits from `at` replaced by the low bits of `a`."""
    at, n = (at & u4(255)).astype(u8), np.minimum(n & u4(255), u4(32)).astype(u8)
    mask = np.where(at < 32, (((u8(1) << n) - u8(1)) << np.minimum(at, u8(32))) & u8(0xFFFFFFFF), u8(0))
    return (((a.astype(u8) << np.minimum(at, u8(32))) & mask) | (b.astype(u8) & ~mask)).astype(u4)


def reverse_bits(x):
    out = np.zeros_like(x)
    for i in range(32):
        out |= ((x >> u4(i)) & u4(1)) << u4(31 - i)
    return out


def mul_hi_64(a, b):
    """High 64 bits of the 128-bit product, in Python integers: rare."""
    a, b = np.broadcast_arrays(a, b)
    high = [(int(x) * int(y) >> 64) & (2**64 - 1) for x, y in zip(a.ravel(), b.ravel(), strict=True)]
    return np.array(high, u8).view(a.dtype).reshape(a.shape)


def bf16_pair(x):
    """(low, high) halves of packed bfloat16 as float32."""
    return (x << u4(16)).view(f4), (x & u4(0xFFFF0000)).view(f4)


def f16_pair(x):
    """(low, high) halves of packed float16 as float32."""
    halves = np.ascontiguousarray(x).view(np.float16).astype(f4)
    return halves[..., 0::2], halves[..., 1::2]


def fma_odd(a, b, c):
    """a*b+c of 16-bit operands as float32 with the last bit odd when inexact: rounding it again to 16 bits is then
    right.

    The product of two 16-bit floats is exact in float32's 24 bits; only the sum can be inexact.
    """
    high, low = two_sum(np.multiply(a, b, dtype=f8), np.asarray(c, f8))
    near = np.ascontiguousarray(high.astype(f4))
    rest = (high - near.astype(f8)) + low
    bits = near.view(i4)
    move = np.where((rest > 0) == (near > 0), 1, -1).astype(i4)
    change = (rest != 0) & ((bits & 1) == 0) & np.isfinite(near) & (near != 0)
    return np.where(change, bits + move, bits).view(f4)
