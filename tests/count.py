"""Counts of one 128 x 128 tile, in the emulator: `python tests/count.py [sm_100a|sm_90a] [depth] [fwd|bwd]`.

Two runs that differ by key tiles (backward: query tiles) are subtracted, so prologue and epilogue cancel. Cycles by the
counting rules of the design: tensor = 2 M N K / rate, exp = ex2 elements / 16, shared memory = bytes / 128. For
the Blackwell forward also the share of steps that rescale O, on random inputs and where the maximum creeps.
"""

import importlib
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
from emulator import Uninitialised, run
from emulator.counters import MUFU_LANES, SHARED_BYTES
from launch import launches, to_emulator

from jax_fa4.ffi.buffers import FLOATS, VALUES
from jax_fa4.ffi.compile import build
from jax_fa4.kernels.sm100.fwd.plan import clocks

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

    return Plan("bfloat16", depth, depth, spill_allowance=16), bind


def execute(plan, bind, ptx, queries, keys, seed=0, change=lambda memory: None):
    """The emulator's Report of one head with all keys visible. change: of the inputs, in place."""
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
    change(memory)
    for b in plan.outputs:
        memory[b.name] = Uninitialised(b.sized(e), np.uint16 if b.dtype == "bfloat16" else np.dtype(b.dtype))
    memory = {b.name: memory[b.name] for b in (*plan.inputs, *plan.outputs)}
    (launch,) = launches(plan, bind, shapes, ptx)
    return run(launch.ptx, to_emulator(launch, roles_of(plan)), memory, seed=seed).check()


def per_tile(plan, bind, ptx, queries=256, short=256, long=512):
    """{role: {counter: amount}} of one 128 x 128 tile: the difference of two lengths over the tiles between them."""
    runs = [execute(plan, bind, ptx, queries, keys).counters for keys in (short, long)]
    return difference(*runs, (queries // TILE) * (long - short) // TILE)


def difference(short, long, tiles):
    """{role: {counter: amount}} of one tile, from the Counters of two runs that differ by `tiles`."""
    out = defaultdict(dict)
    for table in ("instructions", "amounts"):
        few, many = (getattr(c, table) for c in (short, long))
        for role, counts in many.items():
            for name, amount in counts.items():
                change = (amount - few[role].get(name, 0)) / tiles
                if change:
                    out[role][name] = change
    return out


def backward_plan(arch, depth):
    """The selected plan of a full bfloat16 backward, its bind, and the warps of its roles."""
    from jax_fa4.kernels import select
    from jax_fa4.spec import AttentionSpec, Problem

    plan = select(Problem(AttentionSpec(), 1, 4096, 4096, 1, 1, depth, depth, "bfloat16", "bwd"), arch)
    bind = importlib.import_module(type(plan).__module__).bind
    roles = getattr(plan, "roles", None) or {
        "load": (0,),
        "reduce": (1, 2, 3),
        "math": tuple(range(4, plan.threads // 32)),
    }
    return plan, bind, roles


def execute_backward(plan, bind, ptx, roles, queries, keys):
    """Counters of the main kernel of one head, all keys visible; the preprocess runs before it."""
    from emulated import raw
    from problems import Case, inputs
    from test_compile_bwd import operands

    case = Case("count", b=1, t=queries, s=keys, n=1, k=1, d=plan.depth, v=plan.value_depth)
    given, shapes = operands(plan, case, inputs(case, plan.dtype)), {"B": 1, "T": queries, "S": keys, "N": 1, "K": 1}
    kinds = {plan.dtype: raw(np.zeros(0), plan.dtype).dtype, "float32": np.float32, "int32": np.int32}
    e = plan.extents(shapes)
    memory = {b.name: given[b.name] for b in plan.inputs}
    memory |= {b.name: Uninitialised(b.sized(e), np.dtype(kinds[b.dtype])) for b in plan.outputs}
    pre, main = launches(plan, bind, shapes, ptx)[:2]
    memory |= run(pre.ptx, to_emulator(pre), memory).check().outputs
    return run(main.ptx, to_emulator(main, roles), memory).check().counters


def per_backward_tile(arch, depth):
    """{role: {counter: amount}} of one 128 x 128 tile of the main kernel: of the steps between four tiles and eight."""
    plan, bind, roles = backward_plan(arch, depth)
    ptx, keys = build(plan, keep_ptx=True).ptx.rstrip("\0"), TILE * getattr(plan, "ctas", 1)
    few, many = (execute_backward(plan, bind, ptx, roles, queries, keys) for queries in (4 * TILE, 8 * TILE))
    return difference(few, many, 4 * keys // TILE)


def cycles(table):
    """{resource: cycles} of one tile."""

    def total(name):
        return sum(counts.get(name, 0) for counts in table.values())

    out = {"tensor": total("tensor.cycles"), "exp": 32 * total("mufu.ex2") / MUFU_LANES}
    return out | {cause: total(cause) / SHARED_BYTES for cause in SHARED_CAUSES}


def to_bits(x):
    """bfloat16 by truncation."""
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def spread(factor):
    """Random scores of a standard deviation of `factor` natural-log units."""

    def change(memory):
        rng = np.random.default_rng(1)
        memory["q"] = to_bits(factor * rng.standard_normal(memory["q"].shape))

    return change


def creeping(step):
    """The maximum of every row grows by `step` log2 units from each block to the next that is visited."""

    def change(memory):
        q, k = (np.zeros(memory[name].shape) for name in "qk")
        q[..., 0] = 1.0
        visited = k.shape[1] // TILE - 1 - np.arange(k.shape[1]) // TILE
        k[..., 0] = (step * np.log(2) * visited)[:, None]
        memory["q"], memory["k"], memory["floats"][VALUES.scale] = to_bits(q), to_bits(k), 1.0

    return change


def rescaled(plan, bind, ptx, change, keys=1024):
    """Of the steps of a warp of correction that could rescale O (all but a tile's first), the share that did."""
    counters = execute(plan, bind, ptx, 256, keys, change=change).counters
    stores = counters.instructions["correct"].get("tcgen05.st", 0)
    return stores / (plan.inner_value // 16) / (2 * 4 * (keys // TILE - 1))


def print_rescaling(plan, bind):
    """Beside tau = 8 (log2 units), tau = 0.001: what rescaling whenever a maximum moves would do."""
    kinds = {f"random, scores of deviation {x}": spread(x) for x in (1, 4)}
    kinds |= {f"maximum creeps by {x} a block": creeping(x) for x in (3.9, 7.9, 8.5)}
    plans = [replace(plan, lazy=tau) for tau in (plan.lazy, 0.001)]
    built = [build(p, keep_ptx=True).ptx for p in plans]
    print(f"share of steps that rescale O, eight blocks of keys: tau {plans[0].lazy}, tau {plans[1].lazy}")
    for name, change in kinds.items():
        shares = [rescaled(p, bind, ptx, change) for p, ptx in zip(plans, built, strict=True)]
        print(f"  {name}: " + ", ".join(f"{share:.0%}" for share in shares))


def main(arch="sm_100a", depth="128", direction="fwd"):
    if direction == "bwd":
        table = per_backward_tile(arch, int(depth))
    else:
        plan, bind = plan_of(arch, int(depth))
        table = per_tile(plan, bind, build(plan, keep_ptx=True).ptx)
    name = {"fwd": "forward", "bwd": "backward, main kernel"}[direction]
    print(f"{arch} {name}, depth {depth}, bfloat16: cycles of one {TILE} x {TILE} tile")
    print("  " + ", ".join(f"{name} {amount:.0f}" for name, amount in cycles(table).items()))
    if arch != "sm_90a" and direction == "fwd":
        rules = clocks(plan)
        print("  by the rules: " + ", ".join(f"{name} {amount:.0f}" for name, amount in rules.items()))
    print("by role: warp-instructions, bytes, cycles")
    for role, counts in table.items():
        print(f"  {role}: " + ", ".join(f"{name} {amount:.1f}" for name, amount in sorted(counts.items())))
    if arch != "sm_90a" and direction == "fwd":
        print_rescaling(plan, bind)


if __name__ == "__main__":
    main(*sys.argv[1:])
