"""The PTX lint: silent on our kernels, and each rule finds what is planted for it."""

import pytest
from micro import add, build, copy, gemm, power
from ptx_lint import lint, registers
from verifier.mutate import chain, drop, edit

from jax_fa4.kernels import select
from jax_fa4.kernels.sm90.bwd.plan import Plan as Sm90Backward
from jax_fa4.kernels.sm90.bwd.plan import form_for
from jax_fa4.kernels.sm90.fwd.plan import Plan as Sm90Forward
from jax_fa4.kernels.sm90.fwd.plan import tiles_for
from jax_fa4.kernels.sm100.bwd.plan import choose as sm100_backward
from jax_fa4.kernels.sm100.fwd.plan import Plan
from jax_fa4.spec import AttentionSpec, Problem

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "-")

FORWARDS = {
    "d64": Plan("bfloat16", 64, 64, band=True),
    "d128": Plan("bfloat16", 128, 128, spill_allowance=16),
}
OTHERS = {
    "sm100 backward": sm100_backward(Problem(AttentionSpec(), 1, 512, 512, 1, 1, 64, 64, "bfloat16", "bwd")),
    "sm90 forward": Sm90Forward("bfloat16", 128, 128, band=True, **tiles_for(128, 128)),
    "sm90 backward": Sm90Backward("bfloat16", 64, 64, **form_for(64, 64)),
    "sm90 backward, chosen": select(Problem(AttentionSpec(), 1, 390, 128, 1, 1, 64, 64, "bfloat16", "bwd"), "sm_90a"),
}
COMPILED = FORWARDS | OTHERS
built: dict[str, str] = {}


def text(name: str) -> str:
    if name in COMPILED and name not in built:
        from jax_fa4.ffi.compile import build as compiled

        built[name] = compiled(COMPILED[name], keep_ptx=True).ptx
    micros = {"add": add.MICRO, "copy": copy.MICRO, "gemm": gemm.micro(3), "power": power.MICRO}
    return built[name] if name in COMPILED else build.ptx(micros[name])


@pytest.mark.parametrize("name", ("add", "copy", "gemm", "power", *FORWARDS, *OTHERS))
def test_our_kernels_are_clean(name):
    assert lint(text(name)) == []


def shares(plan: Plan) -> dict[int, int]:
    softmax, correct, rest = plan.registers
    return {softmax: 2, correct: 1, rest: 1}


@pytest.mark.parametrize("name", FORWARDS)
def test_registers_are_those_of_the_plan(name):
    assert registers(text(name), shares(FORWARDS[name])) == []


PLANTED = {
    "no wait::ld": ("gemm", "wait-ld", drop(r"tcgen05\.wait::ld[^\n]*")),
    "no wait::ld behind S": ("d64", "wait-ld", drop(r"tcgen05\.wait::ld[^\n]*")),
    "no wait::st behind P": ("d64", "wait-st", drop(r"tcgen05\.wait::st[^\n]*")),
    "P handed over unfenced": ("d64", "before-sync", drop(r"tcgen05\.fence::before_thread_sync[^\n]*")),
    "accumulator read unfenced": ("gemm", "after-sync", drop(r"tcgen05\.fence::after_thread_sync[^\n]*")),
    "P read unfenced": ("d128", "after-sync", drop(r"tcgen05\.fence::after_thread_sync[^\n]*")),
    "freed unfenced": ("gemm", "free-fence", drop(r"tcgen05\.fence::before_thread_sync[^\n]*")),
    "freed unfenced in the forward": (
        "d128",
        "free-fence",
        drop(r"tcgen05\.fence::before_thread_sync;(?=\s*(//[^\n]*\s*)?bar\.arrive 9,)"),
    ),
    "tile stored unfenced": ("copy", "proxy", drop(r"fence\.proxy\.async[^\n]*")),
    "O stored unfenced": ("d64", "proxy", drop(r"fence\.proxy\.async[^\n]*", -1)),
    "first tile of O stored unfenced": ("d64", "proxy", drop(r"fence\.proxy\.async[^\n]*", -2)),
    "load not elected": ("gemm", "elect", drop(r"@%p19 bra[^\n]*")),
    "products not elected": ("gemm", "elect", drop(r"@%p9 bra[^\n]*")),
    "commit not elected": ("gemm", "elect", drop(r"@%p14 bra[^\n]*")),
    "store not elected": ("copy", "elect", drop(r"@%p\d+ bra[^\n]*", -1)),
    "expect_tx not elected": ("gemm", "elect", drop(r"@%p17 bra[^\n]*")),
    "elected the wrong way round": ("gemm", "elect", edit(r"@%p9 bra", "@%p8 bra")),
    "registers given up as if asked for": (
        "sm100 backward",
        "registers",
        edit(r"setmaxnreg\.dec(\S*\s+120)", r"setmaxnreg.inc\1"),
    ),
    "registers asked for as if given up": ("d128", "registers", edit(r"setmaxnreg\.inc", "setmaxnreg.dec")),
    "barriers not fenced": ("gemm", "init-fence", drop(r"fence\.mbarrier_init[^\n]*")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    kernel, rule, planted = PLANTED[name]
    rules = {f.rule for f in lint(planted(text(kernel)))}
    assert rule in rules, rules


def test_planted_register_faults_are_found():
    plan = FORWARDS["d128"]
    ptx, right = text("d128"), shares(plan)
    more = edit(r"(setmaxnreg\.inc\S*\s+)192", r"\g<1>240")(ptx)
    assert registers(more, right) and registers(more, {240: 2, 80: 1, 48: 1})
    assert registers(drop(r"setmaxnreg\.dec\S*\s+48;")(ptx), right)
    odd = edit(r"(setmaxnreg\.dec\S*\s+)48", r"\g<1>44")(ptx)
    assert any("multiple of 8" in f.text for f in registers(odd, {192: 2, 80: 1, 44: 1}))
    assert registers(ptx, {192: 2, 80: 1}), "a warpgroup short"


def test_a_fault_on_one_path_only_is_found():
    """The wait stands in one arm of a branch; the use comes after both."""
    ptx = """
.visible .entry k()
{
	elect.sync 	%r1|%p1, -1;
	tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r3];
	@%p1 bra 	$L__A;
	tcgen05.wait::ld.sync.aligned;
$L__A:
	add.s32 	%r4, %r2, 1;
	ret;
}
"""
    assert [f.rule for f in lint(ptx)] == ["wait-ld"]
    waited = edit(r"\$L__A:", "$L__A:\ttcgen05.wait::ld.sync.aligned;")
    assert chain(waited)(ptx) != ptx and lint(waited(ptx)) == []


FLAGGED = """
.visible .entry k()
{
	mov.pred 	%p1, 0;
	setp.lt.s32 	%p2, %r9, 1;
	@%p2 bra 	$L__B;
$L__A:
	st.shared.b32 	[%r3], %r4;
	add.s32 	%r9, %r9, -1;
	setp.ne.s32 	%p3, %r9, 0;
	mov.pred 	%p1, -1;
	@%p3 bra 	$L__A;
$L__B:
	not.pred 	%p4, %p1;
	@%p4 bra 	$L__C;
	fence.proxy.async.shared::cta;
$L__C:
	mbarrier.arrive.shared.b64 	%rd2, [%r5];
	mbarrier.try_wait.parity.shared.b64 	%p5, [%r5], %r6;
	elect.sync 	%r1|%p6, -1;
	not.pred 	%p7, %p6;
	@%p7 bra 	$L__D;
	cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 512;
$L__D:
	ret;
}
"""


@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        (str, []),
        (edit(r"%p1, -1", "%p1, 0"), ["proxy"]),
        (edit(r"@%p4", "@!%p4"), ["proxy"]),
        (edit(r"@%p4", "@%p2"), ["proxy"]),
        (edit(r"not\.pred \t%p4, %p1;", "mov.pred %p1, 0; not.pred %p4, %p1;"), ["proxy"]),
        (edit(r"fence\.proxy\.async\.shared::cta", "barrier.cluster.arrive"), []),  # a signal that has no operand
    ],
    ids=[
        "fenced if any step was",
        "flag never set",
        "the other way",
        "asks something else",
        "flag taken back",
        "handed over at the cluster's barrier",
    ],
)
def test_a_flag_is_known_behind_the_loop_that_sets_it(fault, rules):
    """Stores are fenced behind the loop, if it took a step; the path that took one and has no fence cannot be."""
    assert [f.rule for f in lint(fault(FLAGGED))] == rules


ELECTED = """
.visible .entry k()
{
	mov.u32 	%r1, %tid.x;
	and.b32 	%r2, %r1, 127;
	setp.ne.b32 	%p1, %r2, 0;
	setp.lt.s32 	%p2, %r9, 1;
	or.pred 	%p3, %p1, %p2;
	@%p3 bra 	$L__A;
	cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 512;
$L__A:
	ret;
}
"""


@pytest.mark.parametrize(
    ("change", "elected"),
    [
        (None, True),
        (edit(r"and\.b32(.*)127", r"and.b32\g<1>96"), False),  # the warp's number
        (edit(r"or\.pred", "and.pred"), False),
        (edit(r"setp\.ne", "setp.eq"), False),
        (edit(r"@%p3", "@!%p3"), False),
    ],
)
def test_who_compares_the_thread_with_a_number_is_alone(change, elected):
    made = ELECTED if elected else change(ELECTED)
    assert [f.rule for f in lint(made)] == ([] if elected else ["elect"])


PATHS = """
.visible .entry k()
{
	setp.lt.s32 	%p1, %r1, 1;
	@%p1 bra 	$L__A;
	tcgen05.fence::after_thread_sync;
	bra 	$L__B;
$L__A:
	bar.sync 	1, 64;
$L__B:
	setp.lt.s32 	%p2, %r1, 1;
	@%p2 bra 	$L__C;
	tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r3];
	tcgen05.wait::ld.sync.aligned;
$L__C:
	ret;
}
"""


def test_a_condition_tested_twice_has_one_outcome():
    """The load is reached with the fence only: both branches ask the same."""
    assert lint(PATHS) == []
    other = edit(r"setp\.lt\.s32(\s+%p2, %r1), 1", r"setp.lt.s32\g<1>, 2")
    changed = edit(r"\$L__B:", "$L__B:\tmov.b32 \t%r1, %r4;")
    for change in (other, changed):
        assert [f.rule for f in lint(change(PATHS))] == ["after-sync"]
