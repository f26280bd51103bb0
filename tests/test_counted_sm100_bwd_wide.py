"""Clocks of a 128 x 128 tile of the Blackwell backward of sweeps, counted in the emulator, are the rules'."""

import importlib.util

import pytest
from count_bwd import chosen, per_sweep, sorted_out, statistics

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed"),
]


def test_products_take_longest_in_every_sweep():
    """8 products of 1024 clocks. Of shared memory a product takes 512 for its own rows and 256 for its half of the
    other side's, 256 alone where A is in tensor memory; fills are 32 KiB an operand of the other side."""
    plan, bind, ctas = chosen(256, 256, True)
    dv, dk, dq = per_sweep(plan, bind, ctas)
    for found, products in ((dv, 2), (dk, 3), (dq, 3)):
        squared = products - 1
        assert found["tensor"] == 1024 * products and found["exp"] == 1024
        assert found["mma.read"] == 768 * squared + 256, found
        assert found["tma.write"] == 256 * products and found["store.shared"] == found["bulk.read"] == 0, found
    assert [one["bulk.write"] for one in (dv, dk, dq)] == [8, 8, 0], "1 KiB of statistics; a query keeps its own"
    assert [one["load.shared"] / 4 for one in (dv, dk, dq)] == [128, 256, 0], "broadcast reads"
    found = sorted_out({name: dv[name] + dk[name] + dq[name] for name in dv}, statistics(plan))
    assert found.pop("tensor") == 8192 and found.pop("exp") == 3072
    assert sum(found.values()) == 4608 + 2048 + 400 == 7056
