"""Asynchronous copies, stores, reductions, clusters and tensor-memory operands of the emulator, by equality."""

import gc
import re

import numpy as np
import pytest
from emulator import Pointer, Tma, Uninitialised
from emulator.arith import bf16_to_f32, f32_to_bf16
from emulator.snippets import body, kinds, pair_setup, play

VALUES = np.random.default_rng(1).integers(-4, 5, (2, 256, 64)).astype(np.float32)


def idesc(m, n):
    return 1 << 4 | 1 << 7 | 1 << 10 | (n >> 3) << 17 | (m >> 4) << 24


@pytest.mark.parametrize("m", [256, 128])
@pytest.mark.parametrize("seed", range(4))
def test_a_pair_of_ctas_multiplies(m, seed):
    rows, n = m // 2, 64
    columns = n if m == 256 else n // 2
    a, b = VALUES[0, :m], VALUES[1, :n]
    params, memory, options = pair_setup(VALUES, m)
    report = play(body("mma2"), params, memory, seed=seed, **options).check()
    want = (a @ b.T).reshape(2, rows, n)
    if m == 128:  # 64 rows a CTA; the upper half of the columns lies in lanes 64 to 127
        want = np.concatenate([want[:, :, :columns], want[:, :, columns:]], axis=1)
    assert np.array_equal(report.outputs["out"], want)
    assert report.counters.total("tensor.cycles") == 4 * 2 * m * n * 16 / 8192


def test_two_allocations_of_a_pair_must_agree():
    params, memory, options = pair_setup(VALUES)
    text = body("mma2").replace(
        "cta_group::2.sync.aligned.shared::cta.b32 [%r10+16], 64",
        "cta_group::2.sync.aligned.shared::cta.b32 [%r10+16], %r51",
    )
    text = text.replace("  @%p14 bra ALLOCATED;\n", "  shl.b32 %r51, 64, %r3;\n  @%p14 bra ALLOCATED;\n")
    assert "tmem_alloc" in kinds(play(text, params, memory, **options))


def test_what_arrives_at_a_cta_that_has_left_is_found():
    """CTA 1 leaves as soon as both are there: what CTA 0 has issued is under way, or not yet issued."""
    params, memory, options = pair_setup(VALUES)
    meeting = "  barrier.cluster.wait.aligned;\n"
    leaves = meeting + "  setp.ne.b32 %p12, %r3, 0;\n  @%p12 bra FREED;\n"
    text = body("mma2").replace(meeting, leaves, 1)
    told = set()
    for seed in range(24):
        told |= {f.message.split(" CTA")[0] for f in play(text, params, memory, seed=seed, **options).errors}
    assert {"a commit arrives at", "an MMA of the pair ends when"} <= told, told


@pytest.mark.parametrize("gone", [False, True], ids=["ends", "deadlock"])
def test_a_launch_leaves_nothing_to_the_garbage_collector(gone):
    """Not one of a launch's large parts outlives it, also where it ends in a deadlock with work in flight."""
    from emulator import machine, memory, order, tmem
    from emulator import shadow as shadows

    params, given, options = pair_setup(VALUES)
    text = body("mma2")
    if gone:
        text, once = re.sub(r"  tcgen05\.commit\.[^\n]*\n", "", text), text
        assert text != once
    large = {machine.Cta, machine.Unit, machine.RegisterFile, memory.Shared, memory.Global, memory.Space}
    large |= {tmem.TensorMemory, shadows.Shadow, shadows.Plane, order.Order}
    gc.collect()
    before = {id(x) for x in gc.get_objects() if type(x) in large}
    gc.disable()
    try:
        report = play(text, params, given, seed=2, **options)
        left = [type(x).__name__ for x in gc.get_objects() if type(x) in large and id(x) not in before]
    finally:
        gc.enable()
    assert (report.deadlock is not None) == gone
    assert not left, left


FROM_TMEM = body("mma_ts")


@pytest.mark.parametrize("seed", range(3))
def test_operand_a_from_tensor_memory(seed):
    a, b = VALUES[0, :128, :16], VALUES[1, :64]
    maps = (Tma("b", "bfloat16", (64, 64), (128,), (64, 64), "128B"), Pointer("out"), Pointer("a"))
    memory = {"a": f32_to_bf16(a).copy(), "b": f32_to_bf16(b), "out": Uninitialised((128, 64), np.float32)}
    text = FROM_TMEM.replace("IDESC", str(idesc(128, 64)))
    report = play(text, maps, memory, block=128, shared=32768 + 64, seed=seed).check()
    assert np.array_equal(report.outputs["out"], a @ b[:, :16].T)
    swapped = text.replace("[%r18+64], {%r60, %r61,", "[%r18+64], {%r61, %r60,")
    assert not np.array_equal(play(swapped, maps, memory, block=128, shared=32768 + 64).outputs["out"], a @ b[:, :16].T)


OUT = body("copy_out")


@pytest.mark.parametrize("seed", range(3))
def test_tensor_store_unswizzles_and_clips(seed):
    text = OUT.replace("FORM", "").replace("COPY", "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group")
    desc = Tma("x", "float32", (36, 100), (144 + 16,), (32, 32), "128B")
    x = np.zeros((100, 40), np.float32)
    got = play(text, (desc,), {"x": x.view(np.uint32)}, seed=seed).check().outputs["x"]
    want = np.zeros((100, 40), np.uint32)
    for r in range(10):
        for c in range(28):
            chunk, word = divmod(c, 4)
            want[90 + r, 8 + c] = (r << 8) + 4 * (chunk ^ r % 8) + word
    assert np.array_equal(got, want)


@pytest.mark.parametrize("seed", range(3))
def test_tensor_reduction_adds(seed):
    text = OUT.replace("FORM", "cvt.rn.f32.u32 %r7, %r7;")
    text = text.replace("COPY", "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group")
    desc = Tma("x", "float32", (40, 100), (160,), (32, 32), "none")
    x = np.arange(4000, dtype=np.float32).reshape(100, 40)
    got = play(text, (desc,), {"x": x}, seed=seed).check().outputs["x"]
    want = x.copy()
    want[90:, 8:40] += (256 * np.arange(10)[:, None] + np.arange(32)).astype(np.float32)
    assert np.array_equal(got, want)


def test_linear_reduction_adds_in_any_order():
    text = body("store").replace("st.shared.b32 [%r3], %r1;", "cvt.rn.f32.u32 %r9, %r1;\n  st.shared.b32 [%r3], %r9;")
    text = text.replace(
        "cp.async.bulk.global.shared::cta.bulk_group", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    )
    memory = {"x": np.zeros(32, np.uint32), "out": np.arange(32, dtype=np.float32)}
    got = play(text, (Pointer("x"), Pointer("out")), memory, seed=2).check().outputs["out"]
    assert np.array_equal(got, 2 * np.arange(32, dtype=np.float32))


MULTICAST = body("multicast")

FORM = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
MULTICAST = MULTICAST.replace("COPY", FORM)


@pytest.mark.parametrize("seed", range(3))
def test_multicast_fills_both_ctas(seed):
    x = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32)
    params = (Tma("x", "float32", (32, 16), (128,), (32, 16)), Pointer("out"))
    got = (
        play(MULTICAST, params, {"x": x, "out": Uninitialised((2, 32), np.uint32)}, cluster=2, seed=seed)
        .check()
        .outputs["out"]
    )
    assert np.array_equal(got, np.stack([x[8], x[8]]))
    alone = MULTICAST.replace("%h1, 3", "%h1, 1")
    assert play(alone, params, {"x": x, "out": Uninitialised((2, 32), np.uint32)}, cluster=2, seed=seed).deadlock


PUSH = body("push")


@pytest.mark.parametrize("seed", range(4))
def test_ctas_exchange_shared_memory_in_bulk(seed):
    memory = {"out": Uninitialised((2, 32), np.uint32)}
    got = play(PUSH, (Pointer("out"),), memory, cluster=2, seed=seed).check().outputs["out"]
    assert np.array_equal(got, np.stack([256 + np.arange(32), np.arange(32)]))


MATRIX = body("matrix")


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrix_store(trans):
    got = play(MATRIX.replace("TRANS", trans), (Pointer("out"),), {"out": Uninitialised((4, 8, 8), np.uint16)}).check()
    # lane 4i + j holds elements 2j, 2j + 1 of row i of each tile
    tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    want = tiles.transpose(0, 2, 1) if trans else tiles
    assert np.array_equal(got.outputs["out"], want)


def test_reductions_of_vectors_and_bfloat16():
    code = """
  ld.param.b64 %d0, [p0];
  mov.b32 %r5, 0f3F800000;
  mov.b32 %r6, 0f40000000;
  red.relaxed.gpu.global.add.v4.f32 [%d0], {%r5, %r6, %r5, %r6};
"""
    got = play(code, (Pointer("x"),), {"x": np.zeros(4, np.float32)}, seed=1).check().outputs["x"]
    assert got.tolist() == [32, 64, 32, 64]
    assert bf16_to_f32(f32_to_bf16(np.float32([1.5])))[0] == 1.5


CP_ASYNC = body("cp_async")
BY_GROUP = "cp.async.commit_group;\n  cp.async.wait_group 0;"
BY_BARRIER = """cp.async.mbarrier.arrive.noinc.shared.b64 [%r0+1024];
SPIN:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r0+1024], 0;
  @!%p1 bra SPIN;"""


@pytest.mark.parametrize("how", [BY_GROUP, BY_BARRIER])
@pytest.mark.parametrize("seed", range(3))
def test_threads_copy_asynchronously(how, seed):
    x = np.arange(1, 129, dtype=np.uint32).reshape(32, 4)
    memory = {"x": x, "out": Uninitialised((32, 4), np.uint32)}
    params = (Pointer("x"), Pointer("out"))
    got = play(CP_ASYNC.replace("DONE", how), params, memory, seed=seed).check().outputs["out"]
    kept = np.arange(4)[None, :] < (np.arange(32) % 4)[:, None]  # the source size cuts, the rest is zero
    assert np.array_equal(got, np.where(kept, x, 0))
    assert "race" in kinds(play(CP_ASYNC.replace("DONE", ""), params, memory))
