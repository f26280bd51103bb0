"""Every kind of Blackwell plan has a committed verdict or is listed as open; verdicts are of today's PTX, or say so."""

import copy
import importlib.metadata
import importlib.util
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from verifier import ledger, run, runs
from verifier.describe import normal
from verifier.kinds import kinds
from verifier.told import told_tiles, told_turns

HOW = "python tests/verifier/matrix.py judges what is missing; with --age it marks what has changed, in minutes"
COMPILED = 4  # plans that are compiled where sources have changed; `--age` compiles all
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


@pytest.fixture(scope="module")
def committed():
    return json.loads(ledger.LEDGER.read_text())


@pytest.fixture(scope="module")
def today():
    return kinds()


def test_every_kind_of_plan_has_a_verdict_or_is_open(committed, today):
    assert len(today) > 100, "so few kinds cannot be all of them"
    found = ledger.problems(committed, today)
    assert not found, "\n".join([HOW, *found])


def test_what_is_missing_or_gone_or_doubtful_is_told(committed, today):
    """Each breach planted once."""
    name, entry = next((n, e) for n, e in committed["runs"].items() if not e.get("stale") and ledger.safe(e))
    kind = name.split(":")[0]
    more = {"new kind": SimpleNamespace()}
    assert ledger.problems(committed, today | more) == ["new kind: no verdict, and not listed under `open`"]
    worse = copy.deepcopy(committed)
    worse["open"].append(kind)
    assert any(f"{kind}: listed under `open`" in text for text in ledger.problems(worse, today))
    gone = {k: v for k, v in today.items() if k != kind}
    assert any("no plan of this kind" in text for text in ledger.problems(committed, gone))
    for breach in ({"result": "timeout"}, {"result": "race_found"}, {"warnings": 3}):
        worse = copy.deepcopy(committed)
        worse["runs"][name]["kernels"]["planted"] = {"result": "race_free", "warnings": 0, **breach}
        assert f"{name}: not race-free, and not listed under `not proved`" in ledger.problems(worse, today)
    only = {"runs": {name: entry | {"stale": "the PTX has changed since"}}, "open": [], "not proved": []}
    assert f"{kind}: no verdict, and not listed under `open`" in ledger.problems(only, today)


def test_a_new_field_of_a_plan_is_a_new_kind(today):
    from dataclasses import make_dataclass, replace

    from verifier.kinds import kind

    plan = today["fwd D64 band"]
    wider = make_dataclass("Plan", [("new", bool, True)], bases=(type(plan),), frozen=True)
    assert kind(wider(**vars(plan))) == "fwd D64 band new"
    assert kind(replace(plan, band=False)) == "fwd D64"


@needs_compiler
def test_verdicts_are_of_todays_kernels(committed):
    """Where plan and sources are the same nothing is compiled; else a few are: their PTX must be what was judged."""
    for name, have in ledger.versions().items() if not run.missing() else ():
        then = {entry["versions"][name] for entry in committed["runs"].values() if not entry.get("stale")}
        if {have} != then:
            pytest.skip(f"verdicts are of {name} {then}, here is {have}")
    dsl = importlib.metadata.version("nvidia-cutlass-dsl")
    assert {e["versions"]["nvidia-cutlass-dsl"] for e in committed["runs"].values() if not e.get("stale")} == {dsl}
    by_name = {r.name: r for r in runs.runs()}
    current = {n: e for n, e in committed["runs"].items() if not e.get("stale")}
    assert not set(current) - set(by_name), "runs that are no more"
    changed = [n for n, e in current.items() if not ledger.same_text(e, by_name[n].plan)]
    step = max(-(-len(changed) // COMPILED), 1)
    stale = [n for n in changed[::step] if ledger.ptx_digest(runs.built(by_name[n].plan)) != current[n]["ptx"]]
    assert not stale, f"the PTX is another one than was judged: {stale}; {HOW}"


@needs_compiler
def test_a_verdict_of_another_kernel_is_told(committed, today):
    """The digest sees one instruction, and neither names nor comments."""
    from verifier.matrix import aged, aged_all

    by_name = {r.name: r for r in runs.runs()}
    name = min((n for n, e in committed["runs"].items() if not e.get("stale")), key=len)
    r, entry = by_name[name], committed["runs"][name]
    assert "stale" not in aged(entry, r), "the committed one is not of today"
    other = aged(entry | {"ptx": "0" * 16, "code": "before"}, r)
    assert other["stale"] == "the PTX has changed since"
    assert "stale" not in aged(other | {"ptx": entry["ptx"]}, r)
    moved = replace(r, scene=replace(r.scene, offset=1))
    assert aged(entry, moved)["stale"] == "the scene has changed since"
    before = {"same": entry | {"code": "before"}, "other": entry | {"ptx": "0" * 16, "code": "before"}, "gone": entry}
    said = {n: e.get("stale") for n, e in aged_all(before, {"same": r, "other": r}, 1).items()}
    assert said == {"same": None, "other": "the PTX has changed since", "gone": "no such run any more"}
    ptx = runs.built(r.plan)
    assert ledger.ptx_digest(ptx) == ledger.ptx_digest(ptx.replace("fa4_", "fa5_") + "\n// a comment\n")
    assert ledger.ptx_digest(ptx) != ledger.ptx_digest(ptx.replace("bar.sync", "bar.arrive", 1))


def test_comments_and_docstrings_are_no_code():
    code = "def f(x):\n    '''One.'''\n    return x + 1\n"
    same = "# why\n\ndef f(x):\n    '''Another text.'''\n    return (x +\n            1)  # here\n"
    assert ledger.code_of(code) == ledger.code_of(same)
    assert ledger.code_of(code) != ledger.code_of(code.replace("1", "2"))
    same_everywhere = "Module(body=[FunctionDef(name='f', args=arguments(args=[arg(arg='x')]), body=[Return(value="
    same_everywhere += "BinOp(left=Name(id='x', ctx=Load()), op=Add(), right=Constant(value=1)))])])"
    assert ledger.code_of(code) == same_everywhere, "a digest of one Python must hold in another"


def test_the_digest_follows_imports(tmp_path, monkeypatch):
    """A file that the launcher imports only through another one counts, and one that nobody imports does not."""
    package = tmp_path / "jax_fa4"
    for at, text in {
        "ffi/compile.py": "",
        "kernels/one.py": "def launch():\n    from jax_fa4.kernels import two\n",
        "kernels/two.py": "import jax_fa4.kernels.three\n",
        "kernels/three.py": "X = 1\n",
        "kernels/other.py": "X = 1\n",
    }.items():
        (package / at).parent.mkdir(parents=True, exist_ok=True)
        (package / at).write_text(text)
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    seen = []
    for change in ("", "kernels/other.py", "kernels/three.py"):
        if change:
            (package / change).write_text("X = 2\n")
        ledger.code_digest.cache_clear()
        seen.append(ledger.code_digest("jax_fa4.kernels.one"))
    ledger.code_digest.cache_clear()
    assert seen[0] == seen[1] != seen[2]


def test_what_the_verifier_is_told_must_find_its_place():
    for told in (told_turns, lambda ptx: told_tiles(ptx, (0, 127))):
        with pytest.raises(AssertionError):
            told("add.s32 %r1, %r2, 1;")


def test_a_register_is_a_float_in_its_own_kernel_alone():
    """Names repeat: where -1 of another kernel's integer was written as a float, a coordinate fitted no 32 bits."""
    floats = ".entry a() {\nadd.f32 \t%r7, %r8, %r9;\nselp.b32 \t%r7, %r8, 0, %p1;\n}\n"
    whole = ".entry b() {\nselp.b32 \t%r7, -1, 0, %p1;\nadd.s32 \t%r1, %r7, %r2;\n}\n"
    made = normal(floats + whole)
    assert "selp.f32 %r7, %r8, 0f00000000, %p1;" in made
    assert made.endswith(whole)


@pytest.mark.skipif(bool(run.missing()), reason=run.missing() or "-")
@needs_compiler
def test_segments_are_judged(today):
    """A run whose branches depend on what memory holds, and a fault in it."""
    from verifier.mutate import drop_wait

    r = next(r for r in runs.runs() if r.name == "bwd D64 segments: ragged")
    ptx = runs.built(r.plan)
    how = {"arm": r.scene.arm, "every_order": runs.every_order(r)}
    assert run.judge(runs.launched(r, ptx)["backward"], **how).safe
    broken = run.judge(runs.launched(r, drop_wait(1)(ptx))["backward"], **how)
    assert not broken.safe and broken.result not in ("None", "timeout"), broken


def _posts(name, edit=lambda post: post):
    """The postprocess' launches of a run with turns by what it finds, its text edited."""
    r = next(r for r in runs.runs() if r.name == name)
    before, mark, post = runs.built(r.plan).rpartition(".visible .entry")
    assert "_bwd_post_" in post[:400]
    every = runs.launched(r, before + mark + edit(post))
    return {n.removeprefix("bwd_post"): run.judge(one) for n, one in every.items() if n.startswith("bwd_post")}


@pytest.mark.skipif(bool(run.missing()), reason=run.missing() or "-")
@needs_compiler
@pytest.mark.parametrize("name", ["bwd D64 ordered: one step", "bwd D128 pair ordered: one step"])
def test_the_postprocess_of_turns_is_judged_in_all_that_it_may_find(name):
    found = _posts(name)
    assert len(found) == 3 and all(v.safe for v in found.values()), found
    # all CTAs write what is the first one's to write
    found = _posts(name, lambda post: post.replace("%ctaid.x", "0"))
    assert {v.result for v in found.values()} == {"potential_race"}, found


@pytest.mark.skipif(bool(run.missing()), reason=run.missing() or "-")
@needs_compiler
def test_the_postprocess_reads_where_it_is_told_that_somebody_added():
    """A read of what another thread writes, in place of a read of the workspace: seen unless nothing was added."""

    def reads_dq(post):
        (dq,) = re.findall(r"ld\.param\.b64\s+(%rd\d+), \[\w+_param_2\]", post)
        made, count = re.subn(r"(ld\.global\.v2\.b64\s+\{[^}]*\}), \[[^\]]*\]", rf"\1, [{dq}]", post)
        assert count == 4
        return made

    found = _posts("bwd D64 ordered: one step", reads_dq)
    assert found.pop(", nothing added").safe, found
    assert len(found) == 2 and {v.result for v in found.values()} == {"potential_race"}, found


@pytest.mark.prove
@pytest.mark.skipif(bool(run.missing()), reason=run.missing() or "-")
def test_no_committed_verdict_is_stale(committed):
    """All plans compiled."""
    from verifier.matrix import aged

    by_name = {r.name: r for r in runs.runs()}
    stale = [n for n, e in committed["runs"].items() if "stale" in aged(e, by_name.get(n))]
    assert not stale, f"{len(stale)} of {len(committed['runs'])} are of other PTX: {stale}; {HOW}"
