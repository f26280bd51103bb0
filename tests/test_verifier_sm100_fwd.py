"""The Blackwell forward is race-free: every mask kind, ragged sizes, shared heads, both arms of the rescale."""

import re

import pytest
from micro import build
from verifier import cases, run, runs
from verifier.mutate import drop, drop_wait

pytestmark = pytest.mark.skipif(bool(run.missing() or build.missing()), reason=run.missing() or build.missing() or "-")


@pytest.mark.parametrize("name", cases.QUICK)
def test_forward_is_safe(name):
    verdict = cases.judge(cases.QUICK[name])
    assert verdict.safe, verdict


@pytest.mark.parametrize("name", [n for n, case in (cases.QUICK | cases.LONG).items()])
def test_safety_cases_wrap_their_ring(name):
    """Else a stage freed one product too early passes. Exempt: what is about something else, at one block."""
    case = (cases.QUICK | cases.LONG)[name]
    keys = case.lengths[1] if case.lengths else case.sizes["S"]
    blocks = max(-(-keys // case.plan.tile), 1)
    exempt = {"full, a mixture", "no keys", "two heads share keys"}
    assert 2 * blocks >= case.plan.stages + 2 or name in exempt, (blocks, case.plan.stages)


def _drop_wait_after(ptx: str, mark: str) -> str:
    """The first mbarrier wait behind `mark`."""
    waits = [m.start() for m in re.finditer(r"mbarrier\.try_wait", ptx)]
    return drop_wait(next(i for i, at in enumerate(waits) if at > ptx.index(mark)))(ptx)


MUTANTS = {
    "S read before it is complete": lambda ptx: _drop_wait_after(ptx, "setmaxnreg.inc"),
    "statistics not waited for": drop(r"bar\.sync \s*%r\d+, 64;", 0),
    "P handed over before it is stored": drop(r"tcgen05\.wait::st[^\n]*", -1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_forward_is_caught(name):
    case = cases.QUICK["full, rescaled"]
    verdict = cases.judge(case, MUTANTS[name](cases.built(case.plan)))
    assert not verdict.safe and verdict.result not in ("None", "timeout"), verdict


@pytest.mark.prove
@pytest.mark.parametrize("name", cases.LONG)
def test_forward_is_safe_at_length(name):
    verdict = cases.judge(cases.LONG[name], timeout=1800)
    assert verdict.safe, verdict


@pytest.mark.prove
def test_depth_256_takes_no_phase_for_the_one_before_the_last():
    """Three blocks, O kept: without a wait in every block the last one rests on the order in which commits arrive."""
    (r,) = [r for r in runs.runs() if r.name == "fwd D256 wide pair: three blocks, kept"]
    ptx = runs.built(r.plan)
    assert all(v.safe for v in runs.judge(r, ptx, timeout=1800).values())
    every = [m.start() for m in re.finditer(r"mbarrier\.try_wait", ptx)]
    last = max(i for i, at in enumerate(every) if at < ptx.index("vote.sync"))
    (verdict,) = runs.judge(r, drop_wait(last)(ptx), timeout=1800).values()
    # The kernel of before, whose other waits stood elsewhere, was refused by another word.
    assert verdict.result == "not_wellsynced" and "missing_successful_wait_handoff" in verdict.found[0], verdict
