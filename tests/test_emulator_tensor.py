"""Tensor-core operands, layouts and arithmetic of the emulator, by equality on small integers and against an
independent exact sum.
"""

from fractions import Fraction

import numpy as np
import pytest
from emulator import Pointer, Scalar, Tma, Uninitialised, tensor
from emulator.arith import bf16_to_f32, f32_to_bf16
from emulator.cases import a_in_registers
from emulator.isa_tcgen05 import shape_map
from emulator.snippets import SPAN, body, depth_of, kinds, mma_setup, play, wgmma_setup

FORMS = [(swizzle, major_k) for swizzle in SPAN for major_k in (True, False)]
VALUES = np.random.default_rng(0).integers(-4, 5, (2, 128, 64))


def product(m, n, depth):
    return VALUES[0, :m, :depth] @ VALUES[1, :n, :depth].T


@pytest.mark.parametrize("a", FORMS)
@pytest.mark.parametrize("b", FORMS)
def test_umma_reads_every_swizzle_and_major(a, b):
    params, memory, options = mma_setup(VALUES, a, b)
    report = play(body("mma"), params, memory, seed=3, **options).check()
    assert np.array_equal(report.outputs["out"], product(128, 64, depth_of(a, b)))


def test_umma_reading_the_wrong_swizzle_or_offset_differs():
    params, memory, options = mma_setup(VALUES)
    want = product(128, 64, 64)
    for index, change in ((8, 2 << 29 ^ 4 << 29), (8, 1), (9, 1), (3, 1 << 15)):
        wrong = list(params)
        wrong[index] = Scalar(wrong[index].value ^ change)
        assert not np.array_equal(play(body("mma"), wrong, memory, **options).outputs["out"], want), (index, change)


def test_umma_of_64_rows_uses_half_of_each_lane_quarter():
    params, memory, options = mma_setup(VALUES, m=64)
    report = play(body("mma"), params, memory, **options)
    assert kinds(report) == {"uninitialised_read"}  # mma.ptx reads all lanes
    lanes = np.concatenate([32 * i + np.arange(16) for i in range(4)])
    assert np.array_equal(report.outputs["out"][lanes], product(64, 64, 64))


@pytest.mark.parametrize("a", FORMS)
@pytest.mark.parametrize("b", [("128B", True), ("64B", False)])
def test_wgmma_reads_every_swizzle_and_major(a, b):
    params, memory, options = wgmma_setup(VALUES, a, b)
    text = body("wgmma").replace("%p2, 1, 1, 0, 0", f"%p2, 1, 1, {int(not a[1])}, {int(not b[1])}")
    report = play(text, params, memory, seed=2, **options).check()
    want = product(64, 64, depth_of(a, b))
    for thread in (0, 1, 31, 32, 77, 127):
        for i in range(32):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i >> 1 & 1)
            column = 8 * (i >> 2) + 2 * (thread % 4) + (i & 1)
            assert report.outputs["out"][thread, i] == want[row, column]


def test_wgmma_takes_a_from_registers():
    params, memory, options = wgmma_setup(VALUES)
    by_descriptor = play(body("wgmma"), params, memory, **options).check().outputs["out"]
    text, more = a_in_registers(body("wgmma")), (*params, Pointer("a"))
    assert np.array_equal(play(text, more, memory, seed=2, **options).check().outputs["out"], by_descriptor)
    swapped = text.replace("{%r240, %r241,", "{%r241, %r240,")
    assert not np.array_equal(play(swapped, more, memory, **options).outputs["out"], by_descriptor)


# shape, count: the register maps, checked through a store of one shape and loads of the other
@pytest.mark.parametrize("shape,count,registers", [("16x64b", 4, 4), ("16x128b", 2, 4), ("16x256b", 1, 4)])
def test_tensor_memory_shapes_agree_with_32x32b(shape, count, registers):
    names = ", ".join(f"%r{20 + i}" for i in range(registers))
    text = f"""
  ld.param.b64 %d1, [p0];
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;
  ld.shared.b32 %r5, [%r0];
  shl.b32 %r10, %r1, 8;
  add.s32 %r11, %r10, 1;
  add.s32 %r12, %r10, 2;
  add.s32 %r13, %r10, 3;
  add.s32 %r14, %r10, 4;
  add.s32 %r15, %r10, 5;
  add.s32 %r16, %r10, 6;
  add.s32 %r17, %r10, 7;
  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r5], {{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{names}}}, [%r5];
  tcgen05.wait::ld.sync.aligned;
  mul.wide.u32 %d2, %r1, 16;
  add.s64 %d3, %d1, %d2;
  st.global.v4.b32 [%d3], {{{names}}};
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
"""
    got = play(text, (Pointer("out"),), {"out": Uninitialised((32, 4), np.uint32)}, seed=4).check().outputs["out"]
    for thread in range(32):
        for r in range(4):
            lane, column = {
                "16x64b": (thread // 4 + 8 * (thread & 1), 2 * r + (thread >> 1 & 1)),
                "16x128b": (thread // 4 + 8 * (r & 1), 4 * (r >> 1) + thread % 4),
                "16x256b": (thread // 4 + 8 * (r >> 1 & 1), 2 * (thread % 4) + (r & 1)),
            }[shape]
            assert got[thread, r] == (lane << 8) + column
    assert shape_map(shape, count)[0].shape == (registers, 32)


# ---- arithmetic
def fused(a, b, c):
    """One output of the truncated 16-term sum, with Python integers and fractions."""

    def split(x, bits):
        word = int(np.float32(x).view(np.uint32))
        exponent, fraction = word >> 23 & 255, word & 0x7FFFFF
        significand = fraction | (0x800000 if exponent else 0)
        return (-1 if word >> 31 else 1) * (significand >> (23 - bits)), max(exponent, 1) - 127, bits

    terms = []
    for x, y in zip(a, b, strict=True):
        (s, e, f), (t, g, h) = split(x, 7), split(y, 7)
        terms.append((s * t, e + g, f + h))
    terms.append(split(c, 23))
    top = max((e for s, e, _ in terms if s), default=None)
    if top is None:
        return np.float32(0)
    total = 0
    for s, e, f in terms:
        scaled = Fraction(abs(s)) * Fraction(2) ** (e - f - top + 25)
        total += int(scaled) * (1 if s > 0 else -1)
    value = Fraction(total) * Fraction(2) ** (top - 25)
    if value == 0:
        return np.float32(0)
    exponent = max(int(np.floor(np.log2(float(abs(value))))) - 23, -149)
    return np.float32(int(abs(value) / Fraction(2) ** exponent) * 2.0**exponent * (1 if value > 0 else -1))


@pytest.mark.parametrize("spread", [0, 6, 30])
def test_exact_sum_equals_the_model_bit_by_bit(spread):
    rng = np.random.default_rng(spread)

    def numbers(*shape):
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
        return bf16_to_f32(f32_to_bf16(x.astype(np.float32)))

    a, b, c = numbers(16, 16), numbers(8, 16), (rng.standard_normal((16, 8)) * 3).astype(np.float32)
    got = tensor.exact(a, b, c)
    want = np.array([[fused(a[i], b[j], c[i, j]) for j in range(8)] for i in range(16)], np.float32)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    assert np.abs(got - (a.astype(np.float64) @ b.T + c)).max() < 1e-5 * np.abs(a).max() * np.abs(b).max() * 16


def test_exact_sum_truncates_and_keeps_special_values():
    ones = np.ones((1, 16), np.float32)
    tiny = ones * np.float32(2.0**-30)
    c = np.array([[1.0]], np.float32)
    assert tensor.exact(tiny, ones, c)[0, 0] == 1.0  # sixteen times 2^-30 is below the window of 25 bits
    assert tensor.exact(-tiny, ones, c)[0, 0] == 1.0
    assert np.isnan(tensor.exact(ones * np.nan, ones, c)).all()
    assert np.isinf(tensor.exact(ones * np.inf, ones, c)).all()
    minus = tensor.exact(-np.zeros((1, 16), np.float32), ones, -np.zeros((1, 1), np.float32))
    assert minus.view(np.uint32)[0, 0] == 0


def test_exact_mode_runs_a_kernel():
    params, memory, options = mma_setup(VALUES)
    report = play(body("mma"), params, memory, exact=True, **options).check()
    assert np.array_equal(report.outputs["out"], product(128, 64, 64))


# ---- tensor copies
DUMP = body("dump")


def xor_by_table(offset, swizzle):
    """Where byte `offset` of a dense box lies, from the published picture: 16-byte chunk index XOR row index within
    the atom.
    """
    row, chunk = offset // 128, offset % 128 // 16
    rows = {"128B": row % 8, "64B": row % 4, "32B": row % 2, "none": 0}[swizzle]
    return 128 * row + 16 * (chunk ^ rows) + offset % 16


@pytest.mark.parametrize("swizzle,inner", [("none", 64), ("128B", 64), ("64B", 32), ("32B", 16)])
@pytest.mark.parametrize("at", [(0, 0), (8, 3), (-8, -2), (48, 90)])
def test_tensor_copy_swizzles_fills_and_counts(swizzle, inner, at):
    rows, size = 16, 2 * inner * 16
    x = np.arange(100 * 64, dtype=np.uint16).reshape(100, 64)
    desc = Tma("x", "bfloat16", (64, 100), (128,), (inner, rows), swizzle)
    params = (desc, Pointer("out"), Scalar(at[0]), Scalar(at[1]), Scalar(size))
    memory = {"x": x, "out": Uninitialised((size,), np.uint8)}
    got = play(DUMP, params, memory, seed=1).check().outputs["out"]
    box = np.zeros((rows, inner), np.uint16)
    for r in range(rows):
        for c in range(inner):
            if 0 <= at[1] + r < 100 and 0 <= at[0] + c < 64:
                box[r, c] = x[at[1] + r, at[0] + c]
    flat = box.view(np.uint8).reshape(-1)
    where = np.array([xor_by_table(i, swizzle) for i in range(size)])
    assert np.array_equal(got[where], flat)


def test_tensor_copy_fills_nan_when_asked():
    desc = Tma("x", "bfloat16", (64, 4), (128,), (64, 16), "none", "nan")
    params = (desc, Pointer("out"), Scalar(0), Scalar(0), Scalar(2048))
    memory = {"x": np.zeros((4, 64), np.uint16), "out": Uninitialised((16, 64), np.uint16)}
    got = play(DUMP, params, memory).check().outputs["out"]
    assert not got[:4].any() and np.isnan(bf16_to_f32(got[4:])).all()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"box": (64, 300)}, "1..256"),
        ({"strides": (100,)}, "multiples of 16"),
        ({"swizzle": "32B"}, "at most the 32B span"),
        ({"dims": (64,)}, "rank 1"),
    ],
)
def test_descriptor_that_the_hardware_refuses(change, message):
    good = {
        "buffer": "x",
        "dtype": "bfloat16",
        "dims": (64, 100),
        "strides": (128,),
        "box": (64, 16),
        "swizzle": "128B",
    }
    Tma(**good)
    with pytest.raises(ValueError, match=message):
        Tma(**(good | change))
