"""Variants of the Hopper backward beside each other: TFLOP/s of the backward call alone, in one process.

    python benchmarks/backward_variants.py fill                       # where the DSL is: every variant into the store
    python benchmarks/backward_variants.py time 1024,4096,16384       # on the GPU; JAX_FA4_STORE names the filled store
    python benchmarks/backward_variants.py time 4096 d128,d64 lagged  # only these depths and variants (and the first)

With FA4_PACKAGES, a folder that benchmarks/fa4_hopper.py filled, `fill` and `time` have FlashAttention-4's own too.
16,384 tokens in all, 2048/D heads, bf16. FLOP: 10 B N T S D, half of it for causal. Each variant is timed three times,
in turns, and its gradients are compared with the first's; a difference beyond two roundings is printed as WRONG.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from fa4_hopper import ENV, Fa4Backward

from jax_fa4 import kernels
from jax_fa4.ffi import call
from jax_fa4.mask import UNBOUNDED
from jax_fa4.spec import AttentionSpec, Problem

CALLS = 8
IN_STEP = {"turns": False}
# name -> fields of the plan; the first is what others are compared with
VARIANTS: dict[str, dict[str, Any]] = {
    "turns": {},
    "in step": IN_STEP,
    "held": IN_STEP | {"held": True},
    "lagged": IN_STEP | {"held": True, "lagged": True},
    "direct": IN_STEP | {"direct": True, "parts": 0},
    "sections": {"section": 32},
    "dependent": {"dependent": True},
    "workers": {"workers": 132},
    "finishes": {"workers": 132, "finishes": True, "parts": 1},
    "clears": {"workers": 132, "finishes": True, "parts": 1, "clears": True},
    "ordered": {"ordered": True},
    "ordered sections": {"ordered": True, "section": 32},
    "ordered workers": {"ordered": True, "workers": 132},
}
if ENV in os.environ:
    VARIANTS["fa4"] = {}
DEPTHS = {"d128": (128, 128), "d64": (64, 64), "d96": (96, 96), "d256": (256, 256), "d192_128": (192, 128)}


def plan_of(depths: tuple[int, int], causal: bool, fields: dict[str, Any]) -> Any:
    d, v = depths
    if fields is VARIANTS.get("fa4"):
        return Fa4Backward(d, causal)
    plan = kernels.select(Problem(AttentionSpec(band=causal), 1, 1, 1, 1, 1, d, v, "bfloat16", "bwd"), "sm_90a", True)
    if plan.apart:
        fields = {
            name: x for name, x in fields.items() if name in ("direct", "parts", "section", "dependent", "ordered")
        }
        if fields.get("parts", 0):
            del fields["parts"]
    plan = replace(plan, workers=0, section=0, alternates=False)
    return replace(plan, **fields)


def all_plans(depths: list[str], names: list[str]) -> list[Any]:
    made = [
        plan_of(DEPTHS[d], causal, VARIANTS[n])
        for d in depths
        for causal in (False, True)
        for n in names
        if n != "fa4" or d in ("d64", "d128")
    ]
    return list(dict.fromkeys(made))  # where a variant is no other plan at a depth, it is timed twice: the noise


def operands(plan: Any, s: int, causal: bool) -> tuple[dict[str, Any], dict[str, int], float]:
    """Random operands; out and lse come from the forward kernel. Also the extents and the FLOP of one backward."""
    b, n = 16384 // s, 2048 // plan.depth
    keys = jax.random.split(jax.random.key(0), 4)
    depths = (plan.depth, plan.depth, plan.value_depth, plan.value_depth)
    q, k, v, dout = (jax.random.normal(key, (b, s, n, d), jnp.bfloat16) for key, d in zip(keys, depths, strict=True))
    lengths = jnp.full((b,), s, jnp.int32)
    right = 0 if causal else UNBOUNDED
    ints, floats = call.value_operands((UNBOUNDED, right), lengths, lengths, 0, plan.depth**-0.5)
    shapes = {"B": b, "T": s, "S": s, "N": n, "K": n}
    forward = kernels.select(
        Problem(AttentionSpec(band=causal), b, s, s, n, n, plan.depth, plan.value_depth, "bfloat16"), "sm_90a"
    )
    given = {"q": q, "k": k, "v": v, "ints": ints, "floats": floats}
    made = jax.jit(lambda xs: call.call(forward, call.compiled(forward), xs, shapes))(given)
    given |= {"out": made["out"], "lse": made["lse"], "dout": dout, "dlse": jnp.zeros_like(made["lse"])}
    per_pair = 6 * plan.depth + 4 * plan.value_depth
    return given, shapes, per_pair * b * n * s * s * (0.5 if causal else 1.0)


def runner(plan: Any, shapes: dict[str, int]) -> Any:
    names = [buffer.name for buffer in plan.inputs]
    return jax.jit(lambda xs: call.call(plan, call.compiled(plan), {n: xs[n] for n in names}, shapes))


def seconds(run: Any, given: dict[str, Any]) -> float:
    for _ in range(2):
        jax.block_until_ready(run(given))
    started = time.perf_counter()
    made = [run(given) for _ in range(CALLS)]
    jax.block_until_ready(made)
    return (time.perf_counter() - started) / CALLS


def difference(x: Any, y: Any) -> float:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return float(jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel()))


def compare(depth: str, s: int, causal: bool, names: list[str]) -> None:
    known = [name for name in names if name != "fa4" or depth in ("d64", "d128")]
    plans = {name: plan_of(DEPTHS[depth], causal, VARIANTS[name]) for name in known}
    given, shapes, flops = operands(plans[names[0]], s, causal)
    runs = {name: runner(plan, shapes) for name, plan in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(3):
        for name, run in runs.items():
            times[name].append(seconds(run, given))
    first = runs[names[0]](given)
    words = []
    for name, run in runs.items():
        found = run(given)
        apart = max(difference(found[g], first[g]) for g in ("dq", "dk", "dv"))
        rate = flops / sorted(times[name])[1] / 1e12
        words.append(f"{name} {rate:.0f}" + (f" WRONG {apart:.1e}" if not apart < 6e-3 else ""))
        if plans[name].ordered:
            again = run(given)
            same = all(bool((again[g] == found[g]).all()) for g in ("dq", "dk", "dv"))
            words[-1] += " bitwise" if same else " NOT BITWISE"
    print(f"{depth} {'causal' if causal else 'full':6} {s:6}: " + ", ".join(words), flush=True)


def main() -> None:
    chosen = sys.argv[3].split(",") if len(sys.argv) > 3 else ["d128", "d64"]
    names = list(VARIANTS)
    if len(sys.argv) > 4:
        names = [names[0], *(n for n in names[1:] if n in sys.argv[4].split(","))]
    if sys.argv[1] == "fill":
        from jax_fa4.ffi import bundle, store

        forwards = [
            kernels.select(Problem(AttentionSpec(band=c), 1, 1, 1, 1, 1, *DEPTHS[d], "bfloat16"), "sm_90a")
            for d in DEPTHS
            for c in (False, True)
        ]
        bundle.precompile(all_plans(list(DEPTHS), names) + forwards, store.default_store())
        return
    print(jax.devices(), "TFLOP/s, medians of three")
    for depth in chosen:
        for s in (int(x) for x in sys.argv[2].split(",")):
            for causal in (False, True):
                compare(depth, s, causal, names)


if __name__ == "__main__":
    main()
