"""What runs under compute-sanitizer on a GPU: one small call, forward and backward, of each form of kernel.

Every lane frees the stages that it reads (`each_lane`), as racecheck follows arrivals thread by thread and calls an
arrival of one lane for its warp, after a warp barrier too, a write after read. The kernels are else those of users.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4
from jax_fa4 import kernels

# depth, value depth, heads, key heads, queries, keys, arguments
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "D64": ((64, 64, 2, 2, 200, 200), {}),
    "D64 causal ordered": ((64, 64, 2, 1, 300, 300), {"is_causal": True, "deterministic": True}),
    "D128 causal, shared keys": ((128, 128, 4, 2, 300, 300), {"is_causal": True}),
    "D128 full ordered": ((128, 128, 2, 2, 300, 200), {"deterministic": True}),
    "D128 window, soft cap": ((128, 128, 2, 2, 200, 300), {"local_window_size": (70, 20), "logits_soft_cap": 5.0}),
    "D128 segments": ((128, 128, 2, 2, 300, 300), {"segments": True}),
    "D96": ((96, 96, 2, 2, 200, 200), {"is_causal": True}),
    "(192, 128) ordered": ((192, 128, 2, 2, 200, 200), {"is_causal": True, "deterministic": True}),
    "D256": ((256, 256, 2, 2, 200, 200), {}),
    "D256 causal ordered": ((256, 256, 2, 1, 200, 200), {"is_causal": True, "deterministic": True}),
    "decode": ((128, 128, 8, 2, 1, 1000), {}),
}
# Not those whose warpgroups meet at one barrier from two places in the code, which synccheck calls divergence.
SHARED_CODE = [name for name, ((d, v, *_), _) in CASES.items() if d + v <= 256]


def followed(select: Any) -> Any:
    def chosen(*arguments: Any, **named: Any) -> Any:
        plan = select(*arguments, **named)
        return dataclasses.replace(plan, each_lane=True) if (plan.arch, plan.direction) == ("sm_90a", "bwd") else plan

    return chosen


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(jnp.bfloat16) for shape in shapes]


def run(name: str, implementation: str) -> list[np.ndarray]:
    (d, v, n, k, t, s), kinds = CASES[name]
    kinds = dict(kinds, implementation=implementation)
    if kinds.pop("segments", False):
        kinds["query_segment_ids"] = kinds["key_value_segment_ids"] = jnp.arange(t)[None] // 130 + jnp.zeros(
            (2, 1), int
        )
    q, key, value, dout = arrays(len(name), (2, t, n, d), (2, s, k, d), (2, s, k, v), (2, t, n, v))

    @jax.jit
    def gradients(*x: Any) -> Any:
        out, back = jax.vjp(lambda *y: jax_fa4.attention(*y, **kinds), *x)
        return out, *back(dout)

    return [np.asarray(x, np.float32) for x in gradients(q, key, value)]


def build(names: Iterable[str]) -> None:
    """Fills the store with what these calls launch, on a machine without a GPU."""
    for (d, v, n, k, t, s), kinds in (CASES[name] for name in names):
        kinds = dict(kinds, implementation="fa4")
        if kinds.pop("segments", False):
            kinds["query_segment_ids"] = kinds["key_value_segment_ids"] = jnp.zeros((2, t), int)
        x = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, t, n, d), (2, s, k, d), (2, s, k, v))]
        step = jax.grad(
            functools.partial(lambda *x, kinds: jax_fa4.attention(*x, **kinds).sum(), kinds=kinds), (0, 1, 2)
        )
        jax.jit(step).trace(*x).lower(lowering_platforms=("cuda",))


if __name__ == "__main__":
    kernels.select = followed(kernels.select)
    if sys.argv[1:2] == ["build"]:
        jax_fa4.config.update(arch="sm_90a")
        sys.exit(build(sys.argv[2:] or CASES))
    for name in sys.argv[1:] or CASES:
        got = run(name, "fa4")
        with jax.default_device(jax.devices("cpu")[0]):  # not under the tool
            want = run(name, "xla")
        worst = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want, strict=True))
        print(f"CASE {name}: {worst:.1e}", flush=True)
        assert worst < 2e-2, (name, worst)
    print("WHOLE")
