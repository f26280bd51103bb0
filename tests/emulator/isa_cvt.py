"""cvt: conversions between integer, float32, float16 and bfloat16 kinds, with the rounding each spelling names."""

import numpy as np

from . import arith as nb
from .kinds import DTYPE

_INTS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")


def conversions():
    """{opcode: (function, result kind, operand kinds)}."""
    t = {}
    for to in _INTS:
        for frm in _INTS:
            t[f"cvt.{to}.{frm}"] = (lambda a, d=DTYPE[to]: a.astype(d), to, (frm,))
        for mode in ("rni", "rzi", "rmi", "rpi"):
            fn = nb.to_int(mode, DTYPE[to])
            t[f"cvt.{mode}.{to}.f32"] = (fn, to, ("f32",))
            t[f"cvt.{mode}.ftz.{to}.f32"] = (lambda a, f=fn: f(nb.ftz(a)), to, ("f32",))
        t[f"cvt.rn.f32.{to}"] = (lambda a: a.astype(np.float32), "f32", (to,))
    for mode, fn in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
        t[f"cvt.{mode}.f32.f32"] = (fn, "f32", ("f32",))
    t["cvt.f32.bf16"] = (nb.bf16_to_f32, "f32", ("bf16",))
    t["cvt.rn.bf16.f32"] = (nb.f32_to_bf16, "bf16", ("f32",))
    t["cvt.rn.bf16x2.f32"] = (nb.f32_to_bf16x2, "bf16x2", ("f32", "f32"))
    t["cvt.f32.f16"] = (lambda a: a.astype(np.float32), "f32", ("f16",))
    t["cvt.rn.f16.f32"] = (lambda a: a.astype(np.float16), "f16", ("f32",))
    t["cvt.rn.f16x2.f32"] = (nb.f32_to_f16x2, "f16x2", ("f32", "f32"))
    t["cvt.f64.f32"] = (lambda a: a.astype(np.float64), "f64", ("f32",))
    t["cvt.rn.f32.f64"] = (lambda a: a.astype(np.float32), "f32", ("f64",))
    return t
