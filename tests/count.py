"""Counts of one 128 x 128 tile of a forward, from a run in the emulator: `python tests/count.py [sm_100a|sm_90a]
[depth]`.

Two runs that differ by key tiles are subtracted, so prologue and epilogue cancel. Cycles by the counting rules of the
design: tensor = 2 M N K / rate, exp = ex2 elements / 16, shared memory = bytes / 128.
"""

import sys
from collections import defaultdict

import numpy as np
from emulator import Uninitialised, run
from emulator.counters import MUFU_LANES, SHARED_BYTES
from launch import launches, to_emulator

from jax_fa4.ffi.buffers import FLOATS, VALUES
from jax_fa4.ffi.compile import build

TILE = 128
SHARED_CAUSES = ("mma.read", "tma.write", "load.shared", "store.shared", "bulk.read", "bulk.write")


def roles_of(plan):
    """{role: warps} for the counters."""
    if plan.arch.startswith("sm_10"):
        starts = {"softmax": plan.SOFTMAX, "correct": plan.CORRECT, "mma": plan.MMA, "store": plan.STORE}
        starts |= {"load": plan.LOAD, "edge": plan.EDGE}
        ends = [*list(starts.values())[1:], plan.threads // 32]
        return {name: tuple(range(at, end)) for (name, at), end in zip(starts.items(), ends, strict=True)}
    return {"load": (0,), "math": tuple(range(4, plan.threads // 32))}


def plan_of(arch, depth):
    """The plan of a full bfloat16 forward, and its bind."""
    if arch == "sm_90a":
        from jax_fa4.kernels.sm90.fwd.plan import Plan, bind, tiles_for

        return Plan("bfloat16", depth, depth, **tiles_for(depth, depth, False)), bind
    from jax_fa4.kernels.sm100.fwd.plan import Plan, bind

    return Plan("bfloat16", depth, depth), bind


def execute(plan, bind, ptx, queries, keys, seed=0):
    """The emulator's Report of one head with all keys visible."""
    shapes = {"B": 1, "T": queries, "S": keys, "N": 1, "K": 1}
    e = plan.extents(shapes)
    rng = np.random.default_rng(0)
    ints, floats = np.zeros(VALUES.example(1), np.int32), np.zeros(FLOATS, np.float32)
    ints[VALUES.left] = ints[VALUES.right] = 2**30
    at = VALUES.example(0)
    ints[at + VALUES.q_len], ints[at + VALUES.kv_len] = queries, keys
    floats[VALUES.scale] = plan.depth**-0.5
    memory = {"ints": ints, "floats": floats}
    for b in plan.inputs:
        if b.name in "qkv":
            x = rng.standard_normal(b.sized(e)).astype(np.float32)
            memory[b.name] = (x.view(np.uint32) >> 16).astype(np.uint16)
    for b in plan.outputs:
        memory[b.name] = Uninitialised(b.sized(e), np.uint16 if b.dtype == "bfloat16" else np.dtype(b.dtype))
    memory = {b.name: memory[b.name] for b in (*plan.inputs, *plan.outputs)}
    (launch,) = launches(plan, bind, shapes, ptx)
    return run(launch.ptx, to_emulator(launch, roles_of(plan)), memory, seed=seed).check()


def per_tile(plan, bind, ptx, queries=256, short=256, long=512):
    """{role: {counter: amount}} of one 128 x 128 tile: the difference of two lengths over the tiles between them."""
    runs = [execute(plan, bind, ptx, queries, keys).counters for keys in (short, long)]
    tiles = (queries // TILE) * (long - short) // TILE
    out = defaultdict(dict)
    for table in ("instructions", "amounts"):
        few, many = (getattr(c, table) for c in runs)
        for role, counts in many.items():
            for name, amount in counts.items():
                change = (amount - few[role].get(name, 0)) / tiles
                if change:
                    out[role][name] = change
    return out


def cycles(table):
    """{resource: cycles} of one tile."""

    def total(name):
        return sum(counts.get(name, 0) for counts in table.values())

    out = {"tensor": total("tensor.cycles"), "exp": 32 * total("mufu.ex2") / MUFU_LANES}
    return out | {cause: total(cause) / SHARED_BYTES for cause in SHARED_CAUSES}


def main(arch="sm_100a", depth="128"):
    plan, bind = plan_of(arch, int(depth))
    table = per_tile(plan, bind, build(plan, keep_ptx=True).ptx)
    print(f"{arch} forward, depth {depth}, bfloat16: cycles of one {TILE} x {TILE} tile")
    print("  " + ", ".join(f"{name} {amount:.0f}" for name, amount in cycles(table).items()))
    print("by role: warp-instructions, bytes, cycles")
    for role, counts in table.items():
        print(f"  {role}: " + ", ".join(f"{name} {amount:.1f}" for name, amount in sorted(counts.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
