"""Micro-kernels for sm_90a, one feature each, with inputs: what the emulator and an H200 are compared on, bit by bit.

Only instructions that both Hopper and Blackwell have, and wgmma. `tests/gpu_micro.py` runs them on a card.
"""

from dataclasses import dataclass, field

import numpy as np

from .arith import f32_to_bf16
from .launch import Pointer, Scalar, Tma, Uninitialised
from .snippets import SPAN, body, module, wgmma_setup

N = 256  # threads of a scalar case
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"


@dataclass(frozen=True)
class Case:
    """`ulp`: how far the two may be apart in float32 units of the last place; 0 = equal bits. entry: the kernel's name
    if the text is a module of its own; else it is a body."""

    name: str
    text: str
    params: tuple
    memory: dict
    block: int = 32
    cluster: int = 1
    shared: int = 16384
    ulp: int = 0
    entry: str = ""
    ptx: str = field(init=False, default="")

    def __post_init__(self):
        whole = self.text if self.entry else module(self.text, self.params, self.block, "sm_90a")
        object.__setattr__(self, "ptx", whole)


def floats(rng, spread=30):
    """Random float32 with random exponents, and the awkward ones."""
    x = (rng.standard_normal(N) * 2.0 ** rng.integers(-spread, spread + 1, N)).astype(np.float32)
    x[:10] = [0.0, -0.0, 1.0, np.inf, -np.inf, 2.0**-126, 2.0**-140, 3.4e38, 1 + 2.0**-23, -1.5]
    return x


def scalar(name, code, *operands, ulp=0):
    """`code` on N threads: operands in %r10, %r11, %r12, result %r20."""
    loads = "".join(f"  ld.global.b32 %r{10 + i}, [%d3+{4 * N * i}];\n" for i in range(len(operands)))
    text = f"""
  ld.param.b64 %d0, [p0];
  ld.param.b64 %d1, [p1];
  mul.wide.u32 %d2, %r1, 4;
  add.s64 %d3, %d0, %d2;
  add.s64 %d4, %d1, %d2;
{loads}  {code}
  st.global.b32 [%d4], %r20;
"""
    table = np.stack([x.view(np.uint32) for x in operands])
    memory = {"x": table, "out": Uninitialised((N,), np.uint32)}
    return Case(name, text, (Pointer("x"), Pointer("out")), memory, block=N, ulp=ulp)


def arithmetic():
    rng = np.random.default_rng(7)
    x, y, z = floats(rng), np.roll(floats(rng), 31), np.roll(floats(rng), 77)
    i, j = (rng.integers(-(2**31), 2**31, N).astype(np.int32) for _ in range(2))
    small = rng.integers(1, 1000, N).astype(np.int32)
    for op in ("add", "sub", "mul"):
        for mode in ("rn", "rm", "rp", "rz"):
            yield scalar(f"{op}.{mode}", f"{op}.{mode}.f32 %r20, %r10, %r11;", x, y)
    for mode in ("rn", "rm", "rp", "rz"):
        yield scalar(f"fma.{mode}", f"fma.{mode}.f32 %r20, %r10, %r11, %r12;", x, y, z)
    yield scalar("max", "max.f32 %r20, %r10, %r11;", x, y)
    yield scalar("max.NaN", "max.NaN.f32 %r20, %r10, %r11;", x, y)
    yield scalar("cvt bf16x2", "cvt.rn.bf16x2.f32 %r20, %r10, %r11;", x, y)
    yield scalar("cvt f16x2", "cvt.rn.f16x2.f32 %r20, %r10, %r11;", x, y)
    yield scalar("cvt to int", "cvt.rni.s32.f32 %r20, %r10;", x)
    near = rng.uniform(-20, 20, N).astype(np.float32)
    # bounds of the PTX manual: 2 ulp and 2^-22 relative for ex2, 1 ulp for rcp; lg2 is absolute near 1, so kept away
    # from it
    yield scalar("ex2.approx.ftz", "ex2.approx.ftz.f32 %r20, %r10;", near, ulp=2)
    yield scalar("lg2.approx.ftz", "lg2.approx.ftz.f32 %r20, %r10;", np.abs(near) + 2, ulp=4)
    yield scalar("rcp.approx.ftz", "rcp.approx.ftz.f32 %r20, %r10;", near, ulp=1)
    yield scalar("rcp.rn", "rcp.rn.f32 %r20, %r10;", near)
    for code in ("div.s32 %r20, %r10, %r11;", "rem.s32 %r20, %r10, %r11;", "mul.hi.s32 %r20, %r10, %r11;"):
        yield scalar(code.split()[0], code, i, small)
    for code in (
        "prmt.b32 %r20, %r10, %r11, 0x6142;",
        "lop3.b32 %r20, %r10, %r11, 12345, 0x96;",
        "shf.l.wrap.b32 %r20, %r10, %r11, 13;",
        "bfe.u32 %r20, %r10, 7, 9;",
        "popc.b32 %r20, %r10;",
        "clz.b32 %r20, %r10;",
        "shl.b32 %r20, %r10, 35;",
        "shr.s32 %r20, %r10, 40;",
        "shfl.sync.bfly.b32 %r20, %r10, 5, 31, -1;",
        "shfl.sync.up.b32 %r20, %r10, 3, 0, -1;",
        "shfl.sync.down.b32 %r20, %r10, 2, 0x181f, -1;",
    ):
        yield scalar(code.split()[0], code, i, j)
    yield scalar("vote", "setp.gt.s32 %p1, %r10, 0;\n  vote.sync.ballot.b32 %r20, %p1, -1;", i)


def copies():
    x = np.arange(100 * 64, dtype=np.uint16).reshape(100, 64)
    for swizzle, inner in (("none", 64), ("128B", 64), ("64B", 32), ("32B", 16)):
        for at in ((0, 0), (-8, -2), (48, 90)):
            size = 32 * inner
            desc = Tma("x", "bfloat16", (64, 100), (128,), (inner, 16), swizzle)
            memory = {"x": x, "out": Uninitialised((size,), np.uint8)}
            params = (desc, Pointer("out"), Scalar(at[0]), Scalar(at[1]), Scalar(size))
            yield Case(f"tensor load {swizzle} at {at}", body("dump"), params, memory)
    desc = Tma("x", "bfloat16", (64, 100), (128,), (64, 16), "none", "nan")
    memory = {"x": x, "out": Uninitialised((2048,), np.uint8)}
    params = (desc, Pointer("out"), Scalar(0), Scalar(95), Scalar(2048))
    yield Case("tensor load filled with NaN", body("dump"), params, memory)
    grid = np.zeros((100, 40), np.float32)
    text = body("copy_out").replace("FORM", "").replace("COPY", STORE)
    yield Case("tensor store", text, (Tma("x", "float32", (36, 100), (160,), (32, 32), "128B"),), {"x": grid})
    text = body("copy_out").replace("FORM", "cvt.rn.f32.u32 %r7, %r7;").replace("COPY", REDUCE)
    ramp = np.arange(4000, dtype=np.float32).reshape(100, 40)
    yield Case("tensor reduction", text, (Tma("x", "float32", (40, 100), (160,), (32, 32)),), {"x": ramp})
    words = {"x": np.arange(32, dtype=np.uint32), "out": np.arange(32, dtype=np.uint32)}
    both = (Pointer("x"), Pointer("out"))
    yield Case("bulk load", body("load"), both, words)
    yield Case("bulk store", body("store"), both, words)
    text = body("store").replace("st.shared.b32 [%r3], %r1;", "cvt.rn.f32.u32 %r9, %r1;\n  st.shared.b32 [%r3], %r9;")
    text = text.replace(
        "cp.async.bulk.global.shared::cta.bulk_group", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    )
    yield Case("bulk reduction", text, both, {"x": words["x"], "out": np.arange(32, dtype=np.float32)})
    out = {"out": Uninitialised((2, 32), np.uint32)}
    rows = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32)
    params = (Tma("x", "float32", (32, 16), (128,), (32, 16)), Pointer("out"))
    yield Case("multicast", body("multicast").replace("COPY", LOAD), params, {"x": rows} | out, cluster=2)
    yield Case("exchange between CTAs", body("push"), (Pointer("out"),), out, cluster=2)
    yield Case(
        "remote arrival and load", body("remote"), (Pointer("out"),), {"out": Uninitialised((1,), np.uint32)}, cluster=2
    )
    pairs = {"out": Uninitialised((2, 32, 2), np.uint32)}
    yield Case("stores from afar", body("stasync"), (Pointer("out"),), pairs, cluster=2)
    yield Case("bytes expected from afar", body("pass"), (Pointer("out"),), out, cluster=2)
    boxes = np.arange(5 * 16 * 32, dtype=np.uint32).reshape(80, 32)
    params = (Tma("x", "float32", (32, 80), (128,), (32, 8)), Pointer("out"), Scalar(5))
    memory = {"x": boxes, "out": Uninitialised((5, 2, 16, 32), np.uint32)}
    yield Case("halves into both CTAs", body("share").replace("COPY", LOAD), params, memory, block=64, cluster=2)
    yield Case("ring of two warps", body("ring"), (Pointer("out"),), {"out": Uninitialised((32,), np.uint32)}, block=64)
    for trans in ("", ".trans"):
        memory = {"out": Uninitialised((4, 8, 8), np.uint16)}
        yield Case(f"stmatrix{trans}", body("matrix").replace("TRANS", trans), (Pointer("out"),), memory)
    memory = {"x": np.arange(1, 129, dtype=np.uint32).reshape(32, 4), "out": Uninitialised((32, 4), np.uint32)}
    text = body("cp_async").replace("DONE", "cp.async.commit_group;\n  cp.async.wait_group 0;")
    yield Case("cp.async with a short source", text, both, memory)


def a_in_registers(text):
    """wgmma.ptx with A's fragments loaded by the threads from its buffer (64 x 64, row by row), which p11 points to."""
    head, rest = text.split("  wgmma.fence.sync.aligned;\n")
    (line,) = (x for x in rest.split("\n") if "wgmma.mma_async" in x)
    for code in (
        "ld.param.b64 %d5, [p11]",
        "shr.u32 %r230, %r1, 5",
        "shl.b32 %r230, %r230, 4",
        "and.b32 %r231, %r1, 31",
        "shr.u32 %r231, %r231, 2",
        "add.s32 %r230, %r230, %r231",
        "shl.b32 %r230, %r230, 7",
        "and.b32 %r231, %r1, 3",
        "shl.b32 %r231, %r231, 2",
        "add.s32 %r230, %r230, %r231",
        "cvt.u64.u32 %d6, %r230",
        "add.s64 %d7, %d5, %d6",
    ):
        head += f"  {code};\n"
    steps = ""
    for step in range(4):
        fragment = [240 + 4 * step + i for i in range(4)]
        for register, (row, k) in zip(fragment, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
            head += f"  ld.global.b32 %r{register}, [%d7+{128 * row + 2 * (16 * step + k)}];\n"
        vector = "{" + ", ".join(f"%r{r}" for r in fragment) + "}"
        steps += "  mov.b64 %d11, {%r216, %r228};\n" + f"  setp.ne.b32 %p2, {step}, 0;\n"
        steps += line.replace("%d10, %d11", f"{vector}, %d11").replace("1, 1, 0, 0;", "1, 1, 0;") + "\n"
        steps += "  add.s32 %r216, %r216, %r229;\n"
    return head + "  wgmma.fence.sync.aligned;\n" + steps + rest[rest.index("  wgmma.commit_group") :]


def products():
    integers = np.random.default_rng(0).integers(-4, 5, (2, 128, 64))
    for a in [(s, k) for s in SPAN for k in (True, False)]:
        for b in (("128B", True), ("64B", False)):
            params, memory, how = wgmma_setup(integers, a, b)
            text = body("wgmma").replace("%p2, 1, 1, 0, 0", f"%p2, 1, 1, {int(not a[1])}, {int(not b[1])}")
            name = f"wgmma A {a[0]} {'K' if a[1] else 'M'}, B {b[0]} {'K' if b[1] else 'N'}"
            yield Case(name, text, params, memory, how["block"], 1, how["shared"])
    for spread in (0, 3, 12, 60):
        rng = np.random.default_rng(spread)
        params, memory, how = wgmma_setup(integers)
        for name in "ab":
            x = rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-spread, spread + 1, (64, 64))
            memory[name] = f32_to_bf16(x.astype(np.float32))
        yield Case(f"wgmma bf16, exponents +-{spread}", body("wgmma"), params, memory, how["block"], 1, how["shared"])
        half = {}
        for name in "ab":
            x = rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-spread // 5, spread // 5 + 1, (64, 64))
            half[name] = x.astype(np.float16).view(np.uint16)
        text = body("wgmma").replace(".bf16.bf16", ".f16.f16")
        registers = (*params, Pointer("a"))
        for kind, numbers in (("bf16", memory), ("f16", memory | half)):
            made = a_in_registers(body("wgmma").replace(".bf16.bf16", f".{kind}.{kind}"))
            name = f"wgmma {kind}, A in registers, exponents +-{spread if kind == 'bf16' else spread // 5}"
            yield Case(name, made, registers, numbers, how["block"], 1, how["shared"])
        yield Case(f"wgmma f16, exponents +-{spread // 5}", text, params, memory | half, how["block"], 1, how["shared"])


def cases():
    """All of them."""
    return [*arithmetic(), *copies(), *products()]
