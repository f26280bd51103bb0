"""The kinds of Blackwell plans, as `jax_fa4.kernels.select` gives them: what must have a verdict."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

from jax_fa4 import kernels
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

ARCH = "sm_100a"
# Tiles of every size but those that mix depths of different tiles, whose code is one of these with other counts.
DEPTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
FLAGS = {
    "fwd": ("band", "segments", "soft_cap", "sinks"),
    "bwd": ("band", "segments", "soft_cap", "deterministic"),
}
# Queries and keys: long, ragged, short, few queries. Each decides for another plan somewhere.
SHAPES = ((4096, 4096), (4196, 4096), (300, 300), (1, 4096))
# Fields of every plan of their class, or of the order of its work: they make no kind of their own.
ORDER = {"skips", "sections", "at_once", "dependent"}


def kind(plan: Any) -> str:
    """Direction, tile, class and what is switched on. A field that a plan gets later makes a new kind by itself."""
    depths = f"D{plan.inner}" + (f",{plan.inner_value}" if plan.inner_value != plan.inner else "")
    words = [f.name for f in fields(plan) if getattr(plan, f.name) is True and f.name not in ORDER]
    if getattr(plan, "workers", 0):
        words.append("persistent")
    form = {"Plan": [], "PairPlan": ["pair"], "WidePlan": ["wide", "pair"]}.get(
        type(plan).__name__, [type(plan).__name__.lower()]
    )
    return " ".join([plan.direction, depths, *form, *words])


def kinds() -> dict[str, Any]:
    """kind -> one plan of it: bfloat16, or float16 where there are sinks, so that both types are seen."""
    found: dict[str, Any] = {}
    for direction, names in FLAGS.items():
        for (d, v), on in itertools.product(DEPTHS, itertools.product((False, True), repeat=len(names))):
            spec = AttentionSpec(**dict(zip(names, on, strict=True)))
            dtype = "float16" if spec.sinks else "bfloat16"
            for t, s in SHAPES:
                try:
                    plan = kernels.select(Problem(spec, 1, t, s, 4, 2, d, v, dtype, direction), ARCH)
                except Unsupported:
                    continue
                found.setdefault(kind(plan), plan)
    return found
