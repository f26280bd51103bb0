"""The matrix on another machine: what is packed is judged there with nothing of ours, and taken here if it is whole."""

import json
import lzma
import os
import subprocess
import sys

import pytest
from micro import build
from verifier import elsewhere, ledger, matrix, run, runs
from verifier.mutate import drop_wait

NAME = "fwd D64 band: no keys"  # the cheapest of all: nothing is visited
WHY = run.missing() or build.missing()


def _judge(folder, *numbers):
    """As on the other machine: no path leads to the repository."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(folder / "judge_folder.py"), *map(str, numbers)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(bool(WHY), reason=WHY or "-")
def test_a_run_is_packed_judged_and_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.json")
    one = [r for r in runs.runs() if r.name == NAME]
    monkeypatch.setattr(runs, "runs", lambda: iter(one))
    folder = tmp_path / "packed"

    elsewhere.pack(folder, ["fwd D64 band"])
    index = json.loads((folder / "index.json").read_text())
    assert list(index) == [NAME] and list(index[NAME]["files"]) == ["forward"]
    assert _judge(folder, 150, 1, 140).startswith("1 of 1 kernels judged")
    elsewhere.take(folder)
    entry = ledger.read()["runs"][NAME]
    assert ledger.safe(entry) and "stale" not in matrix.aged(entry, one[0])
    assert "0 of 0 kernels" in _judge(folder, 150, 1, 140), "judged twice"
    elsewhere.pack(tmp_path / "again", [])
    assert json.loads((tmp_path / "again" / "index.json").read_text()) == {}, "it has a verdict of today's PTX"

    # a fault in what was packed is a verdict too, and the ledger says so
    ptx = folder / index[NAME]["files"]["forward"][0]
    ptx.write_bytes(lzma.compress(drop_wait(0)(lzma.decompress(ptx.read_bytes()).decode()).encode()))
    results = folder / "results.jsonl"
    results.unlink()
    _judge(folder, 150, 1, 140)
    elsewhere.take(folder)
    assert ledger.read()["not proved"] == [NAME], results.read_text()

    # of two kernels one is judged: the run is none yet
    index[NAME]["files"]["another"] = index[NAME]["files"]["forward"]
    (folder / "index.json").write_text(json.dumps(index))
    ledger.LEDGER.unlink()
    elsewhere.take(folder)
    assert ledger.read()["runs"] == {}

    # where the verifier itself fails nothing is known: it is judged again, and an older folder's word is not taken
    del index[NAME]["files"]["another"]
    (folder / "index.json").write_text(json.dumps(index))
    ptx.write_bytes(b"no archive")
    results.unlink()
    _judge(folder, 150, 1, 140)
    assert results.read_text() == ""
    results.write_text(json.dumps({"run": NAME, "kernel": "forward", "result": "tool_failure"}))
    elsewhere.take(folder)
    assert ledger.read()["runs"] == {}
