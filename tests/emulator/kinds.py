"""PTX scalar types, register classes, and how a typed operand looks at a register's bits.

A register file keeps one numpy row per register and one column per thread: class `h` 16 bits, `r` 32, `d` 64,
`p` predicates (bool). A typed operand is a *view* of that row: `f32` of class `r` is the row itself seen as float32,
`lo` of class `d` is every even 32-bit half. Views never copy, so a write through one is seen through all others.
"""

import numpy as np

# .b8 class registers do not occur in compiler output; .b128 is refused by the parser.
CLASS_OF_WIDTH = {"pred": "p", "b8": "h", "b16": "h", "u16": "h", "s16": "h", "f16": "h", "bf16": "h"}
CLASS_OF_WIDTH |= {"b32": "r", "u32": "r", "s32": "r", "f32": "r", "f16x2": "r", "bf16x2": "r"}
CLASS_OF_WIDTH |= {"b64": "d", "u64": "d", "s64": "d", "f64": "d", "f32x2": "d"}
CLASS_DTYPE = {"p": np.dtype(bool), "h": np.dtype(np.uint16), "r": np.dtype(np.uint32), "d": np.dtype(np.uint64)}
CLASS_BITS = {"h": 16, "r": 32, "d": 64, "p": 1}

DTYPE = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "f32x2": np.float32,
    "pred": np.bool_,
    # halves, used by the vector forms of mov
    "lo16": np.uint16,
    "hi16": np.uint16,
    "lo32": np.uint32,
    "hi32": np.uint32,
}
DTYPE = {k: np.dtype(v) for k, v in DTYPE.items()}
BITS = {k: 8 * v.itemsize for k, v in DTYPE.items()} | {"f32x2": 64, "pred": 1}
SIGNED = {"s8", "s16", "s32", "s64"}
FLOAT = {"f16", "bf16", "f32", "f64", "f32x2", "f16x2", "bf16x2"}


def view(rows, cls, kind):
    """The typed view of `rows` ((threads,) or (registers, threads), last axis contiguous) of class `cls`."""
    if cls == "p":
        if kind != "pred":
            raise TypeError(f"predicate register used as .{kind}")
        return rows
    dtype, bits = DTYPE[kind], CLASS_BITS[cls]
    if kind == "f32x2" or BITS[kind] == bits:
        return rows.view(dtype)
    if BITS[kind] > bits:
        raise TypeError(f".{kind} does not fit a {bits}-bit register")
    step = bits // BITS[kind]
    start = 1 if kind.startswith("hi") else 0
    return rows.view(dtype)[..., start::step]


def full_kind(cls, kind):
    """The kind that covers the whole register with the signedness of `kind`: results narrower than their register
    extend.
    """
    bits = CLASS_BITS[cls]
    if cls == "p" or BITS[kind] == bits:
        return kind
    return f"{'s' if kind in SIGNED else 'u'}{bits}"
