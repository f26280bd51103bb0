"""The Blackwell backward of CTA pairs runs in the emulator, from its PTX and what bind says. Never run on silicon.

As tests/test_emulated_sm100_bwd.py: three kernels one after the other, NaN past every length, poison, any schedule.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from compare import Result, check
from emulated import ptx_of
from emulator import run
from launch import launches, to_emulator
from problems import DTYPES, Case, inputs
from test_compile_bwd import operands
from test_emulated_sm100_bwd import empty_outputs

from jax_fa4.kernels.sm100.bwd.pair.plan import CAPPED_REGISTERS, PairPlan, bind

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def plan_of(case, dtype="bfloat16", **fields):
    if case.soft_cap:
        fields = {"soft_cap": True, "registers": CAPPED_REGISTERS} | fields
    return PairPlan(dtype, case.d, case.v, band=case.spec.band, segments=case.spec.segments, **fields)


def backward(plan, case, seed=0, edit=lambda ptx: ptx, inp=None, **how):
    """(inputs, Result with dq, dk, dv, buffers after the call); every launch must end without a finding."""
    inp = inp or inputs(case, plan.dtype)
    given = operands(plan, case, inp)
    memory = {b.name: given[b.name] for b in plan.inputs}
    shapes = {"B": case.b, "T": case.t, "S": case.s, "N": case.n, "K": case.k}
    memory |= empty_outputs(plan, shapes)
    for launch in launches(plan, bind, shapes, edit(ptx_of(plan))):
        report = run(launch.ptx, to_emulator(launch), memory, seed=seed, **how).check()
        memory |= {b.name: report.outputs[b.name] for b in plan.outputs}
    got = {name: memory[name].view(DTYPES[plan.dtype]).astype(np.float64) for name in ("dq", "dk", "dv")}
    return inp, Result(*[got.get(name) for name in Result._fields]), memory


def passes(case, dtype="bfloat16", seed=0, resident=4, **fields):
    plan = plan_of(case, dtype, **fields)
    inp, got, memory = backward(plan, case, seed, resident=resident)
    check(got, case, inp, dtype)
    for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
        assert (got.dq[b, q_len:] == 0).all() and (got.dk[b, kv_len:] == 0).all() and (got.dv[b, kv_len:] == 0).all()
    return plan, memory
