"""The verifier on every kind of Blackwell plan, the most important first: `python tests/verifier/matrix.py`.

Goes on where it was stopped: what has a verdict on the same PTX is not judged again. Verdicts go to docs/measured.

python tests/verifier/matrix.py --list          what there is, what has a verdict
python tests/verifier/matrix.py --age           compiles what sources say has changed; other PTX makes a verdict stale
                                                (--jobs N: so many plans at a time, a process each)
python tests/verifier/matrix.py "bwd D64"       only runs whose name starts so

Some hours on two cores; elsewhere.py lets a machine with more of them do it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from verifier import ledger, run, runs  # noqa: E402
from verifier.kinds import kinds  # noqa: E402

ADDS = "cp.reduce.async.bulk"
WHAT = "The verifier's verdicts on the sm_100a kernels. No Blackwell card has run them."


def digest_of(plan: Any) -> str:
    """Of the PTX of today."""
    return ledger.ptx_digest(runs.built(plan))


def about(r: runs.Run) -> dict[str, Any]:
    """What a verdict is of."""
    return {
        "versions": ledger.versions(),
        "plan": repr(r.plan),
        "code": ledger.code_digest(r.plan.launcher),
        "ptx": digest_of(r.plan),
        "scene": scene_of(r),
        **({"additions": "judged as stores, see tests/verifier/stores.py"} if ADDS in runs.built(r.plan) else {}),
        **({"search": "every order, see tests/verifier/ask.py"} if runs.every_order(r) else {}),
    }


def scene_of(r: runs.Run) -> dict[str, Any]:
    """As JSON has it."""
    return json.loads(
        json.dumps({k: v for k, v in asdict(r.scene).items() if v is not None and k not in ("name", "plan")})
    )


def with_verdicts(entry: dict[str, Any], verdicts: dict[str, run.Verdict]) -> dict[str, Any]:
    """The entry with those of each kernel of the call."""
    short = ("result", "warnings", "seconds", "peak_mib")
    kernels = {name: {k: asdict(v)[k] for k in short} for name, v in verdicts.items()}
    words = {name: list(v.found) for name, v in verdicts.items() if v.found}
    return entry | {"kernels": kernels} | ({"found": words} if words else {})


def judged(r: runs.Run, timeout: int) -> dict[str, Any]:
    """An entry of the ledger."""
    date, verdicts = datetime.datetime.now(datetime.UTC).date().isoformat(), runs.judge(r, timeout=timeout)
    if run.failed(verdicts):  # once, of a process that somebody had killed
        raise RuntimeError(f"the verifier itself failed: {verdicts}")
    return with_verdicts({"date": date, **about(r)}, verdicts)


def aged(entry: dict[str, Any], r: runs.Run | None, digest: Callable = digest_of) -> dict[str, Any]:
    """The entry, marked stale where its PTX is another one by now, or brought up to date where it is not. digest: of
    the PTX of a plan."""
    entry = {k: v for k, v in entry.items() if k != "stale"}
    if r is None:
        return entry | {"stale": "no such run any more"}
    if entry["scene"] != scene_of(r):
        return entry | {"stale": "the scene has changed since"}
    if ledger.same_text(entry, r.plan):
        return entry
    if digest(r.plan) != entry["ptx"]:
        return entry | {"stale": "the PTX has changed since"}
    return entry | {"plan": repr(r.plan), "code": ledger.code_digest(r.plan.launcher)}


def aged_all(entries: dict[str, Any], by_name: dict[str, runs.Run], jobs: int) -> dict[str, Any]:
    """All of them. Each plan whose sources have changed is compiled once, `jobs` at a time."""
    have = {name: by_name[name].plan for name in entries if name in by_name}
    todo = list(dict.fromkeys(plan for name, plan in have.items() if not ledger.same_text(entries[name], plan)))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = dict(zip(todo, pool.map(digest_of, todo), strict=True))
    return {name: aged(entry, by_name.get(name), made.__getitem__) for name, entry in entries.items()}


def written(found: dict[str, Any]) -> dict[str, Any]:
    """The file, with what follows from its runs."""
    entries = dict(sorted(found["runs"].items()))
    sure = {n: e for n, e in entries.items() if not e.get("stale")}
    proved = {name.split(":")[0] for name, entry in sure.items() if ledger.safe(entry)}
    have = kinds()
    whole = {
        "what": WHAT,
        "command": "python tests/verifier/matrix.py",
        "in all": {
            "kinds of plans": len(have),
            "kinds with a verdict": len(proved & set(have)),
            "runs, all race-free without a warning": sum(ledger.safe(e) for e in sure.values()),
            "runs with no verdict": sum(not ledger.safe(e) for e in sure.values()),
            "stale runs": len(entries) - len(sure),
            "seconds of the verifier": round(sum(k["seconds"] for e in sure.values() for k in e["kernels"].values())),
        },
        "open": [kind for kind in have if kind not in proved],
        "not proved": sorted(name for name, entry in sure.items() if not ledger.safe(entry)),
        "runs": entries,
    }
    ledger.LEDGER.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def wanted(every: list[runs.Run], starts: list[str]) -> list[runs.Run]:
    return [r for r in every if not starts or any(r.name.startswith(x) for x in starts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="*", help="only runs whose names start so")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--timeout", type=int, default=900, help="seconds of a kernel")
    parser.add_argument("--rank", type=int, default=1000, help="only runs of this importance, 0 the most, and above")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--age", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="of --age: plans compiled at a time")
    args = parser.parse_args()
    every, found = list(runs.runs()), ledger.read()
    by_name = {r.name: r for r in every}
    todo = [r for r in wanted(every, args.starts) if r.rank <= args.rank]
    if args.list:
        for r in todo:
            entry = found["runs"].get(r.name)
            word = "-" if entry is None else entry.get("stale") or ("safe" if ledger.safe(entry) else "?")
            print(r.rank, r.name, word)
        return 0
    if args.age:
        found["runs"] = aged_all(found["runs"], by_name, args.jobs)
        print(written(found)["in all"])
        return 0
    if run.missing():
        parser.error(run.missing())
    until, wrong = time.time() + 60 * args.minutes, 0
    for r in todo:
        entry = found["runs"].get(r.name)
        if entry is not None:
            entry = aged(entry, r)
        if entry is None or entry.get("stale"):
            if time.time() > until:
                print("time has ended")
                break
            try:
                entry = judged(r, args.timeout)
            except Exception as error:
                print(f"{r.name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
                wrong += 1
                continue
            print(f"{r.name}: {entry['kernels']} {entry.get('found', '')}", flush=True)
            wrong += not ledger.safe(entry)
        found["runs"][r.name] = entry
        written(found)
    print(written(found)["in all"])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
