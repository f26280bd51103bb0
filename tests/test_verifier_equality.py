"""The Blackwell forward equals attention over the real numbers, and a wrong one is not proved to."""

import re
from dataclasses import replace

import pytest
from micro import build
from verifier import cases, run
from verifier.describe import HIDDEN, by_comparison, ideal_exponentials, never_moved, normal
from verifier.mutate import edit

pytestmark = pytest.mark.skipif(
    bool(run.missing(True) or build.missing()), reason=run.missing(True) or build.missing() or "-"
)


@pytest.mark.prove
@pytest.mark.parametrize("name", cases.EQUAL)
def test_forward_equals_attention(name):
    """Output and log-sum-exp, by the field `result`. The scale is a constant, exponentials are exact."""
    verdict = cases.judge(cases.EQUAL[name], timeout=1800)
    assert verdict.equal, verdict


LINES = """
	mov.b32 	%r1, 0f{0};
	mov.b64 	%rd1, {{%r1, %r1}};
	mov.b32 	%r2, 0f{1};
	mov.b64 	%rd2, {{%r2, %r2}};
	fma.rn.f32x2 	%rd9, %rd2, %rd8, %rd1;
	mov.b32 	%r3, 0f{2};
	mov.b64 	%rd3, {{%r3, %r3}};
	fma.rn.f32x2 	%rd10, %rd9, %rd8, %rd3;
	mov.b32 	%r4, 0f{3};
	mov.b64 	%rd4, {{%r4, %r4}};
	fma.rn.f32x2 	%rd11, %rd10, %rd8, %rd4;
"""
QUARTIC = ("3D55FABE", "3C5BFD19", "3E771290", "3F316B5A")  # c3, c4, c2, c1


def test_only_our_own_polynomial_becomes_an_exact_exponential():
    made = ideal_exponentials(LINES.format(*QUARTIC), 4)
    assert re.findall("0f(........)", made) == ["3D9DF09D", "3D9DF09D", "3E6906A4", "3F31F519"]
    assert re.findall(r"fma.*|mov.b64 \t%rd9.*", made) == [
        "mov.b64 \t%rd9, %rd2;",
        "fma.rn.f32x2 \t%rd10, %rd9, %rd8, %rd3;",
        "fma.rn.f32x2 \t%rd11, %rd10, %rd8, %rd4;",
    ]
    for i, word in enumerate(QUARTIC):  # one unit in the last place
        other = [*QUARTIC[:i], f"{int(word, 16) + 1:08X}", *QUARTIC[i + 1 :]]
        with pytest.raises(ValueError, match=word):
            ideal_exponentials(LINES.format(*other), 4)


def test_the_path_of_no_rescale_is_one_comparison():
    power, test = "ex2.approx.ftz.f32 \t%r2, %r1;\n", "setp.ge.f32 \t%p1, %r1, 0fC1000000;"
    assert never_moved(power + test, 8.0) == power + "setp.ne.f32 \t%p1, %r2, 0f00000000;"
    for wrong, lazy in ((power + test, 7.0), (power + test + test, 8.0), (test, 8.0), (power + power + test, 8.0)):
        with pytest.raises(ValueError, match="comparisons"):
            never_moved(wrong, lazy)


def test_a_selection_by_zero_keeps_its_arms():
    text = "setp.eq.f32 \t%p1, %r1, 0f00000000;\nselp.b32 \t%r3, 0, %r2, %p1;\nadd.f32 \t%r4, %r2, %r3;"
    exchanged = "setp.ne.f32 \t%p1, %r1, 0f00000000;\nselp.f32 %r3, %r2, 0f00000000, %p1;\nadd.f32 \t%r4, %r2, %r3;"
    assert normal(text) == exchanged
    for use in ("@%p1 bra $L;", "selp.b32 \t%r5, 1, %p1, %p10;"):  # used otherwise too: as it is
        assert "setp.eq.f32" in normal(f"{text}\n{use}") and "selp.f32 %r3, 0f00000000, %r2, %p1;" in normal(text + use)


def test_registers_are_a_kernels_own():
    """A select of integers stays one where another kernel of the module has a float of that name."""
    floats, whole = ".entry a(\nadd.f32 %r1, %r2, %r3;\n", "selp.b32 %r1, -1, 0, %p1;\n"
    assert "selp.b32" in normal(floats + ".entry b(\n" + whole) and "selp.f32" in normal(floats + whole)


SHIFTS = """min.u32 %r1, %r2, 32; shl.b32 %r1, -1, %r1;
not.b32 %r3, %r1;
min.u32 %r4, %r5, 32; shl.b32 %r4, -1, %r4;
and.b32 %r6, %r4, %r3;
"""  # as `normal` writes the kernels' words of visible columns: %r5 is the first, %r2 the end


def executed(ptx, values):
    """What registers hold in the end; of the few instructions that words are made with."""
    known, two = dict(values), 1 << 32

    def value(x):
        if x.startswith("%"):
            return known[x]
        return float("-inf") if x == HIDDEN else int(x) % two

    def signed(x):
        return x - two if x >= two // 2 else x

    does = {
        "min.u32": lambda a, b: min(a, b),
        "shl.b32": lambda a, b: (a << b) % two,
        "not.b32": lambda a: ~a % two,
        "and.b32": lambda a, b: a & b,
        "setp.eq.b32": lambda a, b: a == b,
        "setp.ne.b32": lambda a, b: a != b,
        "setp.gt.s32": lambda a, b: signed(a) > signed(b),
        "setp.le.s32": lambda a, b: signed(a) <= signed(b),
        "selp.f32": lambda a, b, p: a if p else b,
    }
    for op, to, rest in re.findall(r"(\S+)\s+(\S+), ([^;]+);", ptx):
        known[to] = does[op](*(value(x.strip()) for x in rest.split(",")))
    return known


@pytest.mark.parametrize("word", ("%r6", "%r3", "%r1"))
def test_a_bit_of_a_word_is_a_comparison_of_its_column(word):
    """All bounds inside, at and past a word, all columns, both ways in which the compiler tests a bit. %r1: of hidden
    ones."""
    text, hides = SHIFTS, word == "%r1"
    for j in range(31):
        test, arms = ("ne", f"%r7, {HIDDEN}") if j % 2 else ("eq", f"{HIDDEN}, %r7")
        test = {"eq": "ne", "ne": "eq"}[test] if hides else test
        text += f"and.b32 %r8, {word}, {1 << j};\nsetp.{test}.b32 %p1, %r8, 0;\nselp.f32 %r{10 + j}, {arms}, %p1;\n"
    last = f"%r7, {HIDDEN}" if hides else f"{HIDDEN}, %r7"
    text += f"setp.gt.s32 %p1, {word}, -1;\nselp.f32 %r41, {last}, %p1;\n"
    made = by_comparison(text)
    assert made.count("\n") == text.count("\n") and "and.b32 %r8" not in made and made.count("setp.le.s32") == 32
    for begin in (0, 1, 2, 15, 30, 31, 32, 33, 200):
        for end in (0, 1, 2, 16, 30, 31, 32, 33, 200):
            given = {"%r2": end, "%r5": begin, "%r7": 1.5}
            before, after = executed(text, given), executed(made, given)
            for j in range(32):
                assert before[f"%r{10 + j}"] == after[f"%r{10 + j}"], (begin, end, j)
                assert (before[f"%r{10 + j}"] == 1.5) == (j < end and (j >= begin or word != "%r6"))


def test_only_hidden_scores_become_comparisons():
    other = SHIFTS + "and.b32 %r8, %r6, 4;\nsetp.eq.b32 %p1, %r8, 0;\nselp.f32 %r9, 0f00000000, %r7, %p1;\n"
    with pytest.raises(ValueError, match="hidden"):
        by_comparison(other)
    for same in (other.replace(" 4;", " 5;"), other.replace("%r6, 4", "%r5, 4")):
        assert by_comparison(same) == same


FEW = "equal, one block, few rows"
WRONG = {  # all of them race-free
    "scale off by one unit in the last place": edit(r"0f3E38AA3B", "0f3E38AA3C", -1),
    "two weights not in the sum": edit(r"add\.rn\.f32x2 (\s*%rd\d+), (%rd\d+), %rd\d+;", r"mov.b64 \1, \2;", 5),
    "log-sum-exp not times ln 2": edit(r"0f3F317218", "0f3F000000", 0),
    "O not divided by the sum": edit(r"rcp\.rn\.f32 (\s*%r\d+), %r\d+;", r"mov.b32 \1, 0f3F800000;", 0),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_forward_is_not_proved(name):
    case = cases.EQUAL[FEW]
    verdict = cases.judge(case, WRONG[name](cases.built(case.plan)))
    assert verdict.result == "equivalence_not_proven", verdict


@pytest.mark.prove
def test_a_wrong_reference_is_not_proved(tmp_path):
    case = cases.EQUAL[FEW]
    wrong = tmp_path / "reference.py"
    wrong.write_text(cases.REFERENCE.path.read_text().replace("12102203", "12102204"))
    launch = cases.launched(case, cases.ideal(case, cases.built(case.plan)))
    verdict = run.judge(launch, case.arm, replace(cases.REFERENCE, path=wrong))
    assert verdict.result == "equivalence_not_proven", verdict
