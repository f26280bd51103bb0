"""Instructions that only compute: opcode -> numpy function, result type, operand types.

To add one, add a line to `_table`. An opcode that is neither here, nor in isa_cvt, nor a registered effect is a hard
error.
"""

import numpy as np

from . import arith as nb
from .isa_cvt import conversions

INTS = ("s16", "u16", "s32", "u32", "s64", "u64")
UFUNCS = {"add": np.add, "sub": np.subtract, "mul.lo": np.multiply}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
COMPARE |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def ordered_ne(a, b):
    return (a < b) | (a > b)


UNORDERED = {
    "equ": lambda a, b: ~ordered_ne(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def wide(kind):
    """The kind of twice the width."""
    return kind[0] + str(2 * int(kind[1:]))


def _integer(t):
    for kind in INTS:
        for name, fn in UFUNCS.items():
            t[f"{name}.{kind}"] = (fn, kind, (kind, kind))
        t[f"min.{kind}"] = (np.minimum, kind, (kind, kind))
        t[f"max.{kind}"] = (np.maximum, kind, (kind, kind))
        t[f"mad.lo.{kind}"] = (lambda a, b, c: a * b + c, kind, (kind,) * 3)
        t[f"div.{kind}"] = (nb.trunc_div, kind, (kind, kind))
        t[f"rem.{kind}"] = (nb.trunc_rem, kind, (kind, kind))
        for cmp, fn in COMPARE.items():
            t[f"setp.{cmp}.{kind}"] = (fn, "pred", (kind, kind))
        t[f"selp.{kind}"] = (lambda a, b, p: np.where(p, a, b), kind, (kind, kind, "pred"))
        if kind[1:] != "64":
            w = wide(kind)
            dt = {"s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}[w]
            t[f"mul.wide.{kind}"] = (lambda a, b, d=dt: a.astype(d) * b.astype(d), w, (kind, kind))
            t[f"mad.wide.{kind}"] = (lambda a, b, c, d=dt: a.astype(d) * b.astype(d) + c, w, (kind, kind, w))
            half = int(kind[1:])
            small = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{half // 8}")
            t[f"mul.hi.{kind}"] = (
                lambda a, b, d=dt, s=half, n=small: ((a.astype(d) * b.astype(d)) >> d(s)).astype(n),
                kind,
                (kind, kind),
            )
        if kind[0] == "s":
            t[f"neg.{kind}"] = (np.negative, kind, (kind,))
            t[f"abs.{kind}"] = (np.abs, kind, (kind,))
    for name, fn in (("min", np.minimum), ("max", np.maximum)):
        t[f"{name}.relu.s32"] = (lambda a, b, f=fn: np.maximum(f(a, b), np.int32(0)), "s32", ("s32", "s32"))


def _shift(fn, dtype):
    return lambda a, n: fn(a, np.minimum(n, 255).astype(dtype))


def _bits(t):
    for bits in ("16", "32", "64"):
        b, s, u = "b" + bits, "s" + bits, "u" + bits
        dt = np.dtype("u" + str(int(bits) // 8))
        for name, fn in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
            t[f"{name}.{b}"] = (fn, b, (b, b))
        t[f"not.{b}"] = (np.invert, b, (b,))
        t[f"selp.{b}"] = (lambda a, c, p: np.where(p, a, c), b, (b, b, "pred"))
        for cmp in ("eq", "ne"):
            t[f"setp.{cmp}.{b}"] = (COMPARE[cmp], "pred", (b, b))
        # numpy shifts give 0 (or the sign) for amounts >= width, as PTX does; the amount must have the operand's type
        signed = np.dtype("i" + str(int(bits) // 8))
        t[f"shl.{b}"] = (_shift(np.left_shift, dt), b, (b, "u32"))
        for kind in (b, u):
            t[f"shr.{kind}"] = (_shift(np.right_shift, dt), kind, (kind, "u32"))
        t[f"shr.{s}"] = (_shift(np.right_shift, signed), s, (s, "u32"))
    for name, fn in BOOLEAN.items():
        t[f"{name}.pred"] = (fn, "pred", ("pred", "pred"))
    t["not.pred"] = (np.logical_not, "pred", ("pred",))
    for kind in ("s64", "u64"):
        t[f"mul.hi.{kind}"] = (nb.mul_hi_64, kind, (kind, kind))
    t["brev.b32"] = (nb.reverse_bits, "b32", ("b32",))
    t["bfi.b32"] = (nb.bfi, "b32", ("b32", "b32", "u32", "u32"))
    t["popc.b32"] = (nb.popc, "u32", ("b32",))
    t["clz.b32"] = (nb.clz, "u32", ("b32",))
    t["bfe.u32"] = (nb.bfe_u32, "u32", ("u32", "u32", "u32"))
    t["lop3.b32"] = (nb.lop3, "b32", ("b32", "b32", "b32", "b32"))
    t["prmt.b32"] = (nb.prmt, "b32", ("b32", "b32", "b32"))
    for side in "lr":
        for mode in ("wrap", "clamp"):
            t[f"shf.{side}.{mode}.b32"] = (nb.funnel(side == "l", mode == "wrap"), "b32", ("b32", "b32", "b32"))


def _flushed(fn):
    """Subnormal operands and results are zero."""
    return lambda *x: nb.ftz(fn(*(nb.ftz(v) for v in x)))


def _halves(t):
    """Packed pairs of 16-bit floats: each half is computed in float32 or wider and rounded once."""
    for kind, widen, narrow in (("bf16x2", nb.bf16_pair, nb.f32_to_bf16x2), ("f16x2", nb.f16_pair, nb.f32_to_f16x2)):

        def both(fn, widen=widen, narrow=narrow):
            def run(*x):
                low, high = zip(*(widen(v) for v in x), strict=True)
                return narrow(fn(*high), fn(*low))

            return run

        for name, fn in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
            t[f"{name}.{kind}"] = t[f"{name}.rn.{kind}"] = (both(fn), kind, (kind, kind))
        t[f"fma.rn.{kind}"] = (both(nb.fma_odd), kind, (kind,) * 3)
        t[f"max.{kind}"] = (both(np.fmax), kind, (kind, kind))
        t[f"min.{kind}"] = (both(np.fmin), kind, (kind, kind))
        t[f"max.NaN.{kind}"] = (both(np.maximum), kind, (kind, kind))
        t[f"min.NaN.{kind}"] = (both(np.minimum), kind, (kind, kind))


def _float(t):
    for kind in ("f32", "f32x2"):
        for name, fn in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
            for mode in ("", ".rn"):
                t[f"{name}{mode}.{kind}"] = (fn, kind, (kind, kind))
            for mode in ("rz", "rm", "rp"):
                t[f"{name}.{mode}.{kind}"] = (nb.rounded(name, mode), kind, (kind, kind))
        t[f"fma.rn.{kind}"] = (nb.fma32, kind, (kind,) * 3)
        for mode in ("rz", "rm", "rp"):
            t[f"fma.{mode}.{kind}"] = (nb.rounded("fma", mode), kind, (kind,) * 3)
    for kind, widen in (("bf16", nb.bf16_to_f32), ("f16", lambda x: x.astype(np.float32))):
        t[f"fma.rn.f32.{kind}"] = (
            lambda a, b, c, widen=widen: nb.fma32(widen(a), widen(b), c),
            "f32",
            (kind, kind, "f32"),
        )
        t[f"add.rn.f32.{kind}"] = (lambda a, b, widen=widen: widen(a) + b, "f32", (kind, "f32"))
    for name, fn in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        flushed = _flushed(fn)
        t[f"{name}.ftz.f32"] = t[f"{name}.rn.ftz.f32"] = (flushed, "f32", ("f32", "f32"))
    t["fma.rn.ftz.f32"] = (_flushed(nb.fma32), "f32", ("f32",) * 3)
    t["neg.f32"] = (np.negative, "f32", ("f32",))
    t["abs.f32"] = (np.abs, "f32", ("f32",))
    for name, plain, strict in (("max", np.fmax, np.maximum), ("min", np.fmin, np.minimum)):
        for suffix, fn in (("f32", plain), ("NaN.f32", strict)):
            t[f"{name}.{suffix}"] = (fn, "f32", ("f32", "f32"))
            t[f"{name}.{suffix}/3"] = (lambda a, b, c, f=fn: f(f(a, b), c), "f32", ("f32",) * 3)
    for form in ("rn", "full", "approx", "full.ftz", "approx.ftz"):
        t[f"div.{form}.f32"] = (np.divide, "f32", ("f32", "f32"))
    for form in ("rn", "approx", "approx.ftz"):
        t[f"sqrt.{form}.f32"] = (np.sqrt, "f32", ("f32",))
    for name, fn in {
        "ex2.approx.ftz": nb.ex2_ftz,
        "ex2.approx": nb.ex2,
        "lg2.approx.ftz": nb.lg2_ftz,
        "lg2.approx": nb.lg2,
        "rcp.approx.ftz": nb.rcp_ftz,
        "rcp.approx": nb.rcp,
        "rcp.rn": nb.rcp,
        "rsqrt.approx.ftz": nb.rsqrt,
        "rsqrt.approx": nb.rsqrt,
        "tanh.approx": nb.tanh,
    }.items():
        t[f"{name}.f32"] = (fn, "f32", ("f32",))
    for cmp in COMPARE:
        if cmp not in ("lo", "ls", "hi", "hs"):
            t[f"setp.{cmp}.f32"] = (ordered_ne if cmp == "ne" else COMPARE[cmp], "pred", ("f32", "f32"))
    for cmp, fn in UNORDERED.items():
        t[f"setp.{cmp}.f32"] = (fn, "pred", ("f32", "f32"))
    t["selp.f32"] = (lambda a, b, p: np.where(p, a, b), "f32", ("f32", "f32", "pred"))


def _table():
    t = {}
    _integer(t)
    _bits(t)
    _float(t)
    _halves(t)
    t |= conversions()
    for op in [op for op in t if op.startswith("setp.")]:  # setp.lt.and.s32 p, a, b, c
        _, cmp, kind = op.split(".")
        fn = t[op][0]
        for name, join in BOOLEAN.items():
            t[f"setp.{cmp}.{name}.{kind}"] = (lambda a, b, c, f=fn, j=join: j(f(a, b), c), "pred", (kind, kind, "pred"))
    return t


TABLE = _table()
MUFU = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos")  # one of 16 lanes a cycle


def lookup(instruction):
    """(function, result kind, operand kinds) or None."""
    op, n = instruction.op, len(instruction.args) - 1
    entry = TABLE.get(f"{op}/{n}") or TABLE.get(op)
    if entry is not None and len(entry[2]) != n:
        raise instruction.error(f"{op} takes {len(entry[2])} operands, {n} given")
    return entry
