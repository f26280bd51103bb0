"""Counters of the emulator: exact on small kernels, and the published cycle table for our compiled forwards."""

import functools
import importlib.util

import numpy as np
import pytest
from emulator import Pointer, Uninitialised
from emulator.snippets import body, mma_setup, play, wgmma_setup

VALUES = np.random.default_rng(0).integers(-4, 5, (2, 128, 64))
DSL = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def test_mma_cycles_and_operand_bytes():
    params, memory, options = mma_setup(VALUES)
    counters = play(body("mma"), params, memory, **options).counters
    assert counters.total("tensor.cycles") == 4 * 2 * 128 * 64 * 16 / 8192  # 4 k steps of 128 x 64 x 16
    assert counters.total("mma.read") == 4 * (128 + 64) * 16 * 2
    assert counters.total("tma.write") == (128 + 64) * 64 * 2
    assert counters.total("tmem.load") == 128 * 64 * 4
    assert counters.total("store.global") == 128 * 64 * 4
    assert counters.total("tcgen05.mma") == 4


def test_wgmma_cycles_and_operand_bytes():
    params, memory, options = wgmma_setup(VALUES)
    counters = play(body("wgmma"), params, memory, **options).counters
    assert counters.total("tensor.cycles") == 4 * 2 * 64 * 64 * 16 / 4096
    assert counters.total("mma.read") == 4 * (64 + 64) * 16 * 2
    assert counters.total("wgmma.mma_async") == 4 * 4  # k steps times warps


def test_instructions_by_role_and_mufu_elements():
    text = """
  ld.param.b64 %d0, [p0];
  mov.b32 %r5, 0;
  cvt.rn.f32.u32 %r6, %r1;
AGAIN:
  ex2.approx.ftz.f32 %r6, %r6;
  add.s32 %r5, %r5, 1;
  setp.lt.u32 %p1, %r5, 3;
  @%p1 bra AGAIN;
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d2, %d0, %d1;
  st.global.b32 [%d2], %r6;
"""
    report = play(text, (Pointer("out"),), {"out": Uninitialised((64,), np.float32)}, block=64)
    counters = report.check().counters
    assert counters.instructions["warp 0"]["mufu.ex2"] == counters.instructions["warp 1"]["mufu.ex2"] == 3
    assert counters.mufu_elements() == 3 * 64 and counters.cycles()["exp"] == 3 * 64 / 16
    assert "warp 1" in counters.table() and "mufu.ex2 3" in counters.table()


def test_copied_bytes_are_counted_by_cause():
    counters = play(body("store"), (Pointer("x"), Pointer("out")), {
        "x": np.zeros(32, np.uint32), "out": Uninitialised((32,), np.uint32)}).counters  # fmt: skip
    assert counters.total("bulk.read") == counters.total("bulk.store") == 128
    assert counters.total("store.shared") == 128 + 4


def test_bytes_that_go_to_another_cta_are_read_here_and_written_there():
    memory = {"out": Uninitialised((2, 32), np.uint32)}
    counters = play(body("push"), (Pointer("out"),), memory, cluster=2).check().counters
    assert counters.total("bulk.read") == counters.total("bulk.write") == 2 * 128


@functools.cache
def tile_cycles(arch, depth):
    from count import cycles, per_tile, plan_of

    from jax_fa4.ffi.compile import build

    plan, bind = plan_of(arch, depth)
    return cycles(per_tile(plan, bind, build(plan, keep_ptx=True).ptx))


# tensor, exp (12.5 % of the exponentials on the FMA pipe), operand reads, copies (K and V shared by two query tiles)
@DSL
@pytest.mark.parametrize("depth,tensor,exp,reads,copies", [(64, 512, 896, 384, 128), (128, 1024, 896, 768, 256)])
def test_blackwell_forward_has_the_published_cycles(depth, tensor, exp, reads, copies):
    got = tile_cycles("sm_100a", depth)
    assert got["tensor"] == tensor and got["mma.read"] == reads and got["tma.write"] == copies
    assert exp <= got["exp"] <= exp + 16  # and one factor a row of each tile


@DSL
def test_hopper_forward_has_the_published_cycles():
    got = tile_cycles("sm_90a", 128)
    assert got["tensor"] == 2048 and got["mma.read"] == 1280
    assert 1024 <= got["exp"] <= 1024 + 64


@DSL
def test_share_of_steps_that_rescale():
    """Creeping by more than tau every step does, by less one step in so many; random scores never do."""
    import count

    from jax_fa4.ffi.compile import build
    from jax_fa4.kernels.sm100.fwd.plan import Plan, bind

    plan = Plan("bfloat16", 64, 64)
    ptx = build(plan, keep_ptx=True).ptx
    shares = {step: count.rescaled(plan, bind, ptx, count.creeping(step), keys=640) for step in (8.5, 3.9)}
    assert shares == {8.5: 1.0, 3.9: 1 / 4}
    assert count.rescaled(plan, bind, ptx, count.spread(1.0), keys=640) == 0
