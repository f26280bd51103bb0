"""Fuzzes `jax_fa4.attention`; prints the seed and writes its result.

    python tools/fuzz.py --cases 20000 --seed 7                       # small problems on this process's backend
    python tools/fuzz.py --implementation fa4 --jobs 12 --seconds 80  # kernels, on a GPU

The second draws larger problems, from a table that a bounded number of compiled objects serves (--most-plans). They can
be built before, on a machine without a GPU; on the other, set JAX_FA4_STORE=DIR:

    python tools/fuzz.py --implementation fa4 --plans                             # which they are
    python tools/fuzz.py --implementation fa4 --precompile --store DIR --arch sm_90a

Exit code: 0 if every case was right or refused as it should be, 1 if not, 2 if there is nothing to run it on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", type=int, default=20000)
    p.add_argument("--seed", type=int, default=None, help="default: drawn from the clock")
    p.add_argument("--signatures", type=int, default=280, help="most kinds of call that are compiled (default: 280)")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no signature after this time")
    p.add_argument("--out", type=Path, default=Path("fuzz.json"), help="where the result goes (default: fuzz.json)")
    p.add_argument(
        "--implementation",
        choices=("fa4", "xla"),
        help="the larger problems, in kernels or in XLA; judged on the device",
    )
    p.add_argument("--most-plans", type=int, default=60, help="objects that serve all of them (default: 60)")
    p.add_argument("--arch", default="sm_90a", help="whose plans make up the table (default: sm_90a)")
    p.add_argument("--jobs", type=int, default=1, help="processes that share the larger problems (default: 1)")
    p.add_argument("--share", help=argparse.SUPPRESS)  # i/n: what one of these processes does
    p.add_argument("--plans", action="store_true", help="print the plans, run nothing")
    p.add_argument("--precompile", action="store_true", help="build the plans into --store, run nothing")
    p.add_argument("--store", type=Path, metavar="DIR")
    return p.parse_args()


def main() -> int:
    args = arguments()
    if (args.plans or args.precompile or args.jobs != 1) and args.implementation is None:
        print("fuzz: --plans, --precompile and --jobs go with --implementation")
        return 2
    if args.plans or args.precompile:
        return prepare(args)
    seed = time.time_ns() % 2**32 if args.seed is None else args.seed
    return small(args, seed) if args.implementation is None else large(args, seed)


def prepare(args: argparse.Namespace) -> int:
    """The plans of the larger problems, printed or built."""
    from fuzz import device

    from jax_fa4.kernels.common.parts import label

    signatures = device.table(args.most_plans, args.arch)
    plans = device.plans(signatures, args.arch)
    if args.plans:
        print(*(f"{label(plan)}: {plan}" for plan in plans), sep="\n")
    print(f"{len(plans)} plans for {args.arch} serve {len(signatures)} signatures")
    if args.precompile:
        from jax_fa4.ffi.store import Store
        from jax_fa4.precompile import fill

        if args.store is None:
            print("fuzz: --precompile needs --store DIR")
            return 2
        print(fill(plans, [], Store([args.store])))
    return 0


def small(args: argparse.Namespace, seed: int) -> int:
    """All arguments, small problems, this process's backend."""
    from fuzz import runner, shares, trial

    print(f"seed {seed}: {args.cases} cases of at most {args.signatures} signatures", flush=True)
    runner.small_tiles()
    tally, start, cpu, failures = runner.Tally(), time.perf_counter(), time.process_time(), []
    try:
        runner.fuzz(args.cases, seed, trial.table(args.signatures), tally, args.seconds)
    except Exception as error:  # a wrong result, a wrong refusal or a crash: all are what is looked for
        failures.append(shares.told(error))
    seconds = {"cpu_seconds": round(time.process_time() - cpu, 1)}
    command = f"--cases {args.cases} --seed {seed} --signatures {args.signatures}"
    return report(args.out, command, seed, shares.result(tally, failures, None) | seconds, start)


def large(args: argparse.Namespace, seed: int) -> int:
    """The device's table: in this process, or shared out to several."""
    import jax
    from fuzz import device, runner, shares

    if args.implementation == "fa4" and jax.default_backend() != "gpu":
        print(f"fuzz: kernels run on a GPU; the backend is {jax.default_backend()}. --precompile needs none")
        return 2
    signatures, start = device.table(args.most_plans, args.arch)[: args.signatures], time.perf_counter()
    cases = -(-args.cases // len(signatures))
    if args.share:
        i, n = map(int, args.share.split("/"))
        run = runner.Run((args.implementation,), device.judged, shrink=False)
        return int(bool(shares.share(signatures[i::n], cases, seed + i, args.seconds, args.out, run)["failures"]))
    print(f"seed {seed}: {cases} cases of each of {len(signatures)} signatures, {args.jobs} processes", flush=True)
    command = f"--implementation {args.implementation} --cases {args.cases} --signatures {args.signatures}"
    command += f" --seed {seed} --seconds {args.seconds} --most-plans {args.most_plans} --arch {args.arch}"
    found = shares.together(shares.spread([__file__, *command.split()], args.jobs, args.seconds))
    plans = {"plans": len(device.plans(signatures, args.arch)), "device": jax.devices()[0].device_kind}
    return report(args.out, f"{command} --jobs {args.jobs}", seed, found | plans, start)


def report(out: Path, command: str, seed: int, found: dict[str, Any], start: float) -> int:
    """Writes and prints a result; the exit code."""
    import jax

    import jax_fa4

    result = {
        "command": f"python tools/fuzz.py {command}",
        "date": datetime.date.today().isoformat(),
        "versions": {"jax": jax.__version__, "jax_fa4": jax_fa4.__version__, "python": platform.python_version()},
        "backend": jax.default_backend(),
        "seed": seed,
        "right": found["right"],
        "refused": found["refused"],
        "cases": found["right"] + found["refused"],
        **{name: found[name] for name in ("signatures", "plans", "device", "cpu_seconds") if name in found},
        "wall_seconds": round(time.perf_counter() - start, 1),
        "largest_error_over_bound": {k: round(v, 4) for k, v in sorted(found["worst"].items())},
        "refusals": dict(sorted(found["kinds"].items())),
        "failures": found["failures"],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{found['right']} right, {found['refused']} refused, {result['wall_seconds']} s; {out}")
    for failure in found["failures"]:
        print(f"FAILED: {failure}")
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
