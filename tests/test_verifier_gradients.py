"""The Blackwell backward makes the gradients of attention, over the real numbers; wrong kernels are not proved to."""

import json
import math
import re
import runpy
from dataclasses import replace

import pytest
from micro import build
from verifier import cases, gradients, ledger, masked, measure, run
from verifier.describe import one_by_one
from verifier.mutate import edit
from verifier.told import without_additions

pytestmark = pytest.mark.skipif(
    bool(run.missing(True) or build.missing()), reason=run.missing(True) or build.missing() or "-"
)
TURNS = "gradients, D 64, in turns"
STEP, PRE, POST = (f"gradients, D 64, {x}" for x in ("one step", "statistics", "dQ of the workspace"))


@pytest.mark.prove
@pytest.mark.parametrize("name", gradients.EQUAL)
def test_gradients_are_those_of_attention(name):
    """By the field `result`. The scale is a run-time operand, statistics and workspace are given."""
    verdict = gradients.judge(gradients.EQUAL[name], timeout=1800)
    assert verdict.equal, verdict


def test_the_last_kernel_makes_dq():
    verdict = gradients.judge(gradients.EQUAL[POST])
    assert verdict.equal, verdict


WRONG = {  # race-free, both
    "delta of two queries left out": edit(r"sub\.rn\.f32x2 (\s*%rd\d+), (%rd\d+), %rd\d+;", r"mov.b64 \1, \2;", 5),
    "log2(e) off by one unit in the last place": edit(r"0f3FB8AA3B", "0f3FB8AA3C", -1),
}


@pytest.mark.prove
@pytest.mark.parametrize(("which", "name"), [*((STEP, name) for name in WRONG), (TURNS, next(iter(WRONG)))])
def test_a_wrong_backward_is_not_proved(which, name):
    case = gradients.EQUAL[which]
    verdict = gradients.judge(case, WRONG[name](gradients.text(case)))
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.prove
def test_a_wrong_reference_of_gradients_is_not_proved(tmp_path):
    """Without delta the gradient is that of weights which are not normalised."""
    wrong = tmp_path / "reference.py"
    text = gradients.MAIN.path.read_text()
    wrong.write_text(text.replace(" - delta[None, :]", ""))
    assert wrong.read_text() != text
    verdict = gradients.judge(gradients.EQUAL[STEP], reference=replace(gradients.MAIN, path=wrong))
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.prove
def test_gradients_of_another_window_are_not_proved():
    """The reference's is a key wider."""
    case = gradients.EQUAL["gradients, D 64, a window"]
    wrong = replace(gradients.PREFIX, constants={"last": case.left + 1, "scale": gradients.SCALE})
    verdict = gradients.judge(case, reference=wrong)
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.parametrize(("heads", "last"), [(1, 32), (2, 128)])
def test_the_reference_under_a_window_is_what_differentiation_gives(heads, last):
    import torch

    draw = torch.Generator().manual_seed(3)
    n = 128
    q, do = (torch.randn((1, n, heads, 64), generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn((1, n, 1, 64), generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
    row = torch.arange(n)
    scores = torch.einsum("thd,sd->hts", q[0], k[0, :, 0]) / 8
    scores = scores.masked_fill(row[:, None] > row[None, :] + last, -float("inf"))
    out = torch.einsum("hts,sd->thd", scores.softmax(2), v[0, :, 0])
    dk, dv = torch.autograd.grad((out * do[0]).sum(), (k, v))
    stats = torch.stack([scores.logsumexp(2) / math.log(2), (out * do[0]).sum(2).T], 1).detach().float()
    made = runpy.run_path(str(gradients.PREFIX.path))["reference"](q, k.detach(), v.detach(), do, stats, last, 0.125)
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(made, (dk, dv), strict=True))


def test_an_addition_that_is_not_there_is_told():
    with pytest.raises(AssertionError, match="no bulk addition"):
        without_additions("add.s32 %r1, %r2, %r3;")


def test_a_selection_by_either_of_two_is_two_selections():
    """Of all four cases the same, and other uses of the predicates stay."""
    text = "or.pred \t%p3, %p1, %p2;\n\tselp.f32 \t%r3, %r1, %r2, %p3;\n\tadd.f32 \t%r4, %r3, %r3;"
    made = one_by_one(text)
    assert made.count("\n") == text.count("\n") and made.endswith("add.f32 \t%r4, %r3, %r3;")
    (first, second) = re.findall(r"selp\.f32\s+%r3, (\S+), (\S+), (\S+);", made)
    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        known = {"%p1": a, "%p2": b, "%r1": "yes", "%r2": "no"}
        for yes, no, test in (first, second):
            known["%r3"] = known[yes] if known[test] else known[no]
        assert known["%r3"] == ("yes" if a or b else "no"), made
    assert one_by_one(text.replace("selp.f32", "selp.b32")) == text.replace("selp.f32", "selp.b32")


SMALL = {
    "the scale is not multiplied in": (
        POST,
        edit(r"mul\.f32x2 (\s*%rd\d+), %rd\d+, (%rd\d+);", r"mov.b64 \1, \2;", -1),
    ),
    "one column more is dropped from delta": (
        PRE,
        edit(r"fma\.rn\.f32\.bf16 (\s*%r\d+), .*, (%r\d+);", r"mov.b32 \1, \2;", 3),
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.prove] * (w[0] == PRE)) for n, w in SMALL.items()])
def test_a_wrong_small_kernel_is_not_proved(name):
    which, wrong = SMALL[name]
    case = gradients.EQUAL[which]
    verdict = gradients.judge(case, wrong(gradients.text(case)))
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.prove
def test_recorded_verdicts_are_of_todays_kernels():
    """The committed file, for both passes and masks; `python tests/verifier/measure.py NAME` judges again."""
    recorded = json.loads(measure.OUT.read_text())
    today = {name: cases.built(case.plan) for name, case in cases.EQUAL.items()}
    today |= {name: cases.built(case.plan) for name, case in masked.EQUAL.items()}
    today |= {name: gradients.text(case) for name, case in gradients.EQUAL.items()}
    assert set(today) <= set(recorded), set(today) - set(recorded)
    for name, ptx in today.items():
        assert recorded[name]["verdict"]["result"] == "verified", name
        assert recorded[name]["ptx"] == ledger.ptx_digest(ptx), f"{name}: another PTX was judged"
