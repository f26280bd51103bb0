"""Launches of FlashAttention-4's kernels for the emulator and the verifier, one batch and one head, packed by hand.

What each parameter is follows from its size in the PTX and its order, and from the kernels' signatures.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np
from emulator import Launch, Opaque, Scalar, Tma, Uninitialised, run
from emulator.arith import bf16_to_f32, f32_to_bf16
from emulator.launch import pack
from emulator.memory import Global
from emulator.run import load
from verifier.describe import votes

# Known right on hardware, against what PTX promises: see docs/measured/emulator.md
TOLERATED = ("read_before_wait", "unfinished", "duplicate_issue")


def relied(finding, report) -> str:
    """What an error is that hardware is known to forgive, as docs/measured/emulator.md has it; empty for all else."""
    if finding.kind == "named_barrier" and "arrives twice at one phase" in finding.message:
        return "a warp arrives at a named barrier and waits at it in one phase"
    if finding.kind == "remote_exit" and finding.message.startswith("a commit arrives at"):
        return "the last commit may find the other CTA gone"
    text = r"write of buffer \w+ .* after the write by a bulk copy of (.+) that writes \(line (\d+)\)"
    same = re.search(text, finding.message)
    if finding.kind == "race" and same and same[1] == finding.where and int(same[2]) == finding.line:
        if any(f.kind == "duplicate_issue" and f.line == finding.line for f in report.findings):
            return "a copy issued by all lanes: the same bytes to the same place"
    return ""


ROLES = {
    "fwd": {"softmax": range(8), "correct": range(8, 12), "mma": (12,), "store": (13,), "load": (14,), "idle": (15,)},
    "bwd": {"reduce": range(4), "compute": range(4, 12), "mma": (12,), "load": (13,), "other": (14, 15)},
}


@dataclass(frozen=True)
class Call:
    """One kernel at one size. `pair`: two CTAs multiply together."""

    direction: str
    depth: int
    causal: bool
    pair: bool
    ptx: str

    def arrays(self, queries: int, keys: int):
        """(memory, float64 results by buffer name)."""
        rng, d = np.random.default_rng(1), self.depth
        q, k, v, do = (
            f32_to_bf16(rng.standard_normal((1, n, 1, d)).astype(np.float32)) for n in (queries, keys, keys, queries)
        )
        a, b, c, g = (bf16_to_f32(x)[0, :, 0].astype(np.float64) for x in (q, k, v, do))
        s = a @ b.T * d**-0.5
        if self.causal:
            s[np.arange(keys) > np.arange(queries)[:, None] + keys - queries] = -np.inf
        top = s.max(axis=1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=1, keepdims=True)
        p, lse = p / total, (top + np.log(total))[:, 0]
        out = p @ c
        if self.direction == "fwd":
            empty = {
                "o": Uninitialised((1, queries, 1, d), np.uint16),
                "lse": Uninitialised((1, 1, queries), np.float32),
            }
            return {"q": q, "k": k, "v": v} | empty, {"o": out, "lse": lse}
        ds = p * (g @ c.T - (g * out).sum(axis=1, keepdims=True))
        rows = -(-queries // 128) * 128

        def line(x):
            return np.pad(x.astype(np.float32), (0, rows - queries))[None, None]

        memory = {
            "q": q,
            "k": k,
            "v": v,
            "do": do,
            "lse": line(lse * np.log2(np.e)),
            "dps": line((g * out).sum(axis=1)),
        }
        memory["dqa"] = np.zeros((1, 1, rows * d), np.float32)
        memory |= {name: Uninitialised((1, keys, 1, d), np.uint16) for name in ("dk", "dv")}
        return memory, {"dqa": ds @ b, "dk": ds.T @ a * d**-0.5, "dv": p.T @ g}

    def boxes(self):
        """(buffer, columns, rows) of the tensor maps in order. A pair's CTA copies half of the rows of a B operand."""
        half = 64 if self.pair else 128
        if self.direction == "fwd":
            return [("q", 64, 128), ("k", 64, half), ("v", 64, 128), ("o", 64, 128)]
        if self.pair:
            return [("q", 64, 64), ("q", 64, 128), ("k", 64, 128), ("k", 64, 256), ("v", 64, 128), ("do", 64, 128),
                    ("do", 64, 64), ("dv", 64, 128), ("dk", 64, 128)]  # fmt: skip
        return [(name, 64, 128) for name in ("q", "k", "v", "do", "dv", "dk")]

    def lines(self, queries: int, keys: int) -> list[tuple[str, int]]:
        """(buffer, elements) of the tensors that are passed as pointer and shape."""
        rows = -(-queries // 128) * 128
        return (
            [("lse", queries)]
            if self.direction == "fwd"
            else [("lse", rows), ("dps", rows), ("dqa", rows * self.depth)]
        )

    def launch(self, memory, queries: int, keys: int) -> Launch:
        length = {"q": queries, "o": queries, "do": queries}
        address, d, scale = Global(memory).address, self.depth, self.depth**-0.5
        maps = iter(_map(name, d, length.get(name, keys), (columns, rows)) for name, columns, rows in self.boxes())
        extents = iter(name for name, _, _ in self.boxes())  # of the same tensors, in the same order
        lines = iter(self.lines(queries, keys))
        floats = iter((scale * np.log2(np.e),) if self.direction == "fwd" else (scale, scale * np.log2(np.e)))
        blocks = -(-queries // 256) if self.direction == "fwd" else -(-keys // 128)
        words = iter((blocks, 1, 1, 1) if self.direction == "fwd" and not self.causal else ())
        params, text = [], re.search(r"\.entry\s+\w+\s*\((.*?)\n\)", self.ptx, re.S)[1]
        for size, word in re.findall(r"\.param (?:\.align \d+ \.b8 \w+\[(\d+)\]|\.(u32|f32|u64) \w+)", text):
            if size == "16":
                params.append(Opaque(struct.pack("<4i", length.get(next(extents), keys), d, 1, 1)))
            elif size == "40":
                name, n = next(lines)
                params.append(Opaque(struct.pack("<Q4i2q", address(name), 1, 1, n, 0, 0, 0)))
            elif size == "128":
                params.append(next(maps))
            elif size == "12":
                params.append(Opaque(struct.pack("<IIBBxx", 1, 1, 0, 0)))  # division by 1
            elif size:
                params.append(Opaque(bytes(int(size))))
            else:
                params.append(Scalar(np.float32(next(floats)) if word == "f32" else next(words, 1)))
        roles = {name: tuple(warps) for name, warps in ROLES[self.direction].items()}
        grid = -(-blocks // 2) * 2 if self.pair else blocks
        return Launch(tuple(params), (grid, 1, 1), (512, 1, 1), (2 if self.pair else 1, 1, 1), 232448, None, roles)

    def run(self, queries: int, keys: int, seed: int = 0):
        """(report, {result: relative error})."""
        memory, want = self.arrays(queries, keys)
        report = run(self.ptx, self.launch(memory, queries, keys), memory, seed=seed, tolerate=TOLERATED)
        return report, {name: error(report.outputs[name], x, name) for name, x in want.items()}


def _map(name: str, depth: int, length: int, box: tuple[int, int]) -> Tma:
    size = 2 * depth * length
    return Tma(name, "bfloat16", (depth, length, 1, 1), (2 * depth, size, size), (*box, 1, 1), "128B")


def verifier_input(call: Call, queries: int, keys: int, arm: bool) -> dict:
    """The verifier's input: every parameter that the kernel loads, from the same bytes that the emulator gets."""
    memory, _ = call.arrays(queries, keys)
    one = call.launch(memory, queries, keys)
    block, maps = pack(load(call.ptx).kernel, one.params, lambda name: 0)
    declarations, arguments, descriptors = [], [], []
    where = {p.offset: i for i, p in enumerate(load(call.ptx).kernel.params)}
    for at, m in maps.items():
        descriptors.append(
            {
                "parameter": where[at],
                "object": m.buffer,
                "element_type": "bf16",
                "rank": len(m.dims),
                "base_byte_offset": 0,
                "global_shape": list(m.dims),
                "global_strides_bytes": list(m.strides),
                "box_shape": list(m.box),
                "element_strides": [1] * len(m.dims),
                "swizzle": m.swizzle,
                "interleave": "none",
                "oob_fill": "zero",
            }
        )
        declarations.append({"parameter": where[at], "type": "tensor_map", "object": m.buffer})
    lines = iter(call.lines(queries, keys))
    names = {i: next(lines)[0] for i, p in enumerate(load(call.ptx).kernel.params) if p.size == 40}
    starts = sorted((i, at) for at, i in where.items())
    loads = re.findall(
        r"ld\.param\.(?:v\d\.)?([bfus]\d+)\s+(\{[^}]*\}|%\w+), \[\w+_param_(\d+)(?:\+(\d+))?\]", call.ptx
    )
    given, declared = set(), re.findall(r"\.param \.?(?:align \d+ \.)?(\w+) \w+_param_\d+", call.ptx)
    for kind, to, index, offset in loads:
        index, size = int(index), int(kind[1:]) // 8
        for i in range(to.count("%")):
            at = int(offset or 0) + size * i
            if (index, at) in given:
                continue
            given.add((index, at))
            if index in names and at == 0:
                declarations.append(
                    {"parameter": index, "offset": 0, "type": "pointer", "space": "global", "object": names[index]}
                )
                continue
            raw = block[starts[index][1] + at :][:size]
            kind = declared[index] if declared[index] != "b8" else kind.replace("b", "u")
            value = struct.unpack("<f", raw)[0] if kind == "f32" else int.from_bytes(raw, "little")
            one_value = {"parameter": index, "offset": at, "type": kind, "value": value}
            arguments.append(one_value)
    how = {"grid_dim": list(one.grid), "block_dim": list(one.block), "dynamic_shared_bytes": one.shared_bytes}
    if call.pair:
        how["cluster_dim"] = list(one.cluster)
    made = {"schema": "spverify.kernel-input/v1", "launch": how, "declarations": declarations, "arguments": arguments}
    made["tma_descriptors"] = descriptors
    if lines := votes(call.ptx):
        made["branch_decisions"] = [{"line": n, "taken": arm, "note": "depends on a warp vote"} for n in lines]
    return made


def error(got: np.ndarray, want: np.ndarray, name: str) -> float:
    """Relative L2 error. dQ lies in an order of its own in the workspace: its sorted values are compared."""
    got = (bf16_to_f32(got) if got.dtype == np.uint16 else got).astype(np.float64).reshape(-1)
    want = want.reshape(-1)
    if name == "dqa":
        got, want = np.sort(got[got != 0]), np.sort(want)
        if got.size != want.size:
            return float("inf")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
