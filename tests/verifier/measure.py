"""Equality of the Blackwell kernels with attention, and variants' safety: `python tests/verifier/measure.py NAME`.

Without names all cases run (hours on two cores); with names those do, and the file's other entries stay. Kinds of plans
are matrix.py's.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
OUT = ROOT / "docs" / "measured" / "sm100_equality.json"


def entry(case, verdict, ptx) -> dict:
    """What is recorded of a verdict."""
    from verifier import ledger

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {p: importlib.metadata.version(p) for p in ("sentryward", "nvidia-cutlass-dsl")},
        "asked": "equality" if case.equal else "safety",
        "case": {**asdict(case), "sizes": case.sizes, "values": case.values},
        "ptx": ledger.ptx_digest(ptx),
        "verdict": asdict(verdict),
    }


def main() -> None:
    from verifier import cases, gradients, masked, run

    backward = {**gradients.EQUAL, **gradients.OPEN}
    masks = {**masked.EQUAL, **masked.OPEN}
    every = {**cases.QUICK, **cases.LONG, **cases.EQUAL, **cases.OPEN, **masks, **backward}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(every)}")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds a case")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in every]
    if unknown or run.missing():
        parser.error(f"unknown cases {unknown}" if unknown else run.missing())
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in args.names or every:
        case = every[name]
        if name in backward:
            verdict, ptx = gradients.judge(case, timeout=args.timeout), gradients.text(case)
        else:
            judge = masked.judge if name in masks else cases.judge
            verdict, ptx = judge(case, timeout=args.timeout), cases.built(case.plan)
        found[name] = entry(case, verdict, ptx)
        OUT.write_text(json.dumps(found, indent=1, default=str) + "\n")
        print(f"{name}: {verdict}", flush=True)


if __name__ == "__main__":
    main()
