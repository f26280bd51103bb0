"""The verifier tier's self-test: right micro-kernels pass, and a release that loosens its checks is noticed."""

from pathlib import Path

import numpy as np
import pytest
from micro import add, build, copy, gemm, power
from verifier import run
from verifier.mutate import GEMM_UNSAFE, GEMM_WRONG

pytestmark = pytest.mark.skipif(bool(run.missing() or build.missing()), reason=run.missing() or build.missing() or "-")
equality = pytest.mark.skipif(bool(run.missing(True)), reason=run.missing(True) or "-")
REFERENCE = run.Reference(Path(__file__).parent / "verifier" / "reference_gemm.py", ("a", "b"), ("out",))


@pytest.mark.parametrize(
    "micro", (add.MICRO, copy.MICRO, power.MICRO, gemm.micro(1), gemm.micro(3)), ids=lambda m: m.module
)
def test_right_kernels_are_safe(micro):
    for every_order in (False, True):
        verdict = run.judge(build.launched(micro), every_order=every_order)
        assert verdict.safe and verdict.peak_mib > 0, verdict


def test_a_store_by_32_lanes_is_race_free_with_warnings():
    """Why `safe` demands that there is no warning: the faulty store is not a race to the verifier."""
    from verifier.mutate import drop

    text = drop(r"@%p\d+ bra[^\n]*", -1)(build.ptx(copy.MICRO))
    verdict = run.judge(build.launched(copy.MICRO, text))
    assert verdict.result == "race_free" and verdict.warnings > 0 and not verdict.safe, verdict
    verdict = run.judge(build.launched(copy.MICRO, text), every_order=True)
    assert verdict.result == "potential_race" and not verdict.safe, verdict


@pytest.mark.parametrize("name", GEMM_UNSAFE)
def test_an_unsafe_mutant_is_caught(name):
    """Three steps on two stages, so that the ring wraps: a stage freed too early passes otherwise. By both searches."""
    micro = gemm.micro(3)
    launch = build.launched(micro, GEMM_UNSAFE[name](build.ptx(micro)))
    verdict, other = (run.judge(launch, timeout=60, every_order=x) for x in (False, True))
    assert not verdict.safe, verdict
    assert verdict.result not in ("None", "timeout", "invalid_input"), verdict
    assert other.result == verdict.result and other.seconds > 0, other


@equality
def test_memory_of_this_process_does_not_count(monkeypatch):
    """A worker that has run kernels in the emulator for an hour holds gigabytes; a proof has a budget of its own."""
    held = np.ones(2400 << 17)  # 2.4 GB
    monkeypatch.setattr(run, "MEMORY_MIB", 2000)
    verdict = run.judge(build.launched(gemm.micro(1)), reference=REFERENCE)
    assert verdict.equal and held[-1] == 1, verdict


@equality
def test_the_right_product_is_proved_equal():
    verdict = run.judge(build.launched(gemm.micro(1)), reference=REFERENCE)
    assert verdict.equal, verdict


@equality
@pytest.mark.parametrize("name", GEMM_WRONG)
def test_a_wrong_product_is_not_proved(name):
    """Safe to the verifier, so equality is not optional."""
    micro = gemm.micro(1)
    verdict = run.judge(build.launched(micro, GEMM_WRONG[name](build.ptx(micro))), reference=REFERENCE)
    assert not verdict.equal, verdict
