"""For owners of a Blackwell data centre GPU (B200, GB200, B300): checks and times every kernel, and writes one report.

    python examples/check_blackwell.py                       # half an hour or so; writes blackwell_report.json
    python examples/check_blackwell.py --only causal --no-times --out mine.json

These kernels have been emulated and in part verified, but have never run on such a GPU: please send the report, be it
right or wrong. Each problem runs in a process of its own and is given up after --seconds, so that one that hangs or
crashes costs one line, not the run. Exit code: 0 all right, 1 something is not, 2 nothing was run (the reason is
printed).

The error rule: against the XLA path in float32 at the highest precision, an error (largest, and root mean square) of at
most twice that of the XLA path in the same 16-bit dtype, plus one rounding of the largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ARCHS = {"10.0": "sm_100a", "10.3": "sm_103a"}
NOT_HERE = 2
FA4 = "fa4"  # what is checked

# name: (b, t, s, n, k, d, v), and what else the call says. Lengths and ids are made from the shapes.
TABLE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    **{
        f"{kind} D{d}{'' if d == v else f',{v}'}": ((2, t, t, 4, 2, d, v), options)
        for d, v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
        for kind, t, options in (
            ("full", 1000, {}),
            ("causal", 777, {"is_causal": True}),
            ("window", 900, {"local_window_size": (200, 30)}),
        )
    },
    "full D128, longer": ((2, 4096, 4096, 8, 8, 128, 128), {}),
    "causal D128, longer": ((1, 8192, 8192, 8, 2, 128, 128), {"is_causal": True}),
    "causal D64, longer": ((2, 4096, 4096, 16, 16, 64, 64), {"is_causal": True}),
    "one query, one key": ((3, 1, 1, 2, 2, 64, 64), {}),
    "bottom-right D128": ((2, 130, 901, 8, 2, 128, 128), {"is_causal": True, "causal_alignment": "bottom_right"}),
    "rows without keys D64": ((2, 500, 70, 2, 1, 64, 64), {"local_window_size": (2, 2)}),
    "lengths D128": ((4, 600, 700, 4, 1, 128, 128), {"lengths": True}),
    "lengths, causal D64": ((4, 600, 700, 4, 1, 64, 64), {"lengths": True, "is_causal": True}),
    "segments D128": ((2, 1500, 1500, 4, 2, 128, 128), {"segments": 5, "is_causal": True}),
    "segments D64": ((2, 1000, 1000, 4, 4, 64, 64), {"segments": 9}),
    "soft cap D128": ((2, 500, 500, 4, 2, 128, 128), {"logits_soft_cap": 5.0, "is_causal": True}),
    "sinks D64": ((2, 500, 500, 8, 1, 64, 64), {"sinks": True, "local_window_size": (127, 0)}),
    "float16 D128": ((2, 777, 777, 4, 2, 128, 128), {"is_causal": True, "dtype": "float16"}),
    "decode D128, 8:1": ((2, 1, 8192, 32, 4, 128, 128), {"lengths": True}),
    "decode D64, 7:1": ((1, 5, 4096, 14, 2, 64, 64), {"is_causal": True, "causal_alignment": "bottom_right"}),
}


def device() -> dict[str, Any]:
    """The GPU and what the kernels are built for; `arch` is None where they are for none, and `why` says so."""
    import jax

    found: dict[str, Any] = {"arch": None, "kind": jax.devices()[0].device_kind, "platform": jax.default_backend()}
    if found["platform"] != "gpu":
        return found | {"why": f"jax sees no CUDA GPU here: its backend is {found['platform']}"}
    capability = str(jax.devices()[0].compute_capability)
    found |= {"arch": ARCHS.get(capability), "capability": capability}
    if found["arch"] is None:
        found["why"] = f"{found['kind']} has compute capability {capability}; this is about {' and '.join(ARCHS)}"
    return found


def operands(shape: tuple[int, ...], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """([q, k, v, cotangent of out] as float32 that the dtype holds, arguments of the call)."""
    import jax.numpy as jnp

    b, t, s, n, k, d, v = shape
    rng, say = np.random.default_rng(0), dict(options)
    dtype = say.pop("dtype", "bfloat16")
    # Gaussian values hide mistakes of a whole channel: each has a mean of its own, and one is large.
    arrays = [rng.normal(size=x) + rng.normal(size=x[-1]) for x in ((b, t, n, d), (b, s, k, d), (b, s, k, v))]
    arrays[0][..., 0] *= 4
    arrays = [jnp.asarray(x, dtype).astype(jnp.float32) for x in (*arrays, rng.normal(size=(b, t, n, v)))]
    if say.pop("lengths", False):
        say["query_seq_lengths"] = jnp.asarray(np.linspace(t, t // 3, b).astype(np.int32))
        say["key_value_seq_lengths"] = jnp.asarray(np.linspace(1, s, b).astype(np.int32))
    if say.pop("sinks", False):
        say["sinks"] = jnp.asarray(rng.normal(size=n), jnp.float32)
    if ids := say.pop("segments", 0):
        for name, length in (("query_segment_ids", t), ("key_value_segment_ids", s)):
            say[name] = jnp.asarray(np.broadcast_to(np.arange(length) * ids // length, (b, length)).astype(np.int32))
    return arrays, say | {"dtype": dtype}


def passes(arrays: list[Any], say: dict[str, Any], dtype: str, implementation: str) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv."""
    import jax

    import jax_fa4

    *qkv, dout = (x.astype(dtype) for x in arrays)

    @jax.jit
    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return jax_fa4.attention(q, k, v, implementation=implementation, return_residual=True, **say)

        (out, lse), back = jax.vjp(call, q, k, v)
        return (out, lse, *back((dout, 0 * lse)))

    found = jax.device_get(both(*qkv, dout))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True))


def judged(got: np.ndarray, exact: np.ndarray, plain: np.ndarray, dtype: str) -> dict[str, Any]:
    """Errors of one result, what is allowed, and whether the rule holds."""
    got, exact, plain = (np.asarray(x).astype(np.float64) for x in (got, exact, plain))
    odd = ~np.isfinite(exact)
    same = bool(np.array_equal(got[odd], exact[odd])) and bool(np.isfinite(got[~odd]).all())
    got, exact, plain = got[~odd], exact[~odd], plain[~odd]
    if not same or not got.size:
        return {"right": same, "not finite": int(np.sum(~np.isfinite(got)))}
    spacing = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}[dtype]
    floor = spacing * max(float(np.abs(exact).max()), 1e-3)
    errors, allowed = {}, {}
    for name, measure in (("largest", lambda x: np.abs(x).max()), ("rms", lambda x: np.sqrt(np.mean(x * x)))):
        errors[name], allowed[name] = float(measure(got - exact)), 2 * float(measure(plain - exact)) + floor
    return {"right": all(errors[x] <= allowed[x] for x in errors), "error": errors, "allowed": allowed}


def check(name: str) -> dict[str, Any]:
    """One problem: forward and gradients by the rule, and the same bits twice where that is promised."""
    import jax

    arrays, say = operands(*TABLE[name])
    dtype = say.pop("dtype")
    with jax.default_matmul_precision("highest"):
        exact = passes(arrays, say, "float32", "xla")
    plain = passes(arrays, say, dtype, "xla")
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "has never run on such a GPU": the reason for this script
        got = passes(arrays, say, dtype, FA4)
        seconds = time.perf_counter() - start
        twice = [passes(arrays, say | {"deterministic": True}, dtype, FA4) for _ in range(2)]
    results = {x: judged(got[x], exact[x], plain[x], "float32" if x == "lse" else dtype) for x in got}
    results |= {f"{x}, deterministic": judged(twice[0][x], exact[x], plain[x], dtype) for x in ("dq", "dk", "dv")}
    bits = {x: bool(np.array_equal(twice[0][x], twice[1][x], equal_nan=True)) for x in got}
    right = all(r["right"] for r in results.values()) and all(bits.values())
    return {"status": "right" if right else "WRONG", "results": results, "same bits": bits, "first call s": seconds}


def timed(label: str) -> dict[str, Any]:
    """One problem of the standard sweep, ours beside cuDNN's."""
    from dataclasses import asdict

    from jax_fa4 import benchmark

    rows = benchmark.measure(sweep()[label], ["ours", "ours_det", "cudnn"])
    print(benchmark.table(rows))
    return {"status": "timed", "rows": [asdict(row) for row in rows], "machine": benchmark.machine()}


def sweep() -> dict[str, Any]:
    """What is timed: 16k tokens, 2048 / D heads."""
    from jax_fa4.benchmark import Case

    made = [Case(d, n, 16384 // n, 2048 // d, causal=causal)
            for d in (64, 128) for causal in (False, True) for n in (1024, 4096, 16384)]  # fmt: skip
    made += [Case(192, 4096, 4, 16, value_depth=128, causal=True), Case(128, 16384, 1, 32, 4, causal=True)]
    made += [Case(128, 8192, 16, 32, 4, queries=1), Case(128, 16384, 1, 16, causal=True, window=1024)]
    return {case.label: case for case in made}


JOBS: dict[str, Callable[[str], dict[str, Any]]] = {"check": check, "time": timed, "device": lambda _: device()}


def here(job: str, name: str, seconds: float) -> dict[str, Any]:
    """One job in this process; what it raises is a line of the report."""
    del seconds
    try:
        return JOBS[job](name)
    except NotImplementedError as refused:  # jax_fa4.Unsupported among them
        return {"status": "no kernel", "why": str(refused)}
    except Exception as problem:
        return {"status": "FAILED", "why": f"{type(problem).__name__}: {str(problem)[:2000]}"}


def in_process(job: str, name: str, seconds: float) -> dict[str, Any]:
    """One job in a process of its own."""
    command = [sys.executable, __file__, "--child", job, name]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"status": "HUNG", "why": f"no answer after {seconds:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"status": "CRASHED", "why": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    return json.loads(lines[-1])


def report(args: argparse.Namespace, run: Callable[[str, str, float], dict[str, Any]] = in_process) -> int:
    """The command's exit code."""
    found = run("device", "-", args.seconds)
    if not found.get("arch"):
        print(f"check_blackwell: nothing was run: {found.get('why', found)}")
        return NOT_HERE
    names = [name for name in TABLE if args.only in name]
    labels = [] if args.no_times else [label for label in sweep() if args.only in label]
    if not names and not labels:
        print(f"check_blackwell: nothing was run: no problem's name has {args.only!r} in it; there are {list(TABLE)}")
        return NOT_HERE
    print(f"{found['kind']}, {found['arch']}: {len(names)} problems to check, {len(labels)} to time", flush=True)
    made: dict[str, Any] = {"what": "jax_fa4 on Blackwell", "device": found, "date": time.strftime("%Y-%m-%d")}
    made |= {"checks": {}, "times": {}}
    for job, kind, todo in (("check", "checks", names), ("time", "times", labels)):
        for name in todo:
            made[kind][name] = one = run(job, name, args.seconds)
            wrong = [x for x, r in one.get("results", {}).items() if not r["right"]]
            wrong += [f"{x} differs between runs" for x, same in one.get("same bits", {}).items() if not same]
            print(f"{name:34s} {one['status']} {one.get('why', '')[:200]} {', '.join(wrong)}".rstrip(), flush=True)
            args.out.write_text(json.dumps(made, indent=1) + "\n")  # after each: what is known survives anything
    bad = [name for kind in ("checks", "times") for name, x in made[kind].items() if x["status"].isupper()]
    print(f"{len(bad)} of {len(names) + len(labels)} not right{': ' * bool(bad)}{', '.join(bad)}. Report: {args.out}")
    return int(bool(bad))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("blackwell_report.json"), help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems with this in their name")
    parser.add_argument("--no-times", action="store_true", help="check only")
    parser.add_argument("--seconds", type=float, default=600, help="for one problem (default: %(default)s)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(here(*args.child, args.seconds)))
        return 0
    return report(args)


if __name__ == "__main__":
    sys.exit(main())
