"""Clocks and bytes of a 128 x 128 tile of the Blackwell backward by pairs, counted in the emulator, are the rules'."""

import importlib.util

import pytest
from count import cycles
from emulated import ptx_of
from emulator import run
from launch import launches, to_emulator
from problems import Case, inputs
from test_compile_bwd import operands
from test_emulated_sm100_bwd import empty_outputs
from test_emulated_sm100_bwd_pair import plan_of

from jax_fa4.kernels.sm100.bwd.pair.plan import bind

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def counted(depth, queries):
    """{role: {counter: amount}} of the main kernel with one pair tile and `queries` queries."""
    case = Case("count", b=1, t=queries, s=256, n=1, k=1, d=depth, v=128)
    plan = plan_of(case)
    given = operands(plan, case, inputs(case, plan.dtype))
    shapes = {"B": 1, "T": queries, "S": 256, "N": 1, "K": 1}
    memory = {b.name: given[b.name] for b in plan.inputs} | empty_outputs(plan, shapes)
    pre, main, _ = launches(plan, bind, shapes, ptx_of(plan))
    memory |= run(pre.ptx, to_emulator(pre), dict(memory)).check().outputs
    return run(main.ptx, to_emulator(main, plan.roles), memory).check().counters


def per_tile(depth):
    """Of one CTA's tile in the steps between two and four: prologue, epilogue and what is done once cancel."""
    few, many = counted(depth, 256), counted(depth, 512)
    tables = ((getattr(few, name), getattr(many, name)) for name in ("instructions", "amounts"))
    out = {}
    for less, more in tables:
        for role, counts in more.items():
            out.setdefault(role, {}).update({n: (x - less[role].get(n, 0)) / 4 for n, x in counts.items()})
    return out


def test_a_tile_takes_the_clocks_of_the_rules():
    """Operands 1536, dS 256, dQ in and out 512, half a tile of dS sent and received 256: 2560 clocks of shared memory,
    where two CTAs alone take 3328. On top come TMA fills with 1 KiB of statistics, and broadcast reads."""
    table = per_tile(128)
    found = cycles(table)
    assert found["tensor"] == 2560 and found["exp"] == 1024
    assert found["mma.read"] == 1536 and found["store.shared"] == 256 + 256, found
    exchange, dq_out, statistics = 128, 256, 8
    assert found["bulk.read"] == dq_out + exchange and found["bulk.write"] == exchange + statistics, found
    assert found["tma.write"] == 512, found
    shared = sum(found[name] for name in ("mma.read", "store.shared", "bulk.read", "bulk.write")) - statistics
    assert shared == 2560 <= 2688
    # 64 + 64 statistics a thread, 16 bytes a read, the same for all lanes: one wavefront. The counter counts four.
    reads = found["load.shared"] / 4
    assert reads == 256 and shared + 512 + statistics + reads == 3336 <= 3456
    assert table["reduce"]["bulk.reduce"] == 64 * 128 * 4, "of dQ: half of what a CTA alone adds"


def test_a_tile_at_depth_192_in_two_parts():
    """K and V are read once a part: 640 more than the rules' 1920 for products of 128 queries; a CTA alone reads 2560
    and moves twice as much of dQ, 4352 in all. The products take 3328."""
    table = per_tile(192)
    found = cycles(table)
    assert found["tensor"] == 3328 and found["exp"] == 1024
    assert found["mma.read"] == 1920 + 640 and found["store.shared"] == 256 + 384, found
    exchange, dq_out, statistics = 128, 384, 8
    assert found["bulk.read"] == dq_out + exchange and found["bulk.write"] == exchange + statistics, found
    shared = found["mma.read"] + found["store.shared"] + dq_out + 2 * exchange
    assert shared == 3840 and found["tma.write"] == 640
    assert shared + 640 + statistics + found["load.shared"] / 4 == 4744
    assert table["reduce"]["bulk.reduce"] == 64 * 192 * 4
