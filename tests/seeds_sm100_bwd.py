"""Many schedules of the Blackwell backward in the emulator: `python tests/seeds_sm100_bwd.py --seeds 20 --minutes 15`.

Every case of the list runs under every seed: all three kernels, no finding, dQ, dK and dV within the error rule. Then
the deterministic form under seeds that order key tiles adversely must give the same bits, and the other form must not.
What was done, also where time ended it, is written to docs/measured; with names, what else stands there stays.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
OUT = ROOT / "docs" / "measured" / "sm100_backward_seeds.json"

from problems import BY_NAME, Case  # noqa: E402

SMALL = {"b": 1, "n": 1, "k": 1}
FULL = [(1, 1), (64, 65), (127, 129), (128, 128), (1, 300), (200, 1), (130, 257)]
BANDS = [
    Case("causal_129x127", t=129, s=127, causal=True, **SMALL),
    Case("causal_257x257", t=257, s=257, causal=True, **SMALL),
    Case("bottom_200x1", t=200, s=1, causal=True, bottom_right=True, **SMALL),
    Case("bottom_70x260", t=70, s=260, causal=True, bottom_right=True, **SMALL),
    Case("window_0_0", t=140, s=140, window=(0, 0), **SMALL),
    Case("window_17_5", t=200, s=200, window=(17, 5), **SMALL),
    Case("window_left", t=100, s=130, window=(40, None), causal=True, bottom_right=True, **SMALL),
    Case("window_right", t=150, s=140, window=(None, 3), **SMALL),
    Case("window_far", t=140, s=70, window=(2, 2), **SMALL),
    Case("window_skips_tiles", t=300, s=300, window=(20, 10), **SMALL),
]
LENGTHS = [
    Case("lengths", t=150, s=140, q_lens=(130,), kv_lens=(90,), **SMALL),
    Case("lengths_one_key", t=80, s=140, q_lens=(70,), kv_lens=(1,), **SMALL),
    Case("lengths_no_query", t=40, s=140, q_lens=(0,), kv_lens=(140,), **SMALL),
    Case("lengths_no_key", t=140, s=40, q_lens=(140,), kv_lens=(0,), **SMALL),
    Case("lengths_bottom", t=150, s=160, causal=True, bottom_right=True, q_lens=(129,), kv_lens=(127,), **SMALL),
    Case("two_examples", b=2, t=130, s=140, n=1, k=1, q_lens=(130, 33), kv_lens=(140, 129)),
]
# No keys with a common mean or outlying channels but fill_both: there dQ breaks the error rule by what the rounding of
# `out` takes, see test_keys_with_a_mean_lose_what_the_rounding_of_out_takes.
KINDS = [
    Case("heads_2_1", b=1, t=70, s=140, n=2, k=1),
    Case("heads_4_2_causal", b=1, t=130, s=70, n=4, k=2, causal=True),
    Case("segments", t=150, s=150, segments=3, **SMALL),
    Case("segments_causal", t=200, s=200, segments=4, causal=True, **SMALL),
    Case("segments_disjoint", t=20, s=140, segments=9, **SMALL),
    Case("soft_cap", t=130, s=140, soft_cap=5.0, spread=2.0, **SMALL),
    Case("sinks", t=65, s=140, sinks=True, **SMALL),
    Case("scale_large", t=130, s=64, scale=1.0, **SMALL),
    Case("fill_both", t=130, s=130, fill="both", causal=True, **SMALL),
]
DEPTHS = [
    Case("d8_24", t=130, s=130, d=8, v=24, **SMALL),
    Case("d72_40", t=130, s=150, d=72, v=40, **SMALL),
    Case("d128_causal", t=260, s=130, d=128, causal=True, **SMALL),
    Case("d128_window", t=200, s=200, d=128, window=(60, 10), **SMALL),
    Case("d192_128_causal", t=140, s=130, d=192, v=128, causal=True, **SMALL),
    Case("d136_16", t=130, s=140, d=136, v=16, **SMALL),
    Case("d64_192", t=130, s=70, d=64, v=192, **SMALL),
]
CASES = [*(Case(f"len_{t}x{s}", t=t, s=s, **SMALL) for t, s in FULL), *BANDS, *LENGTHS, *KINDS, *DEPTHS]
# Four key tiles add to each query tile; of pairs three, as two numbers have one sum.
ORDERED = Case("many_keys", t=64, s=450, **SMALL)
ORDERED_PAIR = Case("many_keys_pair", t=64, s=600, d=128, **SMALL)
ORDERED_CAUSAL = replace(BY_NAME["causal_1000"], name="many_keys_causal", t=300, s=300)


LOOSE = 8  # seeds of the form without an order


def passes_each(case: Case, seeds: range, until: float, passes: Callable) -> dict:
    """How many seeds passed before time ended, and the first failure's text."""
    start, done, wrong = time.time(), 0, []
    for seed in seeds:
        if time.time() > until:
            break
        try:
            passes(case, "float16" if seed % 2 else "bfloat16", seed, resident=1 + seed % 4)
            done += 1
        except AssertionError as error:
            wrong.append(f"seed {seed}: {str(error)[:300]}")
    return {"seeds": done, "failed": wrong, "seconds": round(time.time() - start, 1)}


def bits_each(case: Case, seeds: range, until: float, run: Callable, deterministic: bool) -> dict:
    """How many different results (float32 dQ before rounding, dQ, dK, dV, bit by bit) the seeds gave."""
    found: dict[str, int] = {}
    for seed in seeds:
        if time.time() > until:
            break
        made = hashlib.sha256(run(case, seed, deterministic)).hexdigest()[:16]
        found[made] = found.get(made, 0) + 1
    return {"deterministic": deterministic, "seeds": sum(found.values()), "different results": len(found)}


def bits_of(case: Case, seed: int, deterministic: bool) -> bytes:
    """What a call leaves in dQ, its float32 sums, dK and dV."""
    import test_emulated_sm100_bwd as single
    import test_emulated_sm100_bwd_pair as pairs

    if case is ORDERED_PAIR:
        return pairs.bits(pairs.backward(pairs.plan_of(case, ordered=deterministic), case, seed, resident=6)[2])
    return single.bits(single.backward(single.plan_of(case, deterministic=deterministic), case, seed, resident=4)[2])


def compared(report: dict, wanted: list[str], orders: int, until: float) -> None:
    """The comparisons of bits that `wanted` names, into the report."""
    for case in (ORDERED_PAIR, ORDERED, ORDERED_CAUSAL):
        if not {"bits", case.name} & {*wanted}:
            continue
        for deterministic, seeds in ((True, orders), (False, LOOSE)):
            name = f"{case.name}, {'deterministic' if deterministic else 'not deterministic'}"
            report["bits"][name] = bits_each(case, range(seeds), until, bits_of, deterministic)
            print(name, report["bits"][name], flush=True)


def main() -> int:
    import test_emulated_sm100_bwd as tests

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases, or `bits` or one of its cases; all of them without any")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--orders", type=int, default=50, help="seeds of the comparison of bits")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write")
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes
    old = json.loads(args.out.read_text()) if args.names and args.out.exists() else {}
    wanted = args.names or ["bits", *(case.name for case in CASES)]
    report: dict = {
        "what": "Blackwell backward (one CTA a key tile; bits of pairs too), emulated; no Blackwell card has run it",
        "commands": [*old.get("commands", []), " ".join(["python tests/seeds_sm100_bwd.py", *sys.argv[1:]])],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {p: importlib.metadata.version(p) for p in ("nvidia-cutlass-dsl", "numpy")},
        "bits": old.get("bits", {}),
        "cases": old.get("cases", {}),
    }
    compared(report, wanted, args.orders, until)
    for case in (case for case in CASES if case.name in wanted):
        report["cases"][case.name] = passes_each(case, range(args.seeds), until, tests.passes)
        print(case.name, report["cases"][case.name], flush=True)
    save(report, args.seeds, args.out)
    return 1 if report["total"]["failed"] else 0


def save(report: dict, seeds: int, out: Path) -> None:
    """With the sums, and without the cases that time left out."""
    report["cases"] = {name: case for name, case in report["cases"].items() if case["seeds"] or case["failed"]}
    done = [c for c in report["cases"].values() if c["seeds"] == seeds]
    report["total"] = {"cases": len(CASES), "with all seeds": len(done)}
    report["total"] |= {"runs": sum(c["seeds"] for c in report["cases"].values())}
    failed = sum(len(c["failed"]) for c in report["cases"].values())
    report["total"] |= {"failed": failed}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(report["total"])


if __name__ == "__main__":
    sys.exit(main())
