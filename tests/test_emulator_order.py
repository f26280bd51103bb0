"""The race detector: accesses that nothing orders are found on the quick schedule, in which nothing went wrong."""

import numpy as np
import pytest
from emulator import Launch, Pointer, Uninitialised, run
from emulator.snippets import body, module, play, wgmma_setup

OUT = (Pointer("out"),)
# Two warps: the first writes a word for each lane, the second reads it, and the first writes it again.
HANDED = """
  shl.b32 %r2, %r1, 2;
  and.b32 %r2, %r2, 127;
  add.s32 %r3, %r0, %r2;
  setp.ne.b32 %p15, %r1, 0;
  @%p15 bra SET;
  mbarrier.init.shared.b64 [%r0+512], 32;
  mbarrier.init.shared.b64 [%r0+520], 32;
SET:
  bar.sync 0;
  setp.ge.u32 %p2, %r1, 32;
  @%p2 bra SECOND;
  st.shared.b32 [%r3], %r1;
  mbarrier.arrive.shared.b64 _, [%r0+512];
EMPTY:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r0+520], 0;
  @!%p1 bra EMPTY;
  st.shared.b32 [%r3], 7;
  bra DONE;
SECOND:
FULL:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r0+512], 0;
  @!%p1 bra FULL;
  ld.shared.b32 %r4, [%r3];
  mbarrier.arrive.shared.b64 _, [%r0+520];
  ld.param.b64 %d0, [p0];
  cvt.u64.u32 %d1, %r2;
  add.s64 %d2, %d0, %d1;
  st.global.b32 [%d2], %r4;
DONE:
"""
NO_EMPTY = "EMPTY:\n  mbarrier.try_wait.parity.shared.b64 %p1, [%r0+520], 0;\n  @!%p1 bra EMPTY;\n"
NO_FULL = "FULL:\n  mbarrier.try_wait.parity.shared.b64 %p1, [%r0+512], 0;\n  @!%p1 bra FULL;\n"
TWICE = "  mbarrier.arrive.shared.b64 _, [%r0+520];\n"
READ = "  ld.shared.b32 %r4, [%r3];\n"
# Two CTAs hand a word of global memory over by a flag.
FLAG = """
  ld.param.b64 %d0, [p0];
  mov.u32 %r2, %ctaid.x;
  setp.ne.b32 %p1, %r2, 0;
  @%p1 bra READER;
  st.global.b32 [%d0+64], 7;
  red.release.gpu.global.add.u32 [%d0], 1;
  bra DONE;
READER:
  nanosleep.u32 20;
  ld.acquire.gpu.global.b32 %r3, [%d0];
  setp.eq.b32 %p2, %r3, 0;
  @%p2 bra READER;
  ld.global.b32 %r4, [%d0+64];
  st.global.b32 [%d0+128], %r4;
DONE:
"""
FENCED = FLAG.replace("  red.release.gpu", "  fence.acq_rel.gpu;\n  red.relaxed.gpu").replace(
    "  ld.global.b32 %r4", "  fence.acq_rel.gpu;\n  ld.global.b32 %r4"
).replace("ld.acquire", "ld.relaxed")  # fmt: skip


def handed(text, **how):
    return play(text, OUT, {"out": Uninitialised((32,), np.uint32)}, block=64, **how)


def flagged(text, **how):
    launch = Launch(OUT, grid=(2, 1, 1), block=(32, 1, 1), shared_bytes=1024)
    return run(module(text, OUT), launch, {"out": np.zeros(1024, np.uint32)}, **how)


BREAKS = {
    "a full barrier not waited for": (HANDED, NO_FULL, "", " of shared memory"),
    "an empty barrier not waited for": (HANDED, NO_EMPTY, "", " of shared memory"),
    "a wait on the parity that passes at once": (HANDED, NO_FULL, NO_FULL.replace("], 0", "], 1"), " of shared memory"),
    "mbarriers used before anyone has waited for their making": (HANDED, "  bar.sync 0;\n", "", "initialisation"),
    "an arrival before the access": (HANDED, READ + TWICE, TWICE + READ, " of shared memory"),
    "a flag that releases nothing": (FLAG, "red.release.gpu", "red.relaxed.gpu", "read of buffer out"),
    "a flag that acquires nothing": (FLAG, "ld.acquire.gpu", "ld.relaxed.gpu", "read of buffer out"),
    "no fence before a relaxed flag": (FENCED, "  fence.acq_rel.gpu;\n  red", "  red", "read of buffer out"),
    "no fence after a relaxed flag": (FENCED, "  fence.acq_rel.gpu;\n  ld", "  ld", "read of buffer out"),
}  # fmt: skip


PLACE = "  shl.b32 %r2, %r1, 2;\n  add.s32 %r3, %r0, %r2;\n  xor.b32 %r4, %r3, 128;\n"
LAST = "  ld.param.b64 %d0, [p0];\n  cvt.u64.u32 %d1, %r2;\n  add.s64 %d2, %d0, %d1;\n  st.global.b32 [%d2], %r5;\n"
MEET = "  bar.sync 1, 64;\n"
SWAP = PLACE + "  st.shared.b32 [%r3], %r1;\n" + MEET + "  ld.shared.b32 %r5, [%r4];\n" + LAST
# Halves of a word belong to different warps: no conflict.
HALVES = """
  shr.u32 %r2, %r1, 5;
  shl.b32 %r3, %r2, SHIFT;
  add.s32 %r4, %r0, %r3;
  cvt.u16.u32 %h1, %r2;
  and.b32 %r6, %r1, 31;
  setp.ne.b32 %p1, %r6, 0;
  @%p1 bra DONE;
  st.shared.b16 [%r4], %h1;
DONE:
"""


def test_named_barriers_order():
    memory = {"out": Uninitialised((64,), np.uint32)}
    for seed in (0, 1, 2):
        report = play(SWAP, OUT, memory, block=64, seed=seed).check()
        assert report.outputs["out"].tolist() == [x ^ 32 for x in range(64)]
    assert "race" in {f.kind for f in play(SWAP.replace(MEET, ""), OUT, memory, block=64).errors}


def test_parts_of_a_word_are_not_the_same_place():
    assert not play(HALVES.replace("SHIFT", "1"), block=64).findings
    whole = HALVES.replace("SHIFT", "32").replace("st.shared.b16 [%r4], %h1", "st.shared.b32 [%r4], %r2")
    assert [f.kind for f in play(whole, block=64).errors] == ["race"]


def test_warps_of_one_wgmma_do_not_wait_for_one_another():
    """Only the first warp waits for the operands."""
    params, memory, how = wgmma_setup(np.random.default_rng(0).integers(-4, 5, (2, 128, 64)))
    text = body("wgmma")
    (wait,) = [line for line in text.split("\n") if "try_wait" in line]
    at = text.index(wait)
    end = text.index("\n", text.index("bra", at)) + 1
    first = text.rindex("\n", 0, text.rindex(":", 0, at)) + 1
    lines = text[first:end]
    alone = "  setp.ge.u32 %p14, %r1, 32;\n  @%p14 bra GO;\n" + lines + "GO:\n"
    assert "race" in {f.kind for f in play(text.replace(lines, alone), params, memory, **how).errors}
    assert not play(text, params, memory, **how).findings


@pytest.mark.parametrize("name", BREAKS)
def test_a_missing_order_is_found_where_nothing_went_wrong(name):
    text, old, new, message = BREAKS[name]
    assert text.count(old) == 1
    execute = handed if text is HANDED else flagged
    for seed in (0, 2, 3):
        right = execute(text, seed=seed)
        assert right.deadlock is None and not right.findings, "\n".join(map(str, right.findings))
    found = execute(text.replace(old, new))
    assert any(f.kind == "race" and message in f.message for f in found.errors), "\n".join(map(str, found.findings))
    assert not [f for f in execute(text.replace(old, new), order=False).findings if f.kind == "race"]
