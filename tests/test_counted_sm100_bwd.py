"""Clocks of a 128 x 128 tile of the Blackwell backward, counted in the emulator, are those of the counting rules."""

import importlib.util

import pytest
from count import cycles
from emulated import ptx_of
from emulator import run
from launch import launches, to_emulator
from problems import Case, inputs
from test_compile_bwd import operands
from test_emulated_sm100_bwd import empty_outputs, plan_of

from jax_fa4.kernels.sm100.bwd.plan import bind

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def counted(depth, queries):
    """{role: {counter: amount}} of the main kernel with one key tile and `queries` queries."""
    case = Case("count", b=1, t=queries, s=128, n=1, k=1, d=depth)
    plan = plan_of(case)
    given = operands(plan, case, inputs(case, plan.dtype))
    shapes = {"B": 1, "T": queries, "S": 128, "N": 1, "K": 1}
    memory = {b.name: given[b.name] for b in plan.inputs} | empty_outputs(plan, shapes)
    pre, main, _ = launches(plan, bind, shapes, ptx_of(plan))
    memory |= run(pre.ptx, to_emulator(pre), dict(memory)).check().outputs
    return run(main.ptx, to_emulator(main, plan.roles), memory).check().counters


def per_tile(depth):
    """Of the steps between two and four: prologue, epilogue and what is done once cancel."""
    few, many = counted(depth, 256), counted(depth, 512)
    tables = ((getattr(few, name), getattr(many, name)) for name in ("instructions", "amounts"))
    out = {}
    for less, more in tables:
        for role, counts in more.items():
            out.setdefault(role, {}).update({n: (x - less[role].get(n, 0)) / 2 for n, x in counts.items()})
    return cycles(out)


@pytest.mark.parametrize(
    ("depth", "tensor", "shared", "fills"), [(64, 1280, 1920, 256 + 8), (128, 2560, 3328, 512 + 8)]
)
def test_a_tile_takes_the_clocks_of_the_rules(depth, tensor, shared, fills):
    """shared: operands, dS, dQ in and out. On top come TMA fills with 1 KiB of statistics, and broadcast reads."""
    found = per_tile(depth)
    assert found["tensor"] == tensor and found["exp"] == 1024
    assert found["mma.read"] + found["store.shared"] + found["bulk.read"] == shared, found
    assert found["tma.write"] + found["bulk.write"] == fills, found
    # 64 + 64 statistics a thread, 16 bytes a read, the same for all lanes: one wavefront. The counter counts four.
    assert found["load.shared"] / 4 == 256, found
