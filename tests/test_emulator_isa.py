"""Scalar arithmetic, lanes, divergence, barriers and errors of the emulator, against Python's exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from emulator import Launch, Pointer, PtxError, Scalar, Uninitialised, run
from emulator.arith import bf16_to_f32, f32_to_bf16
from emulator.snippets import body, module, play

ADDRESS = """
  ld.param.b64 %d0, [p0];
  ld.param.b64 %d1, [p1];
  mul.wide.u32 %d2, %r1, 4;
  add.s64 %d3, %d0, %d2;
  add.s64 %d4, %d1, %d2;
"""


def lanewise(code, x, y=None, z=None, dtype=np.uint32):
    """Run `code` on 32 lanes: operands in %r10, %r11, %r12 (words), result %r20."""
    operands = [np.asarray(v) for v in (x, y, z) if v is not None]
    table = np.stack([np.broadcast_to(v, (32,)).astype(v.dtype).view(np.uint32) for v in operands])
    loads = "".join(f"  ld.global.b32 %r{10 + i}, [%d3+{128 * i}];\n" for i in range(len(operands)))
    text = f"{ADDRESS}{loads}  {code}\n  st.global.b32 [%d4], %r20;\n"
    memory = {"x": table, "out": Uninitialised((32,), np.uint32)}
    return play(text, (Pointer("x"), Pointer("out")), memory).check().outputs["out"].view(dtype)


RNG = np.random.default_rng(0)
FLOATS = np.concatenate(
    [
        RNG.standard_normal(20) * 2.0 ** RNG.integers(-40, 40, 20),
        [0.0, -0.0, 1.0, 2.0**-126, 2.0**-149, 3.4e38, -1.5, 2.0**-127, 1 + 2.0**-23, 1 - 2.0**-24, 7.0, -3.0],
    ]
).astype(np.float32)
OTHER = np.roll(FLOATS, 5)
THIRD = np.roll(FLOATS, 11)


def rounded(value, mode):
    """Fraction to float32, rounding `rn`, `rm`, `rp` or `rz`; overflow is not tested."""
    if value == 0:
        return np.float32(0)
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    exponent = max(exponent - 23, -149)
    scaled = value / Fraction(2) ** exponent
    whole = {"rn": round, "rm": math.floor, "rp": math.ceil, "rz": math.trunc}[mode](scaled)
    return np.float32(math.ldexp(whole, exponent))


@pytest.mark.parametrize("mode", ["rn", "rm", "rp", "rz"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_float_arithmetic_is_rounded_once(op, mode):
    if op == "fma":
        got = lanewise(f"fma.{mode}.f32 %r20, %r10, %r11, %r12;", FLOATS, OTHER, THIRD, np.float32)
    else:
        got = lanewise(f"{op}.{mode}.f32 %r20, %r10, %r11;", FLOATS, OTHER, None, np.float32)
    for a, b, c, g in zip(FLOATS, OTHER, THIRD, got, strict=True):
        a, b, c = (Fraction(float(v)) for v in (a, b, c))
        exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[op]
        if abs(exact) < 2**127 and exact:
            assert g == rounded(exact, mode), (op, mode, float(a), float(b), float(c))


def test_fma_does_not_round_twice():
    # a * b + c lies just above the midpoint of two float32 numbers, by less than float64 resolves
    a, b, c = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    got = lanewise("fma.rn.f32 %r20, %r10, %r11, %r12;", np.full(32, a), np.full(32, b), np.full(32, c), np.float32)
    assert got[0] == rounded(exact, "rn") and got[0] != np.float32(float(a) * float(b) + float(c))


@pytest.mark.parametrize("op,halves", [("add.rn", "rn"), ("mul", "rn"), ("add.rm", "rm"), ("sub.rn", "rn")])
def test_packed_pairs_are_two_operations(op, halves):
    name = op.split(".")[0]
    code = f"""mov.b64 %d10, {{%r10, %r11}};
  mov.b64 %d11, {{%r11, %r12}};
  {op}.f32x2 %d12, %d10, %d11;
  mov.b64 {{%r19, %r20}}, %d12;"""
    got = lanewise(code, FLOATS, OTHER, THIRD, np.float32)
    low = lanewise(code.replace("{%r19, %r20}", "{%r20, %r19}"), FLOATS, OTHER, THIRD, np.float32)
    for x, y, g in [*zip(OTHER, THIRD, got, strict=True), *zip(FLOATS, OTHER, low, strict=True)]:
        a, b = Fraction(float(x)), Fraction(float(y))
        exact = {"add": a + b, "mul": a * b, "sub": a - b}[name]
        if abs(exact) < 2**127 and exact:
            assert g == rounded(exact, halves)


@pytest.mark.parametrize(
    "op,fn", [("ex2.approx.ftz", math.exp2 if hasattr(math, "exp2") else lambda x: 2.0**x), ("rcp.rn", lambda x: 1 / x)]
)
def test_special_functions_are_correctly_rounded(op, fn):
    x = RNG.uniform(-20, 20, 32).astype(np.float32)
    got = lanewise(f"{op}.f32 %r20, %r10;", x, dtype=np.float32)
    assert np.array_equal(got, np.array([np.float32(fn(float(v))) for v in x]))


def test_flush_and_special_values():
    x = np.full(32, -np.inf, np.float32)
    x[:4] = [-127, -126, np.nan, np.inf]
    got = lanewise("ex2.approx.ftz.f32 %r20, %r10;", x, dtype=np.float32)
    assert got[0] == 0 and got[1] == 2.0**-126 and np.isnan(got[2]) and np.isinf(got[3]) and got[4] == 0
    nan = np.array([np.nan] * 16 + [1.0] * 16, np.float32)
    two = np.full(32, 2, np.float32)
    assert np.array_equal(lanewise("max.f32 %r20, %r10, %r11;", nan, two, dtype=np.float32), two)
    assert np.isnan(lanewise("max.NaN.f32 %r20, %r10, %r11;", nan, two, dtype=np.float32)[:16]).all()
    assert (lanewise("max.f32 %r20, %r10, %r11, %r11;", nan, two, dtype=np.float32) == 2).all()
    assert not lanewise("setp.ne.f32 %p1, %r10, %r11;\n  selp.b32 %r20, 1, 0, %p1;", nan, two)[:16].any()
    assert lanewise("setp.neu.f32 %p1, %r10, %r11;\n  selp.b32 %r20, 1, 0, %p1;", nan, two).all()


def test_bfloat16_conversion():
    x = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -2.5, 3.4e38, np.inf, np.nan, 2.0**-140] * 4, np.float32)
    packed = lanewise("cvt.rn.bf16x2.f32 %r20, %r10, %r11;", x, np.float32(1) + np.zeros(32, np.float32))
    high, low = bf16_to_f32((packed >> 16).astype(np.uint16)), bf16_to_f32((packed & 0xFFFF).astype(np.uint16))
    assert (low == 1).all()
    assert high[0] == 1 and high[1] == 1 and high[2] == 1 + 2.0**-6 and np.isinf(high[4]) and np.isnan(high[6])


INTS = np.array([0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 12345] * 4, np.int32)
BY = np.array([3, -3, 5, 2, 2, -1, 3, 100] * 4, np.int32)


@pytest.mark.parametrize(
    "code,fn",
    [
        ("add.s32 %r20, %r10, %r11;", lambda a, b: a + b),
        ("mul.lo.s32 %r20, %r10, %r11;", lambda a, b: a * b),
        ("mul.hi.s32 %r20, %r10, %r11;", lambda a, b: (a * b) >> 32),
        ("div.s32 %r20, %r10, %r11;", lambda a, b: int(Fraction(a, b))),
        ("rem.s32 %r20, %r10, %r11;", lambda a, b: a - b * int(Fraction(a, b))),
        ("mad.lo.s32 %r20, %r10, %r11, 5;", lambda a, b: a * b + 5),
        ("shl.b32 %r20, %r10, 33;", lambda a, b: 0),
        ("shr.s32 %r20, %r10, 40;", lambda a, b: -1 if a < 0 else 0),
        ("shr.u32 %r20, %r10, 4;", lambda a, b: (a % 2**32) >> 4),
        ("min.relu.s32 %r20, %r10, %r11;", lambda a, b: max(min(a, b), 0)),
        ("and.b32 %r20, %r10, -32;", lambda a, b: a & -32),
        ("lop3.b32 %r20, %r10, %r11, 255, 0xEA;", lambda a, b: (a & b) | 255),
        ("prmt.b32 %r20, %r10, %r11, 0x5410;", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16),
        ("popc.b32 %r20, %r10;", lambda a, b: bin(a % 2**32).count("1")),
        ("clz.b32 %r20, %r10;", lambda a, b: 32 - (a % 2**32).bit_length()),
        ("bfe.u32 %r20, %r10, 4, 8;", lambda a, b: (a % 2**32) >> 4 & 255),
        ("shf.l.wrap.b32 %r20, %r10, %r11, 8;", lambda a, b: (b % 2**32) << 8 | (a % 2**32) >> 24),
        ("cvt.u16.u32 %h1, %r10;\n  cvt.s32.s16 %r20, %h1;", lambda a, b: (a + 2**15) % 2**16 - 2**15),
        (
            "cvt.u16.u32 %h1, %r10;\n  cvt.s16.s8 %h2, %h1;\n  cvt.s32.s16 %r20, %h2;",
            lambda a, b: (a + 128) % 256 - 128,
        ),
        (
            "mul.wide.s32 %d5, %r10, %r11;\n  shr.s64 %d5, %d5, 16;\n  cvt.u32.u64 %r20, %d5;",
            lambda a, b: (a * b) >> 16,
        ),
    ],
)
def test_integer_arithmetic(code, fn):
    got = lanewise(code, INTS, BY)
    want = [fn(int(a), int(b)) % 2**32 for a, b in zip(INTS, BY, strict=True)]
    assert got.tolist() == want


# ---- lanes
def test_shuffles_votes_and_election():
    lane = np.arange(32, dtype=np.uint32)
    assert np.array_equal(lanewise("shfl.sync.bfly.b32 %r20, %r10, 5, 31, -1;", lane), lane ^ 5)
    assert (lanewise("shfl.sync.idx.b32 %r20, %r10, 7, 31, -1;", lane) == 7).all()
    assert np.array_equal(lanewise("shfl.sync.up.b32 %r20, %r10, 1, 0, -1;", lane), np.maximum(lane.astype(int) - 1, 0))
    down = lanewise("shfl.sync.down.b32 %r20, %r10, 2, 0x181f, -1;", lane)  # segments of eight lanes
    assert np.array_equal(down, np.where(lane % 8 < 6, lane + 2, lane))
    ballot = "setp.gt.u32 %p1, %r10, 29;\n  vote.sync.ballot.b32 %r20, %p1, -1;"
    assert (lanewise(ballot, lane) == 3 << 30).all()
    one = "elect.sync _|%p1, -1;\n  selp.b32 %r20, 1, 0, %p1;"
    assert lanewise(one, lane).tolist() == [1] + [0] * 31
    vote = "setp.gt.u32 %p1, %r10, 29;\n  vote.sync.any.pred %p2, %p1, -1;\n  selp.b32 %r20, 1, 0, %p2;"
    assert lanewise(vote, lane).all()


def test_divergent_loops_and_predicated_instructions():
    code = """mov.b32 %r20, 0;
LOOP:
  setp.ge.u32 %p1, %r20, %r10;
  @%p1 bra OUT;
  add.s32 %r20, %r20, 1;
  bra LOOP;
OUT:
  setp.gt.u32 %p2, %r10, 20;
  @%p2 add.s32 %r20, %r20, 100;
  @!%p2 add.s32 %r20, %r20, 200;"""
    lane = np.arange(32, dtype=np.uint32)
    assert np.array_equal(lanewise(code, lane), lane + np.where(lane > 20, 100, 200))


def test_inline_assembly_scopes_keep_their_names():
    block = """{
  .reg .pred P;
  .reg .b32 t;
  setp.lt.u32 P, %r10, LIMIT;
  mov.b32 t, %r20;
  @P bra DONE;
  add.s32 t, t, 1;
  DONE:
  mov.b32 %r20, t;
  }
"""
    lane = np.arange(32, dtype=np.uint32)
    code = "mov.b32 %r20, 0;\n" + block.replace("LIMIT", "8") + block.replace("LIMIT", "16")
    assert np.array_equal(lanewise(code, lane), (lane >= 8).astype(int) + (lane >= 16))


def test_atomics_add_every_lane_and_vector_accesses():
    code = """
  ld.param.b64 %d0, [p0];
  atom.global.add.u32 %r5, [%d0], 2;
  red.release.gpu.global.add.s32 [%d0+4], %r1;
  mul.wide.u32 %d2, %r1, 16;
  add.s64 %d3, %d0, %d2;
  st.global.v4.b32 [%d3+16], {%r5, %r1, 7, 0f3F800000};
"""
    for seed in (0, 1):
        out = play(code, (Pointer("x"),), {"x": np.zeros((33, 4), np.uint32)}, seed=seed).check().outputs["x"]
        assert out[0].tolist() == [64, sum(range(32)), 0, 0]
        assert sorted(out[1:, 0]) == list(range(0, 64, 2)) and (out[1:, 3] == 0x3F800000).all()


# ---- several warps and CTAs
def test_a_cluster_passes_arrivals_and_data():
    for seed in range(4):
        memory = {"out": Uninitialised((1,), np.uint32)}
        assert play(body("remote"), (Pointer("out"),), memory, cluster=2, seed=seed).check().outputs["out"][0] == 42


RING = body("ring")


@pytest.mark.parametrize("seed", range(8))
def test_a_ring_of_two_warps_under_any_timing(seed):
    memory = {"out": Uninitialised((32,), np.uint32)}
    got = play(RING, (Pointer("out"),), memory, block=64, seed=seed).check().outputs["out"]
    assert np.array_equal(got, 10 + 5 * np.arange(32))


def test_a_deadlock_names_warp_barrier_phase_and_counts():
    text = RING.replace("mbarrier.init.shared.b64 [%r10], 32;", "mbarrier.init.shared.b64 [%r10], 33;")
    memory = {"out": Uninitialised((32,), np.uint32)}
    report = play(text, (Pointer("out"),), memory, block=64)
    said = str(report.deadlock)
    assert "CTA 0,0,0 warp 1: line" in said and "parity 0" in said
    assert "mbarrier 1536 of CTA 0,0,0: phase 0, 1 of 33 arrivals pending, 0 bytes pending" in said
    with pytest.raises(AssertionError, match="deadlock"):
        report.check()


def test_named_barriers_and_spins_deadlock_too():
    report = play("  bar.sync 2, 64;\n")
    assert "waits at barrier 2 with 32 of 64 threads" in str(report.deadlock)
    spin = """
  ld.param.b64 %d0, [p0];
AGAIN:
  ld.acquire.gpu.global.b32 %r5, [%d0];
  setp.ne.b32 %p1, %r5, 1;
  @%p1 bra AGAIN;
"""
    assert "spins" in str(play(spin, (Pointer("x"),), {"x": np.zeros(1, np.uint32)}).deadlock)
    assert play(spin, (Pointer("x"),), {"x": np.ones(1, np.uint32)}).deadlock is None


# ---- hard errors
@pytest.mark.parametrize(
    "code,message",
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction frobnicate"),
        ("add.weird.s32 %r5, %r1, %r2;", "unknown instruction add.weird.s32"),
        ("add.s32 %r5, %r1;", "takes 2 operands, 1 given"),
        ("add.s32 %r5, %r1, %q7;", "special register %q7"),
        ("add.s32 %r5, %d1, %r2;", "register of 64 bits used as .s32"),
        ("mov.u32 %r5, %clock;", "special register %clock"),
        ("ld.shared.weird.b32 %r5, [%r0];", "modifier .weird"),
        ("bra NOWHERE;", "no label NOWHERE"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r5], %d1, %d2, %r6, %p1;", "kind::i8"),
        (
            "cp.async.bulk.tensor.9d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r0], [%d1, {0}], [%r2];",
            "rank",
        ),
        ("call foo;", "operand 'foo' not understood"),
        (".local .b8 stack[16];", "directive not emulated"),
        ("add.f32 %r5, %r1, 3;", "integer literal 3 as .f32"),
    ],
)
def test_what_is_not_understood_is_an_error_with_the_line(code, message):
    text = module(f"  {code}\n", ())
    with pytest.raises(PtxError) as error:
        run(text, Launch(()), {})
    line = next(i for i, x in enumerate(text.splitlines(), 1) if code in x)
    assert message in str(error.value) and f"line {line}" in str(error.value)


def test_launches_that_do_not_fit_the_kernel():
    text = module("  ld.param.b32 %r5, [p0];\n", (Scalar(1),), block=64)
    with pytest.raises(ValueError, match="0 launch parameters"):
        run(text, Launch((), block=(64, 1, 1)), {})
    with pytest.raises(ValueError, match="the kernel requires"):
        run(text, Launch((Scalar(1),), block=(32, 1, 1)), {})
    with pytest.raises(ValueError, match="no multiple of cluster"):
        run(text, Launch((Scalar(1),), grid=(3, 1, 1), block=(64, 1, 1), cluster=(2, 1, 1)), {})
    with pytest.raises(ValueError, match="233472"):
        run(text, Launch((Scalar(1),), block=(64, 1, 1), shared_bytes=240000), {})


def test_packed_sixteen_bit_arithmetic_is_rounded_once():
    rng = np.random.default_rng(3)
    words = [rng.standard_normal((32, 2)).astype(np.float32) for _ in range(3)]
    packed = [f32_to_bf16(w).view(np.uint32).reshape(32) for w in words]
    a, b, c = (bf16_to_f32(f32_to_bf16(w)) for w in words)
    for op, exact in (
        ("fma.rn", lambda x, y, z: x * y + z),
        ("mul", lambda x, y, z: x * y),
        ("add", lambda x, y, z: x + y),
    ):
        code = f"{op}.bf16x2 %r20, %r10, %r11{', %r12' if op == 'fma.rn' else ''};"
        got = bf16_to_f32(lanewise(code, *packed).view(np.uint16).reshape(32, 2))
        for i in range(32):
            for h in range(2):
                value = exact(*(Fraction(float(v[i, h])) for v in (a, b, c)))
                size = abs(value)
                exponent = size.numerator.bit_length() - size.denominator.bit_length()
                exponent -= Fraction(2) ** exponent > size
                want = round(value / Fraction(2) ** (exponent - 7)) * 2.0 ** (exponent - 7)
                assert got[i, h] == want, (op, i, h)


def test_more_bit_operations():
    x = RNG.integers(0, 2**32, 32).astype(np.uint32)
    y = RNG.integers(0, 2**32, 32).astype(np.uint32)
    assert lanewise("brev.b32 %r20, %r10;", x).tolist() == [int(f"{int(v):032b}"[::-1], 2) for v in x]
    mask = 0x1FF << 7
    want = [(int(p) << 7 & mask) | (int(q) & ~mask & 0xFFFFFFFF) for p, q in zip(x, y, strict=True)]
    assert lanewise("bfi.b32 %r20, %r10, %r11, 7, 9;", x, y).tolist() == want
    wide = "mov.b64 %d5, {%r10, %r11};\n  mov.b64 %d6, {%r11, %r10};\n"
    wide += "  mul.hi.u64 %d7, %d5, %d6;\n  cvt.u32.u64 %r20, %d7;"
    pairs = [((int(q) << 32 | int(p)) * (int(p) << 32 | int(q)) >> 64) & 0xFFFFFFFF for p, q in zip(x, y, strict=True)]
    assert lanewise(wide, x, y).tolist() == pairs
