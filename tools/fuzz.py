"""Fuzzes `jax_fa4.attention`: `python tools/fuzz.py --cases 20000 --seed 7` prints the seed and writes its result."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def main() -> int:
    """0 if every case was right or refused as it should be."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--cases", type=int, default=20000)
    p.add_argument("--seed", type=int, default=None, help="default: drawn from the clock")
    p.add_argument("--signatures", type=int, default=280, help="most kinds of call that are compiled (default: 280)")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no signature after this time")
    p.add_argument("--out", type=Path, default=Path("fuzz.json"), help="where the result goes (default: fuzz.json)")
    args = p.parse_args()
    import jax
    from fuzz import runner, trial

    import jax_fa4

    seed = time.time_ns() % 2**32 if args.seed is None else args.seed
    print(f"seed {seed}: {args.cases} cases of at most {args.signatures} signatures", flush=True)
    runner.small_tiles()
    tally, start, cpu, failure = runner.Tally(), time.perf_counter(), time.process_time(), None
    try:
        runner.fuzz(args.cases, seed, trial.table(args.signatures), tally, args.seconds)
    except Exception as error:  # a wrong result, a wrong refusal or a crash: all are what is looked for
        notes = "\n".join(getattr(error, "__notes__", ()))
        failure = f"{type(error).__name__}: {error}\n{notes}"
    result = {
        "command": f"python tools/fuzz.py --cases {args.cases} --seed {seed} --signatures {args.signatures}",
        "date": datetime.date.today().isoformat(),
        "versions": {"jax": jax.__version__, "jax_fa4": jax_fa4.__version__, "python": platform.python_version()},
        "backend": jax.default_backend(),
        "seed": seed,
        "right": tally.right,
        "refused": tally.refused,
        "cases": tally.right + tally.refused,
        "signatures": len(tally.signatures),
        "wall_seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "largest_error_over_bound": {k: round(v, 4) for k, v in sorted(tally.worst.items())},
        "refusals": dict(sorted(tally.kinds.items())),
        "failure": failure,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{tally.right} right, {tally.refused} refused, {result['wall_seconds']} s; {args.out}")
    if failure:
        print(f"FAILED: {failure}")
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
