"""The matrix on another machine, which needs many cores and sentryward, but neither the compiler nor this repository.

python tests/verifier/elsewhere.py pack FOLDER "fwd" ...     what has no verdict of today's PTX, of names that start so
python FOLDER/judge_folder.py SECONDS JOBS TIMEOUT            there
python tests/verifier/elsewhere.py take FOLDER                here again: verdicts of that PTX go into the ledger
"""

from __future__ import annotations

import datetime
import hashlib
import json
import lzma
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from verifier import ledger, matrix, run, runs  # noqa: E402
from verifier.describe import chosen_lines, kernel_input, normal  # noqa: E402


def _put(folder: Path, text: str, ending: str) -> str:
    """The name of a file with this text, compressed if it is PTX: many runs share one."""
    name = hashlib.sha256(text.encode()).hexdigest()[:20] + ending
    if not (folder / name).exists():
        data = text.encode()
        (folder / name).write_bytes(lzma.compress(data, preset=3) if ending == ".ptx.xz" else data)
    return name


def packed(r: runs.Run, folder: Path) -> dict[str, Any]:
    """What a verdict on a run is of, and the files of each kernel of the call."""
    files = {}
    for name, one in runs.launched(r).items():
        words = json.dumps(kernel_input(one, r.scene.arm if chosen_lines(one) else None))
        files[name] = [_put(folder, normal(one.ptx), ".ptx.xz"), _put(folder, words, ".json"), runs.every_order(r)]
    return {**matrix.about(r), "files": files}


def pack(folder: Path, starts: list[str]) -> int:
    """The most important runs first in the index, but all scenes of a kind at a time: they share a compile."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("judge_folder.py", "ask.py"):
        shutil.copy(Path(__file__).parent / name, folder)
    known, made, ranks = ledger.read()["runs"], {}, {}
    for r in sorted(matrix.wanted(list(runs.runs()), starts), key=lambda r: r.kind):
        entry = known.get(r.name)
        if entry is not None and "stale" not in matrix.aged(entry, r):
            continue
        try:
            made[r.name], ranks[r.name] = packed(r, folder), r.rank
        except Exception as error:
            print(f"{r.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    made = {name: made[name] for name in sorted(made, key=lambda name: ranks[name])}
    (folder / "index.json").write_text(json.dumps(made))
    print(f"{len(made)} runs, {sum(x.stat().st_size for x in folder.iterdir()) >> 20} MiB")
    return 0


def take(folder: Path) -> int:
    """Runs whose kernels have all been judged, into the ledger."""
    index = json.loads((folder / "index.json").read_text())
    verdicts: dict[str, dict[str, run.Verdict]] = {}
    for r in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        verdicts.setdefault(r["run"], {})[r["kernel"]] = run.verdict_of(r)
    found, date = ledger.read(), datetime.datetime.now(datetime.UTC).date().isoformat()
    taken = 0
    for name, had in verdicts.items():
        entry = {k: v for k, v in index[name].items() if k != "files"}
        if set(had) == set(index[name]["files"]) and not run.failed(had):
            found["runs"][name] = matrix.with_verdicts({"date": date, **entry}, had)
            taken += 1
    print(f"{taken} runs taken, {len(verdicts) - taken} not whole:", matrix.written(found)["in all"])
    return 0


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    sys.exit(pack(where, sys.argv[3:]) if what == "pack" else take(where))
