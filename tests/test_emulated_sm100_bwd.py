"""The Blackwell backward runs in the emulator, from its PTX and what bind says. It has never run on silicon.

The three kernels of a call run one after the other. Inputs past every length are NaN, results and scratch start as
poison, schedules are adversarial where a seed is given.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from compare import Result, check
from emulated import ptx_of, raw
from emulator import Uninitialised, run
from launch import launches, to_emulator
from problems import BY_NAME, DTYPES, Case, inputs
from test_compile_bwd import operands

from jax_fa4.kernels.sm100.bwd.plan import bind, choose
from jax_fa4.spec import Problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def plan_of(case, dtype="bfloat16", **fields):
    spec = replace(case.spec, deterministic=fields.pop("deterministic", False))
    problem = Problem(spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype, "bwd")
    return replace(choose(problem), **fields)


def backward(plan, case, seed=0, edit=lambda ptx: ptx, **how):
    """(inputs, Result with dq, dk, dv, buffers after the call); every launch must end without a finding."""
    inp = inputs(case, plan.dtype)
    given = operands(plan, case, inp)
    memory = {b.name: given[b.name] for b in plan.inputs}
    shapes = {"B": case.b, "T": case.t, "S": case.s, "N": case.n, "K": case.k}
    e = plan.extents(shapes)
    half = raw(np.zeros(0), plan.dtype).dtype
    kinds = {plan.dtype: half, "float32": np.dtype(np.float32), "int32": np.dtype(np.int32)}
    memory |= {b.name: Uninitialised(b.sized(e), kinds[b.dtype]) for b in plan.outputs}
    for launch in launches(plan, bind, shapes, edit(ptx_of(plan))):
        report = run(launch.ptx, to_emulator(launch), memory, seed=seed, **how).check()
        memory |= {b.name: report.outputs[b.name] for b in plan.outputs}
    got = {name: memory[name].view(DTYPES[plan.dtype]).astype(np.float64) for name in ("dq", "dk", "dv")}
    return inp, Result(*[got.get(name) for name in Result._fields]), memory


def passes(case, dtype="bfloat16", seed=0, resident=2, **fields):
    plan = plan_of(case, dtype, **fields)
    inp, got, memory = backward(plan, case, seed, resident=resident)
    check(got, case, inp, dtype)
    for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
        assert (got.dq[b, q_len:] == 0).all() and (got.dk[b, kv_len:] == 0).all() and (got.dv[b, kv_len:] == 0).all()
    return plan, memory


# Few plans (each is a compile), many problems.
SAME_PLANS = [
    "len_1x1", "len_127x129", "len_1x300", "heads_7_1", "causal_129x127", "bottom_200x1", "window_17_5", "window_0_0",
    "window_left", "window_right", "window_far", "lengths", "lengths_zero", "lengths_bottom", "lengths_window",
    "scale_large",
]  # fmt: skip
OTHERS = [
    Case("d128", b=1, t=200, s=256, n=2, k=1, d=128, q_lens=(170,), kv_lens=(250,)),
    Case("d72_40", b=1, t=130, s=150, n=1, k=1, d=72, v=40, q_lens=(125,)),
    Case("d96_128", b=1, t=300, s=130, n=1, k=1, d=96, v=128),
]
MANY = Case("many", b=2, t=256, s=200, n=2, k=1, d=128, window=(150, 60), bottom_right=True, q_lens=(256, 140),
            kv_lens=(200, 131), scale=0.2)  # fmt: skip


@pytest.mark.parametrize("name", SAME_PLANS)
def test_backward_is_the_derivative(name):
    passes(BY_NAME[name])


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_backward_at_other_depths(case):
    passes(case)


@pytest.mark.parametrize("seed", range(3))
def test_everything_together_in_any_schedule(seed):
    passes(MANY, "float16", seed)
