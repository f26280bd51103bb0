"""Clocks of a 128 x 128 tile of the Blackwell backward, counted in the emulator, are those of the counting rules."""

import importlib.util

import pytest
from count_bwd import PARTS, chosen, per_tile, sorted_out

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


@pytest.mark.parametrize(
    ("depth", "value_depth", "tensor", "shared", "fills"),
    [(64, 64, 1280, 1920, 256), (128, 128, 2560, 3328, 512), (192, 128, 3328, 4352, 640)],
)
def test_a_tile_takes_the_clocks_of_the_rules(depth, value_depth, tensor, shared, fills):
    """shared: operands, dS, dQ in and out. On top come TMA fills, and 1 KiB of statistics with their broadcast reads:
    16 + 16 a thread, 16 bytes a read."""
    found = sorted_out(per_tile(*chosen(depth, value_depth, False)))
    assert found["tensor"] == tensor and found["exp"] == 1024
    operands = 8 * depth + 6 * value_depth + 256
    assert found["operand reads"] == operands and operands + 256 + 8 * depth == shared
    assert found["dS and dQ stored"] == 256 + 4 * depth and found["dQ and dS read"] == 4 * depth
    assert found["fills"] == fills and found["statistics"] == 8 + 64, found
    assert sum(found[key] for key in PARTS) == shared + fills + 8 + 64
    assert depth != 128 or sum(found[key] for key in PARTS) == 3912 <= 4096
