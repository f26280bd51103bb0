"""Every finding kind of the emulator: a small kernel that is right, and the same kernel with the fault planted."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from emulator import Pointer, Uninitialised
from emulator.findings import KINDS
from emulator.snippets import body, kinds, mma_setup, module, pair_setup, play, wgmma_setup

PLAIN = (Pointer("x"), Pointer("out"))
FREE = "  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;\n"
WAIT_LD = "  tcgen05.wait::ld.sync.aligned;\n"
UNUSED = WAIT_LD + "  st.global.b32 [%d4], %r6;\n"
LOAD_SPIN = """SPIN:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r10], 0, 1000;
  @%p1 bra READY;
  bra SPIN;
READY:
"""
REUSE = "  cp.async.bulk.wait_group.read 0;\n  st.shared.b32 [%r3], 7;\n"
HALF_WARP = """  setp.lt.u32 %p2, %r1, 16;
  @%p2 bra HALF;
  elect.sync _|%p3, -1;
HALF:
"""
TWO_COUNTS = """  setp.lt.u32 %p2, %r1, 32;
  @%p2 bra ONE;
  bar.sync 1, 64;
  bra TWO;
ONE:
  bar.sync 1, 96;
TWO:
"""
WAITED = """  setp.ne.b32 %p15, %r1, 0;
  @%p15 bra SKIP;
  mbarrier.init.shared.b64 [%r0+64], 1;
  mbarrier.arrive.shared.b64 _, [%r0+64];
SKIP:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r0+64], 0;
"""
SECOND = "  mbarrier.init.shared.b64 [%r10+8], 1;\n"
ARRIVE = "  mbarrier.arrive.shared.b64 _, [%r10+8];\n"
EXPECT = "  mbarrier.expect_tx.relaxed.cta.shared.b64 [%r10+8], 64;\n"
COMMIT2 = """  tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r10+8], %h1;
"""
FREE2 = "  tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r12"
ALONE = "  setp.ne.b32 %p12, %r3, 0;\n  @%p12 bra FREED;\n"
LEAVE = "LEAVE:\n  barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;\n"


@dataclass(frozen=True)
class Case:
    """`kind` appears when `old` becomes `new` in the kernel `name` of tests/emulator/ptx, and not before."""

    name: str
    kind: str
    old: str
    new: str
    options: dict = field(default_factory=dict)


CASES = {
    "store beyond the buffer": Case("global", "out_of_bounds", "st.global.b32 [%d4]", "st.global.b32 [%d4+4000]"),
    "load before the buffer": Case("global", "out_of_bounds", "[%d3]", "[%d3-4]"),
    "load at an odd address": Case("global", "misaligned", "[%d3]", "[%d3+2]"),
    "global memory nobody wrote": Case("global", "uninitialised_read", "b32 %r2, [%d3]", "b32 %r2, [%d4]"),
    "shared memory beyond its size": Case("shared", "out_of_bounds", "%r4, [%r3]", "%r4, [%r3+16384]"),
    "shared memory nobody wrote": Case("shared", "uninitialised_read", "%r4, [%r3]", "%r4, [%r3+256]"),
    "barrier with two counts": Case("shared", "named_barrier", "  bar.sync 0;\n", TWO_COUNTS, {"block": 64}),
    "barrier with a warp twice": Case(
        "shared", "named_barrier", "bar.sync 0;", 2 * "bar.arrive 3, 64;\n  " + "bar.sync 0;"
    ),
    "barrier with an arrival left": Case("shared", "named_barrier", "bar.sync 0;", "bar.arrive 3, 64;\n  bar.sync 0;"),
    "more registers than an SM has": Case(
        "shared", "registers", "bar.sync 0;", "setmaxnreg.inc.sync.aligned.u32 232;\n  bar.sync 0;", {"block": 320}
    ),
    "copied data read before the wait": Case("load", "race", LOAD_SPIN, ""),
    "bytes expected that never come": Case("load", "unfinished", "WAIT:\n", SECOND + EXPECT + "WAIT:\n"),
    "an mbarrier that was never initialised": Case("load", "mbarrier", "mbarrier.init.shared.b64 [%r10], 1;", ""),
    "mbarrier initialised twice": Case(
        "load", "mbarrier", "[%r10], 1;", "[%r10], 1;\n  mbarrier.init.shared.b64 [%r10], 1;"
    ),
    "more arrivals than the count": Case(
        "load", "mbarrier", "  cp.async", "  mbarrier.arrive.shared.b64 _, [%r10];\n  cp.async"
    ),
    "phases that nobody observes": Case("load", "phase_overrun", "WAIT:\n", SECOND + 3 * ARRIVE + "WAIT:\n"),
    "source overwritten under a bulk copy": Case("store", "race", REUSE, "  st.shared.b32 [%r3], 7;\n"),
    "bulk group never waited for": Case("store", "unfinished", REUSE, ""),
    "bulk copy never committed": Case("store", "unfinished", "  cp.async.bulk.commit_group;\n" + REUSE, ""),
    "no proxy fence before a bulk copy": Case("store", "missing_proxy_fence", "  fence.proxy.async.shared::cta;\n", ""),
    "every lane copies": Case("store", "duplicate_issue", "  @%p15 bra DONE;\n", ""),
    "bulk copy of 120 bytes": Case("store", "misaligned", "[%r0], 128", "[%r0], 120"),
    "tensor memory not freed": Case("tmem", "tmem_leak", FREE, ""),
    "tensor memory freed twice": Case("tmem", "tmem_alloc", FREE, 2 * FREE),
    "tensor memory of 48 columns": Case("tmem", "tmem_alloc", "[%r0], 32;", "[%r0], 48;"),
    "allocation after relinquish": Case(
        "tmem",
        "tmem_alloc",
        "  tcgen05.alloc",
        "  tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n  tcgen05.alloc",
    ),
    "tensor memory used after it was freed": Case("tmem", "tmem_unallocated", "  tcgen05.ld", FREE + "  tcgen05.ld"),
    "another warp's lanes": Case("tmem", "lane_quarter", "  tcgen05.st", "  add.s32 %r5, %r5, 2097152;\n  tcgen05.st"),
    "tensor memory column nobody wrote": Case("tmem", "uninitialised_read", "{%r6}, [%r5]", "{%r6}, [%r5+1]"),
    "loaded register used before wait::ld": Case(
        "tmem", "read_before_wait", WAIT_LD, "  add.s32 %r6, %r6, 0;\n" + WAIT_LD
    ),
    "tensor memory read before wait::st": Case("tmem", "race", "  tcgen05.wait::st.sync.aligned;\n", ""),
    "tensor memory freed under a load": Case("tmem", "race", UNUSED, ""),
    "load of tensor memory in flight at exit": Case("tmem", "unfinished", UNUSED, ""),
    "a collective by half a warp": Case("tmem", "not_converged", "  tcgen05.alloc", HALF_WARP + "  tcgen05.alloc"),
    "no tcgen05 fence after a wait": Case("tmem", "missing_tcgen05_fence", "  tcgen05.ld", WAITED + "  tcgen05.ld"),
    "shared memory of a CTA that has left": Case("remote", "remote_exit", LEAVE, "LEAVE:\n", {"cluster": 2}),
    "reserved bits of an instruction descriptor": Case("mma", "bad_descriptor", "[p3]", "[p6]"),
    "a descriptor's address that is not generic": Case("mma", "bad_descriptor", "  cvta.param.u64 %d20, %d20;\n", ""),
    "MMA result read before the commit": Case(
        "mma", "race", "DONE:\n  mbarrier.try_wait.parity.shared.b64 %p1, [%r10+8], 0;\n  @!%p1 bra DONE;\n", ""
    ),
    "a commit to the pair with nothing to commit": Case("mma2", "empty_commit", COMMIT2, 2 * COMMIT2),
    "one CTA of a pair keeps its tensor memory": Case("mma2", "tmem_alloc", FREE2, ALONE + FREE2),
    "a pair frees different columns": Case(
        "mma2", "tmem_alloc", FREE2 + ", 64", "  shl.b32 %r51, 64, %r3;\n" + FREE2 + ", %r51"
    ),
    "accumulator written after the fence": Case(
        "wgmma",
        "wgmma_divergent",
        "  setp.ne.b32 %p2, %r217, 0;\n",
        "  setp.ne.b32 %p2, %r217, 0;\n  mov.b32 %r40, 0;\n",
    ),
    "wgmma without its fence": Case("wgmma", "wgmma_divergent", "  wgmma.fence.sync.aligned;\n", ""),
    "a wait that one warp of the warpgroup executes": Case(
        "wgmma",
        "wgmma_divergent",
        "  wgmma.wait_group.sync.aligned 0;\n",
        "  setp.gt.u32 %p9, %r1, 31;\n  @%p9 bra PAST;\n  wgmma.wait_group.sync.aligned 0;\n"
        "PAST:\n  wgmma.wait_group.sync.aligned 0;\n",
    ),
    "a wait that one warp executes last": Case(
        "wgmma",
        "wgmma_divergent",
        "  wgmma.wait_group.sync.aligned 0;\n",
        "  wgmma.wait_group.sync.aligned 0;\n  setp.gt.u32 %p9, %r1, 31;\n  @%p9 bra PAST;\n"
        "  wgmma.wait_group.sync.aligned 0;\nPAST:\n",
    ),
    "wgmma result read before the wait": Case("wgmma", "unfinished", "  wgmma.wait_group.sync.aligned 0;\n", ""),
}


def launch_of(name):
    """(params, memory, options) of a kernel of tests/emulator/ptx."""
    words = {"x": np.arange(1024, dtype=np.uint32), "out": Uninitialised((1024,), np.uint32)}
    if name == "remote":
        return (Pointer("out"),), words, {}
    if name == "mma2":
        return pair_setup(np.random.default_rng(0).integers(-4, 5, (2, 256, 64)))
    if name in ("mma", "wgmma"):
        setup = mma_setup if name == "mma" else wgmma_setup
        return setup(np.random.default_rng(0).integers(-4, 5, (2, 128, 64)))
    return PLAIN, words, {}


def execute(case, planted):
    params, memory, options = launch_of(case.name)
    text = body(case.name)
    assert text.count(case.old) == 1, f"{case.old!r} occurs {text.count(case.old)} times in {case.name}.ptx"
    return play(text.replace(case.old, case.new) if planted else text, params, memory, **(options | case.options))


@pytest.mark.parametrize("name", CASES)
def test_planted_fault_is_found_and_the_right_kernel_is_silent(name):
    case = CASES[name]
    good = execute(case, False)
    assert good.deadlock is None and not good.findings, "\n".join(map(str, good.findings))
    assert case.kind in kinds(execute(case, True))


def test_every_finding_kind_has_a_planted_fault():
    assert {c.kind for c in CASES.values()} == set(KINDS)


def test_a_finding_names_line_instruction_and_warp():
    report = execute(CASES["load at an odd address"], True)
    (found,) = report.errors
    assert "ld.global.b32 %r2, [%d3+2]" in found.instruction and found.where == "CTA 0,0,0 warp 0"
    text = module(body("global").replace("[%d3]", "[%d3+2]"), PLAIN).splitlines()
    line = next(i for i, code in enumerate(text, 1) if "[%d3+2]" in code)
    assert found.line == line
    with pytest.raises(AssertionError, match="misaligned"):
        report.check()


def test_tolerated_kinds_are_advisory():
    case = CASES["loaded register used before wait::ld"]
    text = body(case.name).replace(case.old, case.new)
    words = {"x": np.arange(1024, dtype=np.uint32), "out": Uninitialised((1024,), np.uint32)}
    assert play(text, PLAIN, words).errors
    report = play(text, PLAIN, words, tolerate=("read_before_wait",))
    assert not report.errors and kinds(report) == {"read_before_wait"}
    assert report.check().outputs["out"][:32].tolist() == list(range(32))
