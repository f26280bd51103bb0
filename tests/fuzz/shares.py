"""A run of the device's table, alone or as one of several processes, each with its share of the signatures.

A process writes its result before each signature, so that of one that hangs or dies it is known where.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from fuzz import device, runner
from fuzz.trial import Signature

GRACE = 60  # seconds after its time in which a process must have ended: the last signature's programs


def share(
    signatures: tuple[Signature, ...], cases: int, seed: int, seconds: float, out: Path, run: runner.Run
) -> dict[str, Any]:
    """Runs the signatures one after the other, each to its first failure and no longer than its part of `seconds`."""
    end, failures = time.monotonic() + seconds, []
    tally = runner.Tally()
    for i, sig in enumerate(signatures):
        out.write_text(json.dumps(result(tally, failures, repr(sig))))
        device.poison()
        try:
            now = time.monotonic()
            runner.rounds(cases, seed + i, sig, tally, run, now + (end - now) / (len(signatures) - i))
        except Exception as error:
            failures.append(told(error))
            if isinstance(
                error, jax.errors.JaxRuntimeError
            ):  # a crash: nothing after it on this device is to be trusted
                break
        if time.monotonic() > end:
            break
    made = result(tally, failures, None)
    out.write_text(json.dumps(made))
    return made


def told(error: Exception) -> str:
    notes = "\n".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}\n{notes}"


def result(tally: runner.Tally, failures: list[str], running: str | None) -> dict[str, Any]:
    """A tally as JSON holds it."""
    found = asdict(tally) | {"signatures": len(tally.signatures), "kinds": dict(tally.kinds)}
    return found | {"failures": failures, "running": running}


def spread(arguments: list[str], jobs: int, seconds: float) -> list[dict[str, Any]]:
    """`tools/fuzz.py` with these arguments in `jobs` processes; the result of each, however it ended."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(jobs)]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        children = [
            subprocess.Popen(
                [sys.executable, *arguments, "--share", f"{i}/{jobs}", "--out", str(file)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
            ) for i, file in enumerate(files)
        ]  # fmt: skip
        end = time.monotonic() + seconds + GRACE
        for child, file in zip(children, files, strict=True):
            try:
                text, _ = child.communicate(timeout=min(max(1.0, end - time.monotonic()), 1e6))
                ended = "" if child.returncode in (0, 1) else f"exit status {child.returncode}: {text[-2000:]}"
            except subprocess.TimeoutExpired:
                child.kill()
                text, _ = child.communicate()
                ended = f"did not end: {text[-2000:]}"
            one = json.loads(file.read_text()) if file.exists() else result(runner.Tally(), [], "nothing")
            if ended:
                one["failures"].append(f"{ended}\nin {one['running']}")
            found.append(one)
    return found


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all processes as one."""
    worst: dict[str, float] = {}
    kinds: Counter[str] = Counter()
    for one in found:
        kinds.update(one["kinds"])
        for name, ratio in one["worst"].items():
            worst[name] = max(ratio, worst.get(name, 0.0))
    total = {name: sum(one[name] for one in found) for name in ("right", "refused", "signatures")}
    return total | {"worst": worst, "kinds": dict(kinds), "failures": [x for one in found for x in one["failures"]]}
