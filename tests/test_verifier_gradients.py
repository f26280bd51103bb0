"""The Blackwell backward's kernels equal the gradients of attention over the real numbers, and wrong ones are not proved to."""

import re
from dataclasses import replace

import pytest
from micro import build
from verifier import gradients, run
from verifier.cases import built
from verifier.mutate import edit
from verifier.told import without_additions

pytestmark = pytest.mark.skipif(
    bool(run.missing(True) or build.missing()), reason=run.missing(True) or build.missing() or "-"
)
STEP, PRE, POST = (f"gradients, D 64, {x}" for x in ("one step", "statistics", "dQ of the workspace"))


@pytest.mark.prove
@pytest.mark.parametrize("name", gradients.EQUAL)
def test_gradients_are_those_of_attention(name):
    """By the field `result`. The scale is a run-time operand, statistics and workspace are given."""
    verdict = gradients.judge(gradients.EQUAL[name], timeout=1800)
    assert verdict.equal, verdict


@pytest.mark.parametrize("name", (PRE, POST))
def test_the_small_kernels_make_statistics_and_dq(name):
    verdict = gradients.judge(gradients.EQUAL[name])
    assert verdict.equal, verdict


SMALL = {
    "the scale is not multiplied in": (POST, edit(r"mul\.f32x2 (\s*%rd\d+), %rd\d+, (%rd\d+);", r"mov.b64 \1, \2;", -1)),
    "one column more is dropped from delta": (PRE, edit(r"fma\.rn\.f32\.bf16 (\s*%r\d+), .*, (%r\d+);", r"mov.b32 \1, \2;", 3)),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_small_kernel_is_not_proved(name):
    which, wrong = SMALL[name]
    case = gradients.EQUAL[which]
    verdict = gradients.judge(case, wrong(built(case.plan)))
    assert verdict.result == "equivalence_not_proven", verdict
