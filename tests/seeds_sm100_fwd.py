"""Many schedules of the Blackwell forward in the emulator: `python tests/seeds_sm100_fwd.py --seeds 20 --minutes 60`.

Every case of the list runs under every seed: no error finding, no deadlock, output and log-sum-exp within the error
rule. Three of them run under --many seeds. What was done, also where time ended it, is written to docs/measured, with a
digest of the PTX: the next run goes on where this one ended, and from the start where the PTX is another one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
OUT = ROOT / "docs" / "measured" / "sm100_forward_seeds.json"

from emulated import ptx_of  # noqa: E402
from problems import Case  # noqa: E402
from verifier.ledger import ptx_digest  # noqa: E402

ONE = {"b": 1, "n": 1, "k": 1}
LENGTHS = [(1, 1), (64, 65), (127, 129), (128, 128), (1, 300), (200, 1), (257, 130), (300, 520)]
BANDS = [
    Case("causal_129x127", t=129, s=127, causal=True, **ONE),
    Case("causal_257x257", t=257, s=257, causal=True, **ONE),
    Case("bottom_200x1", t=200, s=1, causal=True, bottom_right=True, **ONE),
    Case("bottom_300x450", t=300, s=450, causal=True, bottom_right=True, **ONE),
    Case("window_0_0", t=140, s=140, window=(0, 0), **ONE),
    Case("window_17_5", t=300, s=300, window=(17, 5), **ONE),
    Case("window_left", t=100, s=300, window=(40, None), causal=True, bottom_right=True, **ONE),
    Case("window_far", t=140, s=70, window=(2, 2), **ONE),
    Case("halves_left_out", t=300, s=400, window=(128, 0), **ONE),
    Case("lengths_window", b=2, t=180, s=190, n=1, k=1, q_lens=(170, 33), kv_lens=(190, 1), window=(20, 3)),
]
KINDS = [
    Case("lengths", b=2, t=180, s=190, n=1, k=1, q_lens=(170, 33), kv_lens=(190, 1)),
    Case("lengths_zero", b=2, t=40, s=140, n=1, k=1, q_lens=(0, 40), kv_lens=(140, 0)),
    Case("heads_4_2", b=1, t=70, s=140, n=4, k=2, causal=True),
    Case("segments", t=150, s=300, segments=3, **ONE),
    Case("segments_disjoint", t=20, s=140, segments=9, **ONE),
    Case("soft_cap", t=130, s=140, soft_cap=5.0, spread=2.0, **ONE),
    Case("sinks", t=65, s=140, sinks=True, **ONE),
    Case("scale_large", t=130, s=200, scale=1.0, **ONE),
    Case("fill_both", t=130, s=200, fill="both", causal=True, **ONE),
    Case("fill_constant", t=130, s=200, fill="constant", **ONE),
]
DEPTHS = [
    Case("d72_40", t=130, s=150, d=72, v=40, **ONE),
    Case("d128", t=300, s=300, d=128, **ONE),
    Case("d128_causal", t=260, s=260, d=128, causal=True, **ONE),
    Case("d192_128_causal", t=140, s=260, d=192, v=128, causal=True, **ONE),
]
BY_16 = [  # O leaves by 16 columns
    Case("segments_cap", b=2, t=150, s=200, n=1, k=1, soft_cap=4.0, segments=3, kv_lens=(200, 130)),
    Case("segments_sinks_d192_104", t=140, s=200, d=192, v=104, sinks=True, segments=3, **ONE),
    Case("decode_cap_sinks", b=1, t=1, s=520, n=4, k=1, soft_cap=4.0, sinks=True),
]
SEVERAL = {"workers": 1}  # one CTA takes all pairs of query tiles
OTHER: list[tuple[Case, dict[str, Any]]] = [
    (Case("again", t=520, s=140, kv_lens=(130,), **ONE), SEVERAL),
    (Case("again_small_ring", t=520, s=300, kv_lens=(270,), **ONE), SEVERAL | {"stage_cap": 2}),
    (Case("decode", b=1, t=1, s=600, n=4, k=1), {}),
    (Case("decode_3", b=1, t=3, s=520, n=3, k=1, causal=True, bottom_right=True, sinks=True, kv_lens=(500,)), {}),
]
CASES: list[tuple[Case, dict[str, Any]]] = [
    *((Case(f"len_{t}x{s}", t=t, s=s, **ONE), {}) for t, s in LENGTHS),
    *((case, {}) for case in (*BANDS, *KINDS, *DEPTHS, *BY_16)),
    *OTHER,
]
MANY = ("len_300x520", "causal_257x257", "again_small_ring")


def passes_each(case: Case, fields: dict, seeds: range, until: float, passes: Callable) -> dict:
    """How many seeds passed before time ended, and the failures' texts."""
    start, done, wrong = time.time(), 0, []
    for seed in seeds:
        if time.time() > until:
            break
        try:
            passes(case, seed=seed, **fields)
            done += 1
        except AssertionError as error:
            wrong.append(f"seed {seed}: {str(error)[:300]}")
    return {"seeds": done, "failed": wrong, "seconds": round(time.time() - start, 1)}


def gone_on(have: dict | None, plan: Any, again: bool) -> dict:
    """What the file has of a case if its PTX is today's, else nothing: schedules of other kernels say nothing."""
    digest = ptx_digest(ptx_of(plan))
    if have is None or again or have.get("ptx") != digest:
        have = {"seeds": 0, "failed": [], "seconds": 0.0}
    return have | {"plan": str(plan), "ptx": digest}


def summary(cases: dict[str, dict]) -> dict[str, int]:
    every = cases.values()
    return {
        "cases": len(every),
        "with 20 seeds or more": sum(x["seeds"] >= 20 for x in every),
        "with 200 seeds or more": sum(x["seeds"] >= 200 for x in every),
        "failed": sum(len(x["failed"]) for x in every),
    }


def main() -> int:
    import test_emulated_sm100 as tests

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these cases; the others of the file stay")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--many", type=int, default=200, help=f"seeds of {', '.join(MANY)}")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--again", action="store_true", help="from seed 0, also where the PTX is the same")
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write, and to go on with")
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes
    report: dict = {
        "what": "Blackwell forward, emulated; no Blackwell card has run it",
        "command": " ".join(["python tests/seeds_sm100_fwd.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {p: importlib.metadata.version(p) for p in ("nvidia-cutlass-dsl", "numpy")},
        "cases": json.loads(args.out.read_text())["cases"] if args.out.exists() else {},
    }
    cases = report["cases"]
    todo = [x for x in CASES if x[0].name in args.names or not args.names]
    for case, fields in todo:
        plan = replace(tests.plan_of(case), **fields)
        cases[case.name] = gone_on(cases.get(case.name), plan, args.again)
    whole = {c.name: args.many if c.name in MANY else args.seeds for c, _ in todo}
    first = [(c, f, min(args.seeds, whole[c.name])) for c, f in todo]
    for case, fields, end in first + [(c, f, whole[c.name]) for c, f in todo if c.name in MANY]:
        one = cases[case.name]
        begin = one["seeds"] + len(one["failed"])
        if begin >= end:
            continue
        more = passes_each(case, fields, range(begin, end), until, tests.passes)
        one |= {name: one[name] + more[name] for name in more}
        one["seconds"] = round(one["seconds"], 1)
        print(case.name, more, flush=True)
        report["in all"] = summary(cases)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(report["in all"] if "in all" in report else summary(cases))
    return int(summary(cases)["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
