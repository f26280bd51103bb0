"""Micro-kernels of two CTAs, a feature each, in the emulator: exact values under every kind of schedule; planted faults
are told. For Blackwell a product of a pair; for both cards copies into both CTAs and what one sends to the other."""

import numpy as np
import ptx_lint
import pytest
from emulator import SEEDS, Pointer, PtxError, Scalar, Tma, Uninitialised, run
from emulator.arith import f32_to_bf16
from emulator.cases import LOAD
from emulator.snippets import body, kinds, play
from launch import to_emulator
from micro import build
from verifier.mutate import drop, drop_wait, edit

compiled = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "-")
STEPS = 5  # rings of two stages wrap twice


def pair_of():
    from micro import pair

    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (rows, 64 * STEPS)).astype(np.float32) for rows in (pair.M, pair.N))
    return pair.micro(STEPS), {"a": f32_to_bf16(a), "b": f32_to_bf16(b)}, a @ b.T


def share_of():
    from micro import share

    x = np.random.default_rng(2).integers(-9, 10, (STEPS * share.ROWS, share.COLUMNS)).astype(np.float32)
    return share.micro(STEPS), {"x": x}, np.stack([x.reshape(STEPS, share.ROWS, -1).sum(1)] * 2)


def words_of(bulk=False):
    from micro import send

    x = np.random.default_rng(3).integers(-9, 10, (2, STEPS, send.COLUMNS)).astype(np.float32)
    return send.micro(STEPS, bulk), {"x": x}, 2 * x[::-1]


def bulk_of():
    return words_of(True)


MICROS = {"pair": pair_of, "share": share_of, "words": words_of, "bulk": bulk_of}
CALLS = [("pair", "sm_100a"), *((name, arch) for name in ("share", "words", "bulk") for arch in ("sm_90a", "sm_100a"))]


def ran(name, arch="sm_100a", seed=0, edit=lambda text: text):
    """(report, whether its numbers are right)."""
    micro, memory, want = MICROS[name]()
    text = edit(build.ptx(micro, arch))
    memory = memory | {"out": Uninitialised(want.shape, np.float32)}
    report = run(text, to_emulator(build.launched(micro, text)), memory, seed=seed)
    return report, np.array_equal(report.outputs["out"], want)


@compiled
@pytest.mark.parametrize(("name", "arch"), CALLS)
def test_exact_in_any_schedule(name, arch):
    for seed in SEEDS:
        report, right = ran(name, arch, seed)
        report.check()
        assert right, seed
        assert not kinds(report), "advisories too"


# Fault -> (micro-kernel, what is said, the edit). Waits are numbered as in the text.
PAIR_WAIT = r"\{ \.reg \.pred done; again:[^\n]*"
COMMIT = r"mov\.b16 (\s*%rs\d+), 3;(?=\s*tcgen05\.commit)"
NO_MEETING = drop(r"barrier\.cluster\.arrive;\s+barrier\.cluster\.wait;", -1)
FAULTS = {
    "the result announced in one CTA": ("pair", "deadlock", edit(COMMIT, r"mov.b16 \1, 1;")),
    "stages freed in one CTA": ("pair", "deadlock", edit(COMMIT, r"mov.b16 \1, 1;", 1)),
    "half of the pair's bytes expected": ("pair", "race", edit(r"(mov\.b32\s+%r\d+), 49152;", r"\1, 24576;")),
    "bytes on a barrier of one's own": ("pair", "deadlock", edit(r"(and\.b32\s+%r\d+, %r\d+), -16777224", r"\1, -8")),
    "the pair's product as one CTA's": ("pair", "bad_descriptor", edit("(tcgen05.mma.cta_group::)2", r"\g<1>1")),
    "a stage filled before it is free": ("pair", "race", drop_wait(0)),
    "products before their operands": ("pair", "race", drop_wait(2)),
    "the result read before it is there": ("pair", "race", drop_wait(3)),
    "memory of the pair freed early": ("pair", "tmem_unallocated", NO_MEETING),
    "a copy into one CTA": ("share", "deadlock", edit(r"(mov\.b16\s+%rs\d+), 3;", r"\1, 1;")),
    "half of the bytes expected": ("share", "race", edit(r"(mov\.b32\s+%r\d+), 2048;", r"\1, 1024;")),
    "free when one CTA has read": ("share", "race", edit(r"(mov\.b32\s+%r\d+), 2;(?=\s+mbarrier.init)", r"\1, 1;")),
    "a place filled before it is free": ("share", "race", drop(PAIR_WAIT)),
    "read before it came": ("share", "race", drop_wait(0)),
    "the other CTA not told": ("share", "deadlock", edit(r"(mapa\S+ there, %r\d+), 1;", r"\1, 0;")),
    "a CTA leaves while its peer sends": ("words", "remote_exit", NO_MEETING),
    "words read before they came": ("words", "race", drop(PAIR_WAIT, 1)),
    "words over words not read yet": ("words", "race", drop(PAIR_WAIT, 0)),
    "words counted where they come from": (
        "words",
        "mbarrier",
        edit(r"mapa\S+\s+(%r37), (%r\d+), %r\d+;", r"mov.b32 \1, \2;"),
    ),
    "four bytes fewer expected": ("words", "race", edit(r"(mov\.b32\s+%r\d+), 128;", r"\1, 124;")),
    "sent before the threads' stores are fenced": ("bulk", "missing_proxy_fence", drop(r"fence\.proxy\.async[^\n]*")),
    "bytes read before they came": ("bulk", "race", drop(PAIR_WAIT, 1)),
    "a place never free": ("bulk", "deadlock", drop(r"mbarrier\.arrive\.release\.cluster[^\n]*")),
}


@compiled
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_told(name):
    micro, said, change = FAULTS[name]
    told = set()
    for seed in SEEDS:
        report, _ = ran(micro, seed=seed, edit=change)
        told |= {f.kind for f in report.errors} | ({"deadlock"} if report.deadlock is not None else set())
        if said in told:
            return
    raise AssertionError(f"{said} expected, told: {told or 'nothing'}")


@compiled
@pytest.mark.parametrize("name", MICROS)
def test_the_lint_has_nothing_to_say(name):
    assert not ptx_lint.lint(build.ptx(MICROS[name]()[0]))


# Written in PTX, so that they run on a card without the compiler: tests/gpu_micro.py ----------------------------------

WORDS = {"out": Uninitialised((2, 32, 2), np.uint32)}
SENT = np.stack([256 + np.arange(32), np.arange(32)])


@pytest.mark.parametrize("seed", SEEDS)
def test_words_stored_from_afar(seed):
    got = play(body("stasync"), (Pointer("out"),), WORDS, cluster=2, seed=seed).check().outputs["out"]
    assert np.array_equal(got, np.stack([SENT, SENT + 4096], axis=2))


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_expected_from_afar(seed):
    memory = {"out": Uninitialised((2, 32), np.uint32)}
    assert np.array_equal(
        play(body("pass"), (Pointer("out"),), memory, cluster=2, seed=seed).check().outputs["out"], SENT
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_halves_copied_into_both(seed):
    x = np.arange(16 * STEPS * 32, dtype=np.uint32).reshape(STEPS, 1, 16, 32)
    params = (Tma("x", "float32", (32, 16 * STEPS), (128,), (32, 8)), Pointer("out"), Scalar(STEPS))
    memory = {"x": x, "out": Uninitialised((STEPS, 2, 16, 32), np.uint32)}
    text = body("share").replace("COPY", LOAD)
    got = play(text, params, memory, block=64, cluster=2, seed=seed).check().outputs["out"]
    assert np.array_equal(got, np.broadcast_to(x, got.shape))


STORE = "  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r11], {%r7, %r9}, [%r12];\n"
SPIN = body("stasync").split(STORE)[1].split("  ld.shared")[0]
COPY_OUT = """  bar.warp.sync -1;
  @%p15 bra COPIED;
  cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r0], 256;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
COPIED:
"""
FENCED = "  fence.proxy.async.shared::cta;\n" + COPY_OUT
STORED = {
    "read before it came": ("race", SPIN, ""),
    "stored again with no word between": ("race", STORE, STORE + "  bar.warp.sync -1;\n" + STORE),
    "an mbarrier of another CTA": ("mbarrier", "[%r12];", "[%r10];"),
    "an odd place": ("misaligned", "[%r11], {", "[%r11+4], {"),
    "beyond shared memory": ("out_of_bounds", "[%r11], {", "[%r11+65536], {"),
    "a CTA that is not there": ("out_of_bounds", "xor.b32 %r8, %r3, 1;", "mov.b32 %r8, 7;"),
    "bytes expected that nobody sends": ("deadlock", "256;\nREADY", "264;\nREADY"),
    "read by a copy without a fence": ("missing_proxy_fence", "  ld.shared.v2", COPY_OUT + "  ld.shared.v2"),
}


@pytest.mark.parametrize("name", STORED)
def test_a_store_from_afar_that_is_wrong(name):
    said, old, new = STORED[name]
    text = body("stasync")
    assert old in text
    report = play(text.replace(old, new, 1), (Pointer("out"),), WORDS, cluster=2, shared=16384)
    told = {f.kind for f in report.errors} | ({"deadlock"} if report.deadlock is not None else set())
    assert said in told, report.findings


def test_what_was_stored_from_afar_may_be_copied_behind_a_fence():
    text = body("stasync").replace("  ld.shared.v2", FENCED + "  ld.shared.v2")
    for seed in SEEDS:
        told = kinds(play(text, (Pointer("out"),), WORDS, cluster=2, seed=seed))
        assert "missing_proxy_fence" not in told, told


@pytest.mark.parametrize("form", ("st.async.weak.shared::cluster.b32", "st.async.release.gpu.global.b32"))
def test_other_forms_of_st_async_are_refused(form):
    with pytest.raises(PtxError, match=r"st\.async"):
        play(f"  {form} [%r0], %r1;\n")
