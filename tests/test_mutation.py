"""Faults planted in known-good kernels are noticed by lint, emulator or verifier; what is not noticed is explained."""

import importlib.util
import json
from pathlib import Path

import pytest
from emulator.mutants import ARITHMETIC, FAULTS
from mutation import explained, measure
from mutation.judge import Endless, Fate, Judge, with_patience

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")

MEASURED = Path(__file__).parents[1] / "docs" / "measured"


def rate(fates):
    """Share that is noticed of the faults that change something."""
    real = [f for f in fates if not f.why.startswith("equal")]
    return sum(f.tier != "nothing" for f in real) / len(real)


def holds(fates):
    unexplained = [f for f in fates if f.tier == "nothing" and not f.why]
    assert not unexplained, "\n".join(map(str, unexplained))
    assert rate(fates) >= 0.95, rate(fates)
    assert rate([f for f in fates if f.kind not in ARITHMETIC]) >= 0.95


def test_small_kernels():
    """The two kernels written in PTX."""
    fates = measure.judge_all((14, 0), "PTX", verify=False, show=lambda text: None)
    assert len(fates) > 20
    holds(fates)


@pytest.mark.prove
def test_all_kernels():
    """Fifteen minutes of one core."""
    fates = measure.judge_all((20, 4))
    assert len(fates) >= 400
    holds(fates)


def test_the_committed_table():
    """It has what was asked for, the page says the same, and the reasons are those of today."""
    made = json.loads((MEASURED / "mutants.json").read_text())
    fates = [Fate(**f) for f in made["fates"]]
    assert len(fates) >= 450 and len({f.subject for f in fates}) >= 20
    raw = sum(f.tier != "nothing" for f in fates) / len(fates)
    assert raw >= 0.95, raw
    for kernel in {f.subject for f in fates}:
        assert rate([f for f in fates if f.subject == kernel]) >= 0.95, kernel
    assert {f.kind for f in fates} <= set(FAULTS) and len({f.kind for f in fates}) >= 35
    holds(fates)
    assert (MEASURED / "mutants.md").read_text() == measure.page(fates, made)
    for f in fates:
        if f.tier == "nothing" and "executes" not in f.why:
            assert f.why == explained.reason(f.subject, f.kind, f.code), f


def test_a_judge_wants_a_clean_kernel_with_right_results():
    from mutation.subjects import written_micros

    right = next(written_micros())
    dirty = right.ptx.replace("tcgen05.fence::before_thread_sync;", "")
    for changes, message in (({"ptx": dirty}, "free-fence"),):
        with pytest.raises(ValueError, match=message):
            Judge(right.__class__(**{**vars(right), **changes}))
    wrong = right.variants[0].__class__(right.variants[0].execute, lambda outputs: False)
    with pytest.raises(ValueError, match="wrong"):
        Judge(right.__class__(**{**vars(right), "variants": (wrong,)}))


def test_a_run_that_does_not_end_is_stopped():
    def forever():
        while True:
            pass

    with pytest.raises(Endless):
        with_patience(forever, 0.2)
