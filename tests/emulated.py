"""Runs a forward plan's PTX in the emulator on a problem of the table: what every arch's emulator tests share.

Inputs past every length are NaN, results start as poison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from compare import Result
from emulator import Uninitialised, run
from launch import launches, to_emulator
from problems import DTYPES, Case, inputs

from jax_fa4.ffi.buffers import FLOATS, VALUES


@functools.cache
def ptx_of(plan: Any) -> str:
    from jax_fa4.ffi.compile import build

    return build(plan, keep_ptx=True).ptx.rstrip("\0")


def raw(x: np.ndarray, dtype: str) -> np.ndarray:
    """As the emulator takes it: bfloat16 as its bits."""
    x = x.astype(DTYPES[dtype])
    return x.view(np.uint16) if dtype == "bfloat16" else x


def value_operands(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """ints and floats as ffi/buffers.VALUES lays them out."""
    ints = np.zeros(VALUES.example(case.b), np.int32)
    ints[VALUES.left], ints[VALUES.right] = case.sides
    q_len, kv_len = case.lengths
    for b in range(case.b):
        at = VALUES.example(b)
        ints[at + VALUES.q_len], ints[at + VALUES.kv_len] = q_len[b], kv_len[b]
        ints[at + VALUES.offset] = case.offset[b]
    floats = np.zeros(FLOATS, np.float32)
    floats[VALUES.scale], floats[VALUES.soft_cap] = case.scale_value, case.soft_cap or 0
    return ints, floats


def forward(
    plan: Any, bind: Callable, case: Case, seed: int = 0, roles: dict[str, tuple[int, ...]] | None = None, **how: Any
) -> tuple[Any, Result, Any]:
    """(inputs, Result with out and lse, the emulator's report). how: passed on to the emulator's run, and `edit`, a
    change of the PTX, and `fill`, a change of the inputs in place."""
    dtype = plan.dtype
    edit = how.pop("edit", lambda ptx: ptx)
    fill = how.pop("fill", lambda inp: None)
    inp = inputs(case, dtype)
    fill(inp)
    q_len, kv_len = case.lengths
    q, k, v = inp.query.copy(), inp.key.copy(), inp.value.copy()
    for b in range(case.b):
        q[b, q_len[b] :] = k[b, kv_len[b] :] = v[b, kv_len[b] :] = np.nan
    ints, floats = value_operands(case)
    given = {"q": raw(q, dtype), "k": raw(k, dtype), "v": raw(v, dtype), "ints": ints, "floats": floats}
    given |= {"q_segments": inp.q_segments, "kv_segments": inp.kv_segments}
    given["sinks"] = None if inp.sinks is None else inp.sinks.astype(np.float32)
    memory = {b.name: given[b.name] for b in plan.inputs}
    shapes = {"B": case.b, "T": case.t, "S": case.s, "N": case.n, "K": case.k}
    e = plan.extents(shapes)
    for b in plan.outputs:
        kind = raw(np.zeros(0), dtype).dtype if b.name == "out" else np.dtype(np.float32)
        memory[b.name] = Uninitialised(b.sized(e), kind)
    reports = []
    for launch in launches(plan, bind, shapes, edit(ptx_of(plan))):
        own = roles if not reports else None
        reports.append(run(launch.ptx, to_emulator(launch, own), memory, seed=seed, **how))
        memory |= {b.name: reports[-1].outputs[b.name] for b in plan.outputs if b.role == "scratch"}
    report = reports[-1]
    for earlier in reports[:-1]:
        earlier.check()
    got = report.outputs["out"]
    got = got.view(DTYPES[dtype]) if dtype == "bfloat16" else got
    none = [None] * (len(Result._fields) - 2)
    return inp, Result(got.astype(np.float64), report.outputs["lse"].astype(np.float64), *none), report
