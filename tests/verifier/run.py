"""Lets the verifier judge a launch, and says why where it cannot."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import Launch

from verifier.apart import verify
from verifier.describe import binding, kernel_input, normal

VERSION = "0.1.1"
MEMORY_MIB = 8000


def missing(equality: bool = False) -> str:
    """Why the tier cannot run here; empty if it can."""
    if importlib.util.find_spec("sentryward") is None:
        return f"sentryward is not installed: pip install 'sentryward=={VERSION}' (extra `verify`)"
    if equality and importlib.util.find_spec("torch") is None:
        return "equality proofs need torch, a CPU build is enough: pip install torch"
    return ""


@dataclass(frozen=True)
class Verdict:
    """What the verifier said. `result` alone decides, never the exit code."""

    result: str
    warnings: int
    found: tuple[str, ...]  # code and text of the first findings
    seconds: float
    peak_mib: float
    checks: Any

    @property
    def safe(self) -> bool:
        """Race-free with no warning: a store by 32 lanes instead of one is race_free with 682,496 warnings."""
        return self.result in ("race_free", "verified") and self.warnings == 0

    @property
    def equal(self) -> bool:
        return self.result == "verified" and self.warnings == 0


@dataclass(frozen=True)
class Reference:
    """A file with `reference(...)`, its results, its operands, and the constants after them."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, float] = field(default_factory=dict)


def judge(
    launch: Launch,
    arm: bool | int | None = None,
    reference: Reference | None = None,
    timeout: int = 900,
    every_order: bool = False,
) -> Verdict:
    """Runs the verifier on one launch. The verdict holds for the arm that was chosen. every_order: see ask.py."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "k.ptx").write_text(normal(launch.ptx))
        (at / "k.json").write_text(json.dumps(kernel_input(launch, arm)))
        more: dict[str, Any] = {"every_order": True} if every_order else {}
        if reference is not None:
            bound = binding(launch, list(reference.inputs), list(reference.outputs), reference.constants)
            (at / "k.bind.json").write_text(json.dumps(bound))
            more |= {"reference": str(reference.path), "reference_binding": str(at / "k.bind.json")}
        words = {"ptx": str(at / "k.ptx"), "input": str(at / "k.json"), **more}
        r = verify(at, **words, timeout_seconds=timeout, memory_limit_mib=MEMORY_MIB)
    return verdict_of(r)


def failed(verdicts: dict[str, Verdict]) -> bool:
    """Whether the verifier itself gave up on one of a call's kernels, which is no word about it."""
    return any(v.result == "tool_failure" for v in verdicts.values())


def verdict_of(r: dict[str, Any]) -> Verdict:
    found = [
        f"{d.get('code')} at {d.get('line') or d.get('source_site')}: {str(d.get('message'))[:300]}"
        for d in r.get("diagnostics", [])[:4]
    ]
    rows = (r.get("equivalence") or {}).get("rows", [])
    declined = [row for row in rows if row.get("status") == "not_proven"]
    if declined:
        why = {str(v) for row in declined for k, v in row.items() if k.endswith("_decline")}
        found.append(f"{len(declined)} of {len(rows)} results not proved, from {declined[0]['family']} on: {why}")
    return Verdict(
        str(r.get("result")),
        int(r.get("warning_count") or 0),
        tuple(found),
        round(float(r.get("elapsed_seconds") or 0), 1),
        round(float(r.get("peak_rss_mib") or 0)),
        r.get("checks"),
    )
