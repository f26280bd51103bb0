"""Clocks of the Hopper kernels, counted in the emulator, are those of the counting rules, scaled to 128 x 128 scores.

Of a tile of M queries by N keys: tensor 2 M N K / 4096 a product; exp a sixteenth of the exponentials; shared memory
bytes / 128, where a wgmma of 64 rows and n columns reads (64 if A is in shared memory, else 0) + n rows of 16 numbers,
and everything else that passes through is written once and read once.
"""

import importlib.util

import numpy as np
import pytest
from count import cycles, execute
from emulator import Uninitialised, run
from launch import launches, to_emulator
from problems import Case, inputs
from test_compile_bwd import built, operands

from jax_fa4.kernels.sm90.bwd import plan as backward_plan
from jax_fa4.kernels.sm90.fwd.plan import Plan, bind, tiles_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")
SCORES = 128 * 128


def change(few, many, scores):
    """Cycles by cause for 128 x 128 of the scores that the second run has more: what is done once cancels."""
    found = {}
    for table in ("instructions", "amounts"):
        for role, counts in getattr(many, table).items():
            less = getattr(few, table)[role]
            found.setdefault(role, {}).update({n: (x - less.get(n, 0)) * SCORES / scores for n, x in counts.items()})
    return cycles(found)


# (depth of Q and K, of V): tensor, shared memory that the products read, as the design counts them
FORWARD = {(64, 64): (1024, 640), (128, 128): (2048, 1280), (192, 128): (2560, 1664), (256, 256): (4096, 2867)}


@pytest.mark.prove
@pytest.mark.parametrize("depths", FORWARD)
def test_a_forward_tile_takes_the_clocks_of_the_rules(depths):
    plan = Plan("bfloat16", *depths, **tiles_for(*depths))
    made = built(plan).ptx
    few, many = (execute(plan, bind, made, plan.rows, n * plan.keys).counters for n in (2, 4))
    found = change(few, many, plan.rows * 2 * plan.keys)
    tensor, reads = FORWARD[depths]
    assert found["tensor"] == tensor
    assert found["mma.read"] == pytest.approx(4 * depths[0] * (1 + 64 / plan.keys) + 4 * depths[1])
    assert found["mma.read"] == pytest.approx(reads, rel=0.03)
    # Above the design's 1024: how much a row's older sums shrink is found by each of the four lanes that share it.
    assert found["exp"] == pytest.approx(1024 + 4 * 128 / 16 * 128 / plan.keys)
    assert found["tma.write"] == pytest.approx(2 * sum(depths) * 128 / plan.rows)  # K and V, once for all rows
    assert found["store.shared"] == found["bulk.read"] == 0, "weights stay in registers"


def counted(plan, queries):
    """Counters of the main kernel of a backward with one key tile."""
    case = Case("count", b=1, t=queries, s=plan.keys, n=1, k=1, d=plan.depth, v=plan.value_depth)
    shapes = {"B": 1, "T": queries, "S": plan.keys, "N": 1, "K": 1}
    memory = operands(plan, case, inputs(case, plan.dtype))
    memory = {b.name: memory[b.name] for b in plan.inputs}
    kinds = {"bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.float32), "int32": np.dtype(np.int32)}
    e = plan.extents(shapes)
    memory |= {b.name: Uninitialised(b.sized(e), kinds[b.dtype]) for b in plan.outputs}
    for launch in launches(plan, backward_plan.bind, shapes, built(plan).ptx):
        report = run(launch.ptx, to_emulator(launch), dict(memory)).check()
        if "backward" in launch.entry:
            return report.counters
        memory |= report.outputs
    raise AssertionError("the call has no main kernel")


def rule(plan):
    """(tensor, exp, reads of the products, dS and P through shared memory, dQ through it) of 128 x 128 scores."""
    m, n, d, v, groups = plan.rows, plan.keys, plan.inner, plan.inner_value, plan.groups
    scale = SCORES / (m * n)
    tensor = 2 * SCORES * (3 * d + 2 * v) / 4096

    def product(rows_of_a, columns, k, from_registers=False):
        """Bytes that one warpgroup's product of 64 or more rows reads."""
        return 2 * k * ((0 if from_registers else rows_of_a) + columns * (rows_of_a // 64))

    if plan.apart:  # one warpgroup has S and dV, the other dP and dK, each pieces of dQ's depth; P goes over in float32
        groups = 1
        one = product(64, m, d) + product(64, m, v) + product(64, v, m, True) + product(64, d, m, True)
        one += 2 * plan.pieces * product(64, d // (2 * plan.pieces), n)
        squares = 3
    else:  # 64 keys a warpgroup; P and dS are operands in registers, dQ is shared by depth or by queries
        one = product(64, m, d) + product(64, m, v) + product(64, v, m, True) + product(64, d, m, True)
        one += product(64, d, n) if plan.rows_shared else product(64, d // groups, n)
        one -= 2 * 64 * 16 * plan.kept  # of V, which stays in registers
        squares = 1
    reads = groups * one * scale / 128
    return tensor, 1024, reads, squares * 2 * m * n * scale / 128, 2 * 4 * m * d * scale / 128


# What the design counts for them, total of shared memory. At (192, 128) it has a tile of 64 x 96 (9813) and at 256 one
# whose warpgroups share each product (15360); with S and dP made by one warpgroup each, and P handed over, it is less.
BACKWARD = {(64, 64): 2560, (128, 128): 5376, (192, 128): 8960, (256, 256): 13056}


@pytest.mark.parametrize(
    "depths, kept",
    [((128, 128), 4)] + [pytest.param(x, 0, marks=pytest.mark.prove) for x in BACKWARD],
)
def test_a_backward_tile_takes_the_clocks_of_the_rules(depths, kept):
    fields = backward_plan.form_for(*depths)
    fields |= {"rows": 128} if depths == (64, 64) else {}
    plan = backward_plan.Plan("bfloat16", *depths, **fields, kept=kept)
    few, many = (counted(plan, n * plan.rows) for n in (2, 4))
    found = change(few, many, 2 * plan.rows * plan.keys)
    tensor, exp, reads, squares, dq = rule(plan)
    assert found["tensor"] == tensor and found["exp"] == exp
    assert found["mma.read"] == pytest.approx(reads)
    assert found["store.shared"] == pytest.approx(squares + dq / 2, rel=0.03)
    assert found["bulk.read"] == pytest.approx(dq / 2)
    total = BACKWARD[depths] - 2 * 2 * 64 * 16 * kept * SCORES / (plan.rows * plan.keys) / 128
    assert found["mma.read"] + found["store.shared"] + found["bulk.read"] == pytest.approx(total, rel=0.03)
