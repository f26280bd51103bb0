"""The Blackwell forward equals attention under masks, over the real numbers, and a wrong mask is not proved."""

import re
import runpy
from dataclasses import replace

import pytest
from micro import build
from verifier import cases, masked, run
from verifier.mutate import edit
from verifier.told import told_values, without_lse

pytestmark = pytest.mark.skipif(
    bool(run.missing(True) or build.missing()), reason=run.missing(True) or build.missing() or "-"
)
CAUSAL, LENGTH = "equal, causal, one block", "equal, 100 keys count, causal, float16"
HEADS, PARTS = "equal, two heads share keys", "equal, two parts combined, the output"
SINK = "equal, sinks, the output"


@pytest.mark.prove
@pytest.mark.parametrize("name", masked.EQUAL)
def test_masked_forward_equals_attention(name):
    """Output and log-sum-exp. Sides, lengths and offset are constants in the PTX, see `told.told_values`."""
    verdict = masked.judge(masked.EQUAL[name], timeout=1800)
    assert verdict.equal, verdict


@pytest.mark.prove
def test_a_wrong_mask_is_not_proved():
    """Column 66 has its neighbour's bit: of rows that see 65 to 72 keys one loses its last. Race-free."""
    case = masked.EQUAL[CAUSAL]
    wrong = edit(r"and\.b32 (\s*%r\d+, %r\d+), 4;", r"and.b32 \1, 8;", 2)
    verdict = masked.judge(case, wrong(cases.built(case.plan)))
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.prove
@pytest.mark.parametrize(("name", "field"), [(CAUSAL, "last"), (LENGTH, "keys"), ("equal, window", "first")])
def test_a_reference_with_another_mask_is_not_proved(name, field):
    """Of one key less, or more."""
    case = masked.EQUAL[name]
    seen = case.seen
    verdict = masked.judge(case, constants=seen | {field: seen[field] + (-1 if field == "keys" else 1)})
    assert verdict.result == "equivalence_not_proven", verdict


WRONG = {  # of a sink's, and of the loop's body that takes two parts: log2(e) one unit in the last place larger
    "log2(e) of a sink": (SINK, edit(r"0f3FB8AA3B", "0f3FB8AA3C", 0)),
    "log2(e) of a part": (PARTS, edit(r"0f3FB8AA3B", "0f3FB8AA3C", -2)),
    "a part has no weight": (
        PARTS,
        edit(r"fma\.rn\.f32 (\s*%r\d+), (%r\d+), %r\d+, (%r\d+);", r"add.f32 \1, \2, \3;", -3),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.prove] * (n != "a part has no weight")) for n in WRONG]
)
def test_wrong_sinks_and_parts_are_not_proved(name):
    which, wrong = WRONG[name]
    case = masked.EQUAL[which]
    verdict = masked.judge(case, wrong(cases.built(case.plan)))
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.prove
def test_heads_in_another_order_are_not_proved(tmp_path, monkeypatch):
    """The log-sum-exp of a head in the other's place."""
    text = masked.PREFIX.path.read_text()
    wrong = text.replace("reshape(1, t, n).transpose(1, 2)", "reshape(1, n, t)")
    assert wrong != text
    (tmp_path / "reference.py").write_text(wrong)
    monkeypatch.setattr(masked, "PREFIX", replace(masked.PREFIX, path=tmp_path / "reference.py"))
    verdict = masked.judge(masked.EQUAL[HEADS])
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.parametrize("name", [n for n, c in masked.EQUAL.items() if c.kernel == "forward"])
def test_references_are_softmax_over_what_a_mask_shows(name):
    """Of the case's own numbers, on float32 data, against the mask written out as a matrix of visible pairs."""
    import torch

    case = masked.EQUAL[name]
    e = case.sizes
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn((1, n, h, 64), generator=draw, dtype=torch.float64)
        for n, h in zip("TSS", "NKK", strict=True)
        for n, h in [(e[n], e[h])]
    )
    sinks = [torch.tensor([0.5])] * case.plan.sinks
    made = runpy.run_path(str(case.reference.path))["reference"](q, k, v, *sinks, **case.seen)
    out, lse = made[0], made[1] if len(made) > 1 else None
    row, key = torch.arange(e["T"])[:, None], torch.arange(e["S"])[None, :]
    left, right, _, length, offset = case.values["ints"]
    seen = (
        (key >= row + offset - left) & (key <= row + offset + right) & (key < length)
        if case.plan.band
        else key < length
    )
    for h in range(e["N"]):
        at = h * e["K"] // e["N"]
        scores = (q[0, :, h] @ k[0, :, at].T / 8).masked_fill(~seen, -float("inf"))
        total = scores.logsumexp(1)
        assert lse is None or torch.allclose(lse[0, h].double(), total, atol=1e-5)
        total = torch.logaddexp(total, sinks[0].double()) if sinks else total
        assert torch.allclose(out[0, :, h], (scores - total[:, None]).exp() @ v[0, :, at], atol=1e-5)


def test_the_reference_of_parts_is_the_whole():
    """Two parts of 20 keys, against attention to all of them."""
    import torch

    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn((n, 64), generator=draw, dtype=torch.float64) for n in (6, 20, 20))
    halves = [(q @ k[x].T / 8, v[x]) for x in (slice(0, 9), slice(9, 20))]
    part = torch.stack([s.softmax(1) @ x for s, x in halves]).reshape(2, 1, 2, 3, 64)
    lse = torch.stack([s.logsumexp(1) for s, _ in halves]).reshape(2, 1, 2, 3)
    (out,) = runpy.run_path(str(masked.COMBINE.path))["reference"](part, lse)
    whole = ((q @ k.T / 8).softmax(1) @ v).reshape(2, 3, 64).transpose(0, 1)[None]
    assert out.dtype == torch.bfloat16 and torch.allclose(out.double(), whole, atol=1e-2)


LOADS = """
.entry other(
ld.param.b64 %rd1, [other_param_2];
ld.global.b32 %r9, [%rd1];
.entry forward(
ld.param.b64 	%rd1, [forward_param_2];
add.s64 	%rd2, %rd1, %rd3;
ld.global.b32 	%r1, [%rd2+4];
ld.global.v2.b32 	{%r2, %r3}, [%rd1];
ld.global.b32 	%r4, [%rd2+8];
add.s32 %r5, %r4, %r3;
"""


def test_numbers_are_told_where_they_are_loaded():
    made = told_values(LOADS, "forward", 2, [11, 12, 13, 14, 15])
    assert dict(re.findall(r"mov\.b32 (%r\d), (\d+);", made)) == {"%r1": "14", "%r2": "11", "%r3": "12", "%r4": "15"}
    assert re.sub(r" mov\.b32 %r\d, \d+;", "", made) == LOADS
    assert "mov.b32 %r2, 0f3E000000;" in told_values(LOADS, "forward", 2, [0.125, 1.0, 0, 0, 0])


@pytest.mark.parametrize(
    "more", ("ld.global.b64 %rd7, [%rd2];", "add.s32 %r6, %rd1, 1;", "ld.global.b32 %r6, [%rd2+%r7];")
)
def test_a_number_that_is_not_told_is_said(more):
    with pytest.raises(AssertionError, match=r"3 loads .* used 4 times"):
        told_values(LOADS + more, "forward", 2, [11, 12, 13, 14, 15])
    with pytest.raises(AssertionError, match="read 0 times"):
        told_values(LOADS, "forward", 3, [11])


def test_only_a_log_sum_exp_that_is_there_is_left_out():
    with pytest.raises(AssertionError, match="forward stores no single float"):
        without_lse(LOADS, "forward")
    stored = "st.global.b32 \t[%rd7], %r5;\n"
    assert without_lse(LOADS + stored, "forward").rstrip() == LOADS.rstrip()
    with pytest.raises(AssertionError, match="other"):
        without_lse(LOADS + stored, "other")
