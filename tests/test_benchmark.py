"""The benchmark: what it counts, times and refuses, on a CPU at toy size; reports as tables, plots and docs."""

import functools
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import benchmark, cli, report
from jax_fa4.benchmark import Row
from jax_fa4.cases import MIXED, NAMED, Case

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FIRST = DOCS / "measured" / "2026-11-29_h200_forward_first.json"

CASES = (
    Case(64, 1024, 16, 32),
    Case(128, 4096, 4, 16, causal=True),
    Case(192, 512, 2, 8, value_depth=128, causal=True),
    Case(128, 4096, 4, 16, kv_heads=4, causal=True, window=512),
    Case(128, 4096, 4, 16, kv_heads=4, queries=1, causal=True, dtype="float16"),
    *(case for cases in NAMED.values() for case in cases if case.packed or case.queries == 1),
)
TOY = Case(16, 32, 1, 2, causal=True, dtype="float32")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(benchmark, "SAMPLE_SECONDS", 1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_a_label_tells_the_case(case):
    assert Case.from_label(case.label) == case


def test_named_cases():
    parse = cli.parser().parse_args
    every = benchmark.standard_cases(parse(["benchmark", "--cases", "all"]))
    assert set(every) == {case for cases in NAMED.values() for case in cases}
    assert [Case.from_label(case.label) for case in every] == every and len({c.label for c in every}) == len(every)
    some = benchmark.standard_cases(parse(["benchmark", "--cases", "short", "decode", "--dtype", "float16"]))
    assert [c.length for c in some] == [2048, 16384, 16384, 16384] and {c.dtype for c in some} == {"float16"}
    both = benchmark.standard_cases(parse(["benchmark", "--cases", "deterministic", "gqa", "--deterministic"]))
    assert len(both) == len(NAMED["deterministic"]) + 1, "a case of two names is timed once"
    kinds = {(c.depth, c.length, c.causal) for c in NAMED["deterministic"]}
    assert kinds >= {(d, n, c) for d in (64, 128) for n in (4096, 8192) for c in (False, True)}
    with pytest.raises(SystemExit):
        parse(["benchmark", "--cases", "longest"])


@pytest.mark.parametrize("packed", ["segments", "varlen"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_timed_against_peers_that_compute_the_same(packed, causal):
    case = Case(8, 64, 1, 2, causal=causal, packed=packed, dtype="float32")
    assert len(case.sequences) == len(MIXED) and sum(case.sequences) == 64
    assert case.pairs == sum(n * n for n in case.sequences) / (2 if causal else 1)
    made = benchmark.implementations(case, ["ours", "ours_det", "xla", "tokamax"])
    assert set(made) == {"ours", "ours_det", "xla"}, "tokamax takes no such call"
    sets = benchmark.inputs(case)
    want = benchmark.reference_results(case, sets, True)
    for a, b in zip(benchmark.both_of(made["xla"])(sets[:1])[0], want, strict=True):
        assert benchmark.error(a, b) < 1e-5
    whole = jax_fa4.attention(*sets[0][:3], is_causal=causal, implementation="xla")
    assert benchmark.error(whole, want[0]) > 0.1, "the sequences are kept apart"


def test_cases_of_one_kind_differ_in_length_and_batch_only():
    assert Case(64, 1024, 16, 32, causal=True).kind == Case(64, 4096, 4, 32, causal=True).kind == "D64 causal N32"
    assert len({case.kind for case in CASES}) == len({case.label for case in CASES}) == len(CASES)


def test_what_is_no_label_is_refused():
    for text in ("D64", "D64 full S1024 B16", "D64 slanted S1024 B16 N32", "D64 full S1024 B16 N32 bfloat16 more"):
        with pytest.raises(ValueError, match="no label"):
            Case.from_label(text)


def test_flops_are_those_of_the_visible_pairs():
    i, j = np.arange(40)[:, None], np.arange(40)[None, :]
    window = Case(16, 40, 2, 4, causal=True, window=7)
    assert window.pairs == ((j <= i) & (j >= i - 7)).sum()
    assert Case(16, 40, 2, 4).pairs == 1600 and Case(16, 40, 2, 4, causal=True).pairs == 800
    assert Case(16, 40, 1, 4, queries=1, causal=True).pairs == 40  # one query at the end sees every key
    assert Case(16, 40, 2, 4, value_depth=8).flops == 2 * 2 * 4 * 1600 * (16 + 8)


def test_the_sweep():
    parse = cli.parser().parse_args
    args = parse(["benchmark", "--depths", "128", "--lengths", "64", "128", "--tokens", "256", "--gqa", "1", "4"])
    labels = [case.label for case in benchmark.standard_cases(args)]
    assert (
        len(labels) == 2 * 2 * 2 and labels[0] == "D128 full S64 B4 N16" and labels[-1] == "D128 causal S128 B2 N16:4"
    )
    args = parse(["benchmark", "--depths", "64", "--lengths", "64", "--window", "8", "--dtype", "float16"])
    assert benchmark.standard_cases(args)[-1] == Case(64, 64, 256, 32, causal=True, window=8, dtype="float16")
    with pytest.raises(ValueError, match="--gqa 3 does not divide the 16 query heads of depth 128"):
        benchmark.standard_cases(parse(["benchmark", "--depths", "128", "--gqa", "3"]))


def test_nothing_is_measured_without_a_gpu(capsys):
    assert jax.default_backend() == "cpu"
    assert cli.main(["benchmark"]) == 2
    assert "the backend is cpu" in capsys.readouterr().out


def test_deterministic_is_one_more_implementation(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    empty = {"matmul_tflops": 1.0, "rows": []}
    monkeypatch.setattr(benchmark, "take", lambda cases, names, *more: asked.append((names, more)) or empty)
    out = tmp_path / "b.json"
    assert cli.main(["benchmark", "--deterministic", "--samples", "3", "--out", str(out)]) == 0
    assert asked == [(["ours", "cudnn", "ours_det"], (True, 3, out))]
    assert cli.main(["benchmark", "--gqa", "5"]) == 2 and cli.main(["benchmark", "--samples", "1"]) == 2
    assert benchmark.implementations(TOY, ["ours_det"])["ours_det"].keywords["deterministic"] is True


def test_a_run_that_is_cut_off_leaves_what_it_measured(monkeypatch, tmp_path, capsys):
    """A report is whole after each case, the one before it stays whole while the next is written."""
    cases = [Case(64, n, 1, 4) for n in (512, 1024, 2048)]
    out, seen, rates = tmp_path / "made" / "report.json", [], iter((700.0, 650.0))

    def measure(case, names, backward, samples):
        seen.append(json.loads(out.read_text()) if out.exists() else None)
        if case is cases[2] and backward:
            raise KeyboardInterrupt
        return [Row(case.label, "ours", fwd_us=1.0, fwd_tflops=2.0)]

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "matmul_tflops", lambda: next(rates))
    with pytest.raises(KeyboardInterrupt):
        benchmark.take(cases, ["ours"], True, 2, out)
    assert seen[0] is None and [len(found["rows"]) for found in seen[1:]] == [1, 2]
    found = json.loads(out.read_text())
    assert found == seen[2] and [r["case"] for r in found["rows"]] == [c.label for c in cases[:2]]
    assert found["matmul_tflops"] == 700 and report.NEEDED <= set(found)
    assert [path.name for path in out.parent.iterdir()] == ["report.json"]
    assert cli.main(["benchmark", "--from-json", str(out)]) == 0
    assert "The run was cut off: 2 of 3 cases." in capsys.readouterr().out
    assert "The run was cut off: 2 of 3 cases." in report.markdown({"2026_made": found}, benchmark.__doc__)

    rates = iter((700.0, 650.0))
    whole = benchmark.take(cases, ["ours"], False, 2, out)
    assert json.loads(out.read_text()) == whole and whole["matmul_tflops"] == 650 and len(whole["rows"]) == 3
    assert report.cut_off(whole) == "" and "The run was cut off" not in report.markdown(
        {"2026_made": whole}, benchmark.__doc__
    )


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_only_what_is_right_gets_a_number(quick, monkeypatch):
    xla = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")

    def made(case, names):
        def nan(q, k, v):
            return xla(q, k, v).at[0, 0, 0, 0].add(jnp.nan)

        return {"right": xla, "wrong": jax.nn.dot_product_attention, "nan": nan, "fails": lambda q, k, v: 1 / 0}

    monkeypatch.setattr(benchmark, "implementations", made)
    rows = {row.name: row for row in benchmark.measure(TOY, [], samples=3)}
    right = rows.pop("right")
    assert right.fwd_us > 0 and right.error < 1e-5 and right.note == "" and len(right.samples["both"]) == 3
    assert all(row.fwd_us == row.bwd_us == row.fwd_tflops == 0 and row.note for row in rows.values())
    assert "wrong" in rows["wrong"].note and "wrong" in rows["nan"].note and "ZeroDivisionError" in rows["fails"].note


@pytest.mark.parametrize("wrong", [jnp.zeros_like, lambda dk: dk.at[0, 0, 0, 0].set(jnp.nan)], ids=["zero", "nan"])
def test_a_wrong_gradient_gets_no_number_either(quick, monkeypatch, wrong):
    @jax.custom_vjp
    def call(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def back(saved, g):
        dq, dk, dv = jax.vjp(call.fun, *saved)[1](g)
        return dq, wrong(dk), dv

    call.defvjp(lambda q, k, v: (call(q, k, v), (q, k, v)), back)
    monkeypatch.setattr(benchmark, "implementations", lambda case, names: {"forward only": call})
    assert "wrong" in benchmark.measure(TOY, [], samples=2)[0].note
    assert benchmark.measure(TOY, [], backward=False, samples=2)[0].note == ""


def test_ours_on_a_cpu_is_refused_by_name(quick):
    (row,) = benchmark.measure(Case(64, 32, 1, 2), ["ours"], samples=2)
    assert row.fwd_us == 0 and row.note.startswith("Unsupported")


def test_implementations_take_turns(quick, monkeypatch):
    order = []
    monkeypatch.setattr(benchmark, "SAMPLE_SECONDS", 0)
    programs = {name: lambda sets, name=name: order.append(name) for name in "ab"}
    found = benchmark.time_in_turn(programs, None, samples=3)
    assert order[-12:] == list("aabbbbaabbaa") and [len(x) for x in found.values()] == [3, 3]  # settled, then timed
    assert order[: len(order) - 12] == ["a"] * 3 + ["b"] * 3  # warm-up and the trial sample


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd", "abcde", "abcdefghi", "abcdefghijkl"])
def test_the_order_of_turns_favours_nobody(names):
    count = len(names)
    orders = ["".join(benchmark.order_of(n, list(names))) for n in range(2 * count)]
    assert all(sorted(order) == sorted(names) for order in orders)
    for at in range(count):  # each place is taken by each as often
        assert [[order[at] for order in orders].count(name) for name in names] == [2] * count
    for a, b in itertools.permutations(names, 2):  # and who comes before whom is even
        assert sum(order.index(a) < order.index(b) for order in orders) == count
        assert sum(a + b in order for order in orders) == 2, "each comes behind each other one as often"


def test_forward_and_both_take_turns_with_one_another(monkeypatch):
    """The backward is their difference: of two times at one clock."""
    asked = []

    def turns(programs, sets, samples):
        asked.append(list(programs))
        return {key: [5e-3 if key[0] == "both" else 1e-3] * samples for key in programs}

    monkeypatch.setattr(benchmark, "time_in_turn", turns)
    (row,) = benchmark.measure(Case(64, 32, 1, 2), ["xla"], samples=2)
    assert asked == [[("fwd", "xla"), ("both", "xla")]] and row.bwd_us == pytest.approx(4000)


def test_rates_are_medians_and_the_backward_is_a_difference():
    row = Row("x", "ours")
    case = Case(100, 1000, 10, 10)
    benchmark._fill(row, case, [1e-3, 2e-3, 9e-3], [5e-3, 6e-3, 7e-3])
    assert row.fwd_us == pytest.approx(2000) and row.bwd_us == pytest.approx(4000)
    assert row.fwd_tflops == pytest.approx(case.flops / 2e-3 / 1e12)
    assert row.bwd_tflops == pytest.approx(2.5 * case.flops / 4e-3 / 1e12)
    assert row.spread == pytest.approx((9 - 1) / 2)


def test_sets_differ_and_are_never_zeros():
    sets = benchmark.inputs(TOY)
    assert len(sets) == benchmark.SETS and sets[0][0].shape == (1, 32, 2, 16)
    flat = [np.asarray(x) for s in sets for x in s]
    assert all((x != 0).mean() > 0.99 for x in flat) and len({float(x.sum()) for x in flat}) == len(flat)


# ---- reports ---------------------------------------------------------------------------------------------------------


def row(case, name, fwd=0.0, bwd=0.0, **more):
    made = {"case": case, "name": name, "fwd_tflops": fwd, "bwd_tflops": bwd, "fwd_us": 1.0, "bwd_us": 2.0}
    return made | {"spread": 0.1, "error": 1e-3, "note": "", "samples": {}} | more


MADE = {
    "machine": {"date": "2026-01-01", "device": "CARD", "jax": "1", "jax_fa4": "2", "nvidia_smi": None},
    "matmul_tflops": 700.0,
    "rows": [
        row("D64 full S1024 B1 N4", "ours", 300, 200),
        row("D64 full S1024 B1 N4", "cudnn", 200, 400),
        row("D64 full S1024 B1 N4", "xla", 150),
        row("D64 full S512 B2 N4", "ours", 100, 50),
        row("D64 causal S512 B2 N4", "cudnn", 90, note=""),
        row("D64 causal S512 B2 N4", "ours", note="Unsupported: no such kernel"),
    ],
}


def test_ratios_are_against_the_best_peer_where_both_ran():
    assert report.ratios(MADE, "fwd") == {"D64 full S1024 B1 N4": 1.5}
    assert report.ratios(MADE, "bwd") == {"D64 full S1024 B1 N4": 0.5}


def test_the_deterministic_backward_is_compared_with_the_plain_one_of_the_same_run(capsys):
    case = "D64 full S1024 B1 N4"
    rows = [row(case, "ours", 300, 200), row(case, "ours_det", 300, 150), row("D64 full S512 B2 N4", "ours", 3, 200)]
    found = MADE | {"rows": rows}
    assert report.deterministic_ratios(found) == {case: 0.75}
    text = report.markdown({"2026-01-01_made": found}, benchmark.__doc__)
    assert "| case | ours | ours_det | ours_det / ours |" in text
    assert f"| {case} | 200 (2) | 150 (2) | 0.75 |" in text and "| 200 (2) | - | - |" in text
    assert report.deterministic_ratios(MADE) == {}


def test_lines_run_over_lengths():
    ours = next(line for line in report.lines(MADE, "fwd") if line.name == "ours")
    assert (ours.panel, ours.lengths, ours.tflops) == ("D64 full N4", (512, 1024), (100, 300))
    assert [(line.panel, line.name) for line in report.lines(MADE, "bwd")] == [
        ("D64 full N4", "ours"),
        ("D64 full N4", "cudnn"),
    ]


def test_the_page_has_every_number_and_every_reason():
    text = report.markdown({"2026-01-01_made": MADE}, benchmark.__doc__)
    assert "| D64 full S1024 B1 N4 | 300 (1) | 200 (1) | 150 (1) | 1.50 |" in text
    assert "| D64 full S1024 B1 N4 | 200 (2) | 400 (2) | 0.50 |" in text
    assert "| D64 causal S512 B2 N4 | - | 90 (1) | - | - |" in text
    assert "faster than the best peer in 1 of 1 cases" in text and "faster than the best peer in 0 of 1" in text
    assert "ours: Unsupported: no such kernel" in text and "Implementations take turns" in text


def test_reports_are_listed_newest_first_and_other_files_passed_over(tmp_path):
    for stem, date in (("a", "2026-01-02"), ("b", "2026-01-03"), ("c", "2026-01-01")):
        (tmp_path / f"{stem}.json").write_text(json.dumps(MADE | {"machine": MADE["machine"] | {"date": date}}))
    (tmp_path / "d.json").write_text('{"losses": [1, 2]}')
    (tmp_path / "e.json").write_text("[]")
    assert list(report.reports_in(tmp_path)) == ["b", "a", "c"]


def test_a_report_is_drawn_again_from_its_json(tmp_path, capsys):
    from matplotlib import image

    assert cli.main(["benchmark", "--from-json", str(FIRST), "--plots", str(tmp_path)]) == 0
    found = json.loads(FIRST.read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(report.plot_names(found, FIRST.stem))
    for path in tmp_path.iterdir():
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 300 and (pixels[..., :3].std(axis=-1) > 0.1).mean() > 2e-4, (
            path
        )  # coloured lines
    text = capsys.readouterr().out
    assert all(r["case"] in text for r in found["rows"]) and "matmul 8192^3: 701" in text


def test_plots_show_the_reports_numbers():
    found = json.loads(FIRST.read_text())
    figure = report._rates(found, report.lines(found, "fwd"), "fwd")
    drawn = {}
    for axes in figure.axes:
        for container in axes.containers:
            drawn[axes.get_title(), container.get_label()] = list(container.lines[0].get_ydata())
    assert len(drawn) == 8
    for r in found["rows"]:
        assert r["fwd_tflops"] in drawn[Case.from_label(r["case"]).kind, r["name"]]


def test_performance_md_is_up_to_date():
    """If it fails: python -m jax_fa4 benchmark --docs docs."""
    reports = report.reports_in(DOCS / "measured")
    assert FIRST.stem in reports
    page = (DOCS / "performance.md").read_text()
    assert page == report.markdown(reports, benchmark.__doc__)
    images = re.findall(r"\]\((plots/[^)]+)\)", page)
    assert len(images) == sum(len(report.plot_names(r, stem)) for stem, r in reports.items())
    assert all((DOCS / name).is_file() for name in images)


def test_code_in_performance_md_runs():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "performance.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "performance.md", "exec"), {})


def test_the_example_takes_the_same_arguments(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import importlib.util

    spec = importlib.util.spec_from_file_location("example_benchmark", ROOT / "examples" / "benchmark.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr("sys.argv", ["benchmark.py", "--from-json", str(FIRST)])
    assert example.main() == 0 and "D128 causal S16384 B1 N16" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["benchmark.py", "--one"])
    assert example.main() == 2
