"""Small PTX modules around a hand-written body, for tests: a header, generous registers, and the launch that goes
with it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .arith import f32_to_bf16
from .launch import Launch, Pointer, Scalar, Tma, Uninitialised
from .run import run

HEAD = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(
{params}
)
.reqntid {block}, 1, 1
{{
  .reg .pred %p<16>;
  .reg .b16 %h<32>;
  .reg .b32 %r<300>;
  .reg .b64 %d<64>;
  mov.b32 %r0, smem;
  mov.u32 %r1, %tid.x;
{body}
  ret;
}}
"""


def body(name):
    """Text of tests/emulator/ptx/<name>.ptx, without the comment at its head."""
    lines = (Path(__file__).parent / "ptx" / f"{name}.ptx").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("//"))


def module(body, params, block=32, target="sm_100a"):
    """PTX text; parameter i is called `p<i>`: a descriptor for a Tma, else .u64 for a Pointer and .u32 for a Scalar.

    Before the body, %r0 holds the dynamic shared memory's address and %r1 the thread's number.
    """
    lines = []
    for i, p in enumerate(params):
        if isinstance(p, Tma):
            lines.append(f"  .param .align 64 .b8 p{i}[128]")
        else:
            lines.append(f"  .param .{'u64' if isinstance(p, Pointer) else 'u32'} p{i}")
    return HEAD.format(target=target, params=",\n".join(lines), block=block, body=body)


def play(body, params=(), memory=None, block=32, shared=16384, seed=0, cluster=1, **kw):
    """Run a body in one cluster and return the Report."""
    target = kw.pop("target", "sm_100a")
    launch = Launch(
        tuple(params), grid=(cluster, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1), shared_bytes=shared
    )
    return run(module(body, params, block, target), launch, memory or {}, seed=seed, **kw)


def kinds(report):
    """The set of finding kinds."""
    return {f.kind for f in report.findings}


UMMA_MODE = {"none": 0, "128B": 2, "64B": 4, "32B": 6}
WGMMA_MODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
SPAN = {"32B": 32, "64B": 64, "128B": 128}


@dataclass(frozen=True)
class Side:
    """One operand in shared memory: copied by `map`, read by descriptors (low, high) that advance by `step` (16-byte
    units) per 16 k.
    """

    map: Tma
    low: int
    high: int
    step: int


def side(buffer, rows, depth, swizzle, major_k, modes, version):
    """A tile of `rows` x `depth` 16-bit elements in atoms of the swizzle span along its contiguous dimension.

    K-major: `depth` is one atom, `buffer` (rows, depth). MN-major: `buffer` is (depth, rows), the copy puts its atoms
    one behind
    the other, so the leading offset is one atom of all k.
    """
    span = SPAN[swizzle]
    inner, outer = (depth, rows) if major_k else (rows, depth)
    atoms = 2 * inner // span
    if 2 * inner % span or (major_k and atoms != 1):
        raise ValueError(f"{inner} elements are {2 * inner} bytes, the {swizzle} atom has {span}")
    map = Tma(buffer, "bfloat16", (span // 2, outer, atoms), (2 * inner, span), (span // 2, outer, atoms), swizzle)
    stride = 8 * span  # the next 8 rows (K-major) or the next 8 k (MN-major)
    leading = outer * span
    step = 2 if major_k else 2 * stride >> 4
    high = stride >> 4 | (version << 14) | modes[swizzle] << (29 if version else 30)
    return Side(map, (leading >> 4) << 16, high, step)


def depth_of(a, b):
    """k elements that both sides can give: a K-major side has one atom."""
    return min(SPAN[swizzle] // 2 if major_k else 64 for swizzle, major_k in (a, b))


def _sides(values, rows, modes, version, forms):
    out, memory = [], {}
    depth = depth_of(*forms)
    for name, count, (swizzle, major_k), data in zip("ab", rows, forms, values, strict=True):
        wide = SPAN[swizzle] // 2 if major_k else depth
        tile = data[:count, :wide].astype(np.float32)
        memory[name] = f32_to_bf16(np.ascontiguousarray(tile if major_k else tile.T))
        out.append(side(name, count, wide, swizzle, major_k, modes, version))
    return out, memory


def _arguments(a, b):
    return tuple(Scalar(v) for s in (a, b) for v in (s.low, s.high, s.step))


def mma_setup(values, a=("128B", True), b=("128B", True), m=128, n=64):
    """Parameters, memory and options of mma.ptx. `values` (2, rows, k) integers; `a`, `b`: (swizzle, K-major)."""
    (sa, sb), memory = _sides(values, (m, n), UMMA_MODE, 1, (a, b))
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (not a[1]) << 15 | (not b[1]) << 16 | (n >> 3) << 17 | (m >> 4) << 24
    expected = sa.map.box_bytes + sb.map.box_bytes
    steps = depth_of(a, b) // 16
    params = (sa.map, sb.map, Pointer("out"), Scalar(idesc), Scalar(n), Scalar(steps), Scalar(expected))
    memory["out"] = Uninitialised((128, 64), np.float32)
    return (*params, *_arguments(sa, sb)), memory, {"block": 128, "shared": 65536 + 64}


def pair_setup(values, m=256, n=64):
    """Parameters, memory and options of mma2.ptx: [m, 64] times [n, 64]^T by a pair of CTAs, 128-byte swizzle."""
    rows, columns = m // 2, n if m == 256 else n // 2
    tiles = (("a", values[0][:m], rows), ("b", values[1][:n], n // 2))
    maps = [Tma(name, "bfloat16", (64, len(x)), (128,), (64, box), "128B") for name, x, box in tiles]
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (n >> 3) << 17 | (m >> 4) << 24
    params = (*maps, Pointer("out"), Scalar(idesc), Scalar(rows), Scalar(128 * (rows + n // 2)), Scalar(columns))
    memory = {name: f32_to_bf16(np.ascontiguousarray(x, np.float32)) for name, x, _ in tiles}
    memory["out"] = Uninitialised((2, 128, columns), np.float32)
    return params, memory, {"block": 128, "shared": 65536 + 64, "cluster": 2}


def wgmma_setup(values, a=("128B", True), b=("128B", True)):
    """Parameters, memory and options of wgmma.ptx; its two transpose flags are literals at the end of the wgmma."""
    (sa, sb), memory = _sides(values, (64, 64), WGMMA_MODE, 0, (a, b))
    expected = sa.map.box_bytes + sb.map.box_bytes
    params = (sa.map, sb.map, Pointer("out"), Scalar(depth_of(a, b) // 16), Scalar(expected))
    memory["out"] = Uninitialised((128, 32), np.float32)
    options = {"block": 128, "shared": 65536 + 64, "target": "sm_90a"}
    return (*params, *_arguments(sa, sb)), memory, options
