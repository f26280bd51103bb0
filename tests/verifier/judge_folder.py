"""Judges what `elsewhere.py pack` left in this folder: `python judge_folder.py SECONDS JOBS TIMEOUT`.

Needs Python and sentryward, nothing of ours: a machine with many cores does in minutes what two cores do in hours.
Results go to results.jsonl, a line each as they come; what has one there is not judged again.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEMORY_MIB = 8000
KEPT = ("result", "warning_count", "elapsed_seconds", "peak_rss_mib")


def judged(name: str, kernel: str, files: list[Any], timeout: int) -> dict[str, Any]:
    """What the verifier says of one kernel of a run, as far as the ledger wants it. files: PTX, input, which search."""
    from ask import ask  # beside this file

    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "k.ptx")
        try:
            ptx.write_bytes(lzma.decompress((HERE / files[0]).read_bytes()))
            words = {"timeout_seconds": timeout, "memory_limit_mib": MEMORY_MIB, "every_order": files[2]}
            r = ask(str(ptx), input=str(HERE / files[1]), **words)
        except Exception as error:  # a word about one must not end the others
            r = {"result": "tool_failure", "diagnostics": [{"message": f"{type(error).__name__}: {str(error)[:300]}"}]}
    return {"run": name, "kernel": kernel, **{k: r.get(k) for k in KEPT}, "diagnostics": r.get("diagnostics", [])[:4]}


def main() -> int:
    seconds, jobs, timeout = (int(x) for x in sys.argv[1:4])
    until, out = time.time() + seconds, HERE / "results.jsonl"
    done = set()
    if out.exists():
        done = {(r["run"], r["kernel"]) for r in map(json.loads, out.read_text().splitlines())}
    index = json.loads((HERE / "index.json").read_text())
    todo = [(n, k, f) for n, e in index.items() for k, f in e["files"].items() if (n, k) not in done]

    def one(work: tuple[str, str, list[Any]]) -> dict[str, Any] | None:
        left = int(until - time.time())
        return judged(*work, min(timeout, left)) if left > 5 else None

    found = []
    with ThreadPool(jobs) as pool, out.open("a") as to:
        for r in pool.imap_unordered(one, todo):
            # One that was cut off by the end of all is none: it had less time than it should have had.
            if r is None or (r["result"] == "timeout" and time.time() > until - 5):
                continue
            found.append(r)
            if r["result"] == "tool_failure":  # no word about the kernel: the next call judges it
                print(r, file=sys.stderr)
                continue
            to.write(json.dumps(r) + "\n")
            to.flush()
    kinds = {x: sum(r["result"] == x for r in found) for x in sorted({str(r["result"]) for r in found})}
    print(f"{len(found)} of {len(todo)} kernels judged: {kinds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
