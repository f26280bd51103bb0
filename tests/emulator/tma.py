"""Tensor copies: a descriptor's box between global and shared memory, with swizzle, fill and clipping.

Box bytes lie dense in shared memory, innermost dimension fastest; then 16-byte chunks are permuted by XOR of
*absolute* shared
address bits: 128B: 4-6 ^= 7-9, 64B: 4-5 ^= 7-8, 32B: 4 ^= 7.
"""

import numpy as np

from .memory import CELL

SWIZZLE_MASK = {"none": 0, "32B": 0x10, "64B": 0x30, "128B": 0x70}
# bfloat16 as an H200 fills it (2026-11-29); the other two were not read off a card.
FILL = {("uint8", "zero"): 0, ("float16", "nan"): 0x7FFF, ("bfloat16", "nan"): 0x7FF7, ("float32", "nan"): 0x7FFFFFFF}
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def swizzle(address, mode):
    """Physical byte address(es) of `address` under `mode`."""
    mask = SWIZZLE_MASK[mode]
    return address ^ ((address >> 3) & mask)


_cells = {}


def box_cells(offset, size, mode):
    """Cell numbers of the box's 16-byte chunks, in box order. `offset`: shared offset of the box; cached relative to
    1 KiB.
    """
    low = offset & 1023
    key = (low, size, mode)
    if key not in _cells:
        _cells[key] = swizzle(low + CELL * np.arange(size // CELL), mode) // CELL
    return _cells[key] + ((offset - low) // CELL)


def ranges(desc, coords):
    """Per dimension (innermost first): source start, box start, count of the part inside the tensor."""
    out = []
    for c, d, b in zip(coords, desc.dims, desc.box, strict=True):
        lo, hi = max(c, 0), min(c + b, d)
        out.append((lo, lo - c, max(0, hi - lo)))
    return out


def _source(desc, space, parts):
    """Strided view of the part of the tensor that lies inside, outermost dimension first."""
    size = desc.element_bytes
    strides = (size, *desc.strides)
    start = desc.offset + sum(p[0] * s for p, s in zip(parts, strides, strict=True))
    last = start + sum((p[2] - 1) * s for p, s in zip(parts, strides, strict=True)) + size
    if last > space.size:
        return None, last
    flat = space.data[start:]
    view = np.ndarray(tuple(p[2] for p in reversed(parts)), RAW[size], flat.data, 0, tuple(reversed(strides)))
    shadow = np.ndarray(
        tuple(p[2] for p in reversed(parts)), np.uint8, space.init[start:].data, 0, tuple(reversed(strides))
    )
    return (view, shadow), last


def read_box(desc, space, coords, report):
    """The box's elements as a dense array, outermost first; outside = fill."""
    raw = RAW[desc.element_bytes]
    fill = 0 if desc.fill == "zero" else FILL[desc.dtype, desc.fill]
    parts = ranges(desc, coords)
    out = np.full(tuple(reversed(desc.box)), fill, raw)
    if all(p[2] for p in parts):
        found, last = _source(desc, space, parts)
        if found is None:
            report("out_of_bounds", f"the descriptor reaches byte {last} of {space.name}, which has {space.size}")
            return out
        view, shadow = found
        if not space.complete and not shadow.all():
            report(
                "uninitialised_read", f"tensor copy at {tuple(coords)} reads bytes of {space.name} that nobody wrote"
            )
        out[tuple(slice(p[1], p[1] + p[2]) for p in reversed(parts))] = view
    return out


def box_words(desc, coords):
    """Numbers of the buffer's 4-byte words that the part of the box inside the tensor touches."""
    parts = ranges(desc, coords)
    if not all(p[2] for p in parts):
        return np.zeros(0, np.int64)
    size = desc.element_bytes
    inner, *outer = parts
    first = np.array([desc.offset + inner[0] * size])
    for (start, _, count), stride in zip(outer, desc.strides, strict=True):
        first = (first[None, :] + (start + np.arange(count))[:, None] * stride).ravel()
    rows = [np.arange(at // 4, (at + inner[2] * size + 3) // 4) for at in np.unique(first)]
    return np.concatenate(rows)


def write_box(desc, space, coords, box, add, report):
    """Store (or add) the part of the box that lies inside the tensor. Returns bytes written."""
    parts = ranges(desc, coords)
    if not all(p[2] for p in parts):
        return 0
    found, last = _source(desc, space, parts)
    if found is None:
        report("out_of_bounds", f"the descriptor reaches byte {last} of {space.name}, which has {space.size}")
        return 0
    view, shadow = found
    inside = box[tuple(slice(p[1], p[1] + p[2]) for p in reversed(parts))]
    if add:
        if not space.complete and not shadow.all():
            report(
                "uninitialised_read",
                f"tensor reduction at {tuple(coords)} adds to bytes of {space.name} that nobody wrote",
            )
        inside = add_raw(view, inside, desc.dtype)
    view[...] = inside
    shadow[...] = 1
    if not space.complete:
        for k in range(1, desc.element_bytes):
            start = (
                desc.offset + k + sum(p[0] * s for p, s in zip(parts, (desc.element_bytes, *desc.strides), strict=True))
            )
            np.ndarray(shadow.shape, np.uint8, space.init[start:].data, 0, shadow.strides)[...] = 1
    return inside.size * desc.element_bytes


def add_raw(old, new, dtype):
    """Element-wise sum of raw words of `dtype`, rounded to it."""
    from .arith import bf16_to_f32, f32_to_bf16

    if dtype == "float32":
        return (old.view(np.float32) + np.ascontiguousarray(new).view(np.float32)).view(np.uint32)
    if dtype == "bfloat16":
        return f32_to_bf16(bf16_to_f32(old) + bf16_to_f32(new))
    if dtype == "float16":
        return (np.ascontiguousarray(old).view(np.float16) + np.ascontiguousarray(new).view(np.float16)).view(np.uint16)
    if dtype in ("int32", "uint32"):
        return old + new
    raise ValueError(f"reduction of {dtype} is not emulated")
