"""The Blackwell owner's command on a machine without one: what it refuses, and all it does with a device that is not
there, the XLA path in its kernels' place. The kernels themselves it has never met."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = ((1, 40, 50, 2, 1, 16, 8), {"is_causal": True})


@pytest.fixture
def script(monkeypatch):
    """The module, with small problems, a device that it takes for a B200, and XLA for the kernels."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import check_blackwell as made

    monkeypatch.setattr(made, "FA4", "xla")
    monkeypatch.setattr(made, "TABLE", {
        "plain": SMALL, "lengths": (SMALL[0], {"lengths": True}), "ids": (SMALL[0], {"segments": 3, "sinks": True}),
    })  # fmt: skip
    monkeypatch.setitem(made.JOBS, "device", lambda _: {"arch": "sm_100a", "kind": "not a B200"})
    return made


def arguments(tmp_path, **more):
    return argparse.Namespace(**{"out": tmp_path / "r.json", "only": "", "no_times": True, "seconds": 9.0, **more})


def test_without_such_a_gpu_it_says_why(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/check_blackwell.py"), "--out", str(tmp_path / "r.json")],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and "no CUDA GPU here: its backend is cpu" in done.stdout, done
    assert not (tmp_path / "r.json").exists()


def test_what_is_right_is_reported_right(script, tmp_path, capsys):
    assert script.report(arguments(tmp_path), script.here) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert {x["status"] for x in found["checks"].values()} == {"right"} and len(found["checks"]) == 3
    assert set(found["checks"]["plain"]["results"]) > {"out", "lse", "dq", "dk", "dv"}
    assert "0 of 3 not right" in capsys.readouterr().out


def spoil(script, monkeypatch, change):
    """Only what stands for the kernels is changed."""
    real, calls = script.passes, []

    def passes(arrays, say, dtype, implementation):
        found = real(arrays, say, dtype, implementation)
        calls.append(dtype)
        return change({k: np.array(x) for k, x in found.items()}, len(calls)) if len(calls) > 2 else found

    monkeypatch.setattr(script, "passes", passes)


CHANGES = {
    "a row off by 3 %": lambda r, n: r["out"].__setitem__((0, 3), r["out"][0, 3] * np.float32(1.03)),
    "a NaN gradient": lambda r, n: r["dk"].__setitem__((0, 0, 0, 0), np.nan),
    "lse off by 1e-3": lambda r, n: r["lse"].__iadd__(np.float32(1e-3)),
    "other bits the second time": lambda r, n: r["dq"].__setitem__((0, 5, 0, 0), np.nextafter(r["dq"][0, 5, 0, 0], 9))
    if n == 5 else None,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_wrong_is_reported(script, monkeypatch, tmp_path, name):
    spoil(script, monkeypatch, lambda r, n: [r, CHANGES[name](r, n)][0])
    assert script.report(arguments(tmp_path, only="plain"), script.here) == 1
    assert json.loads((tmp_path / "r.json").read_text())["checks"]["plain"]["status"] == "WRONG"


def test_refusals_and_errors_are_lines_of_the_report(script, monkeypatch, tmp_path):
    def passes(arrays, say, dtype, implementation):
        raise (NotImplementedError("no such kernel") if "sinks" in say else ValueError("launch failed"))

    monkeypatch.setattr(script, "passes", passes)
    assert script.report(arguments(tmp_path), script.here) == 1
    found = json.loads((tmp_path / "r.json").read_text())["checks"]
    assert found["ids"] == {"status": "no kernel", "why": "no such kernel"}
    assert found["plain"]["status"] == "FAILED" and "launch failed" in found["plain"]["why"]


def test_a_process_that_hangs_or_dies_costs_one_line(script, tmp_path):
    assert script.in_process("check", "plain", 0.05)["status"] == "HUNG"
    dead = script.in_process("nonsense", "plain", 60)
    assert dead["status"] in ("CRASHED", "FAILED") and "KeyError" in dead["why"]


def test_nothing_by_that_name(script, tmp_path, capsys):
    assert script.report(arguments(tmp_path, only="nonsense"), script.here) == 2
    assert "'nonsense'" in capsys.readouterr().out


def test_the_table_has_every_kind_that_the_kernels_take(script):
    """And its problems are calls that the API takes."""
    import importlib

    table = importlib.reload(script).TABLE
    words = " ".join(table)
    assert all(x in words for x in ("full", "causal", "window", "lengths", "segments", "soft cap", "sinks", "decode"))
    assert {shape[5] for shape, _ in table.values()} == {64, 96, 128, 192, 256}
    assert {label.split()[0] for label in script.sweep()} >= {"D64", "D128", "D192,128"}
