"""Timing attention against its peers on one GPU: one protocol, used by the command line and by every number we publish.

Protocol
  * Every implementation gets the same inputs: `SETS` independent sets of normal random values (bf16 or fp16), never
    zeros, one after the other, so that a repeat does not find its operands in the L2 cache.
  * One timed program runs the call once on each set, jitted as a whole: launch and dispatch cost is shared by the
    sets. Programs are compiled and run `WARM` times before the clock starts; compilation is never inside.
  * One sample = queue the program until it fills at least `SAMPLE_SECONDS`, wait for the last result, divide.
    Implementations take turns, sample by sample, in an order that changes each time: all see the same clocks, and
    each comes equally often after each other (a fixed order moved ratios by up to 5 %), and runs half as long untimed
    before its sample. The median of the samples is the time; the spread is (75 % - 25 % quantile) / median.
  * backward = (forward and backward) - forward, the same for everybody; both take turns with one another too, since a
    difference of times at two clocks is none (forwards first, on a cooler card, made 470 of 450 TFLOP/s, or 412).
  * FLOPs: 4 b n t s d forward (2 (d + v) for unequal depths), 2.5 times that backward, halved for causal masks, and
    the visible share for windows. A plain 8192^3 bf16 matrix product is timed in the same run, first and again last.
  * Packed sequences: peers that take one example a sequence spread them and pack the results, inside the call.
  * Results are compared once with the XLA path before anything is timed; a wrong implementation gets no number.
  * A report is written whole after each case: a run that is cut off leaves what it had, and says how much that is.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import report
from jax_fa4.api import attention, attention_varlen
from jax_fa4.cases import NAMED, Case
from jax_fa4.version import __version__

NAMES = ("ours", "ours_det", "cudnn", "xla", "tokamax")
SETS = 4
WARM = 2
SAMPLE_SECONDS = 0.05
SAMPLES = 7
TOLERANCE = 0.02  # relative L2 against the XLA path: a wrong mask is off by far more, bf16 rounding by 4e-3

Call = Callable[[Any, Any, Any], Any]
Key = TypeVar("Key", bound=Hashable)


def implementations(case: Case, names: list[str]) -> dict[str, Call]:
    """Callables by name: ours, ours_det, cudnn, xla, tokamax (where installed, and it takes the case)."""
    ours, peer = calls(case)
    made: dict[str, Call] = {}
    for name in names:
        if name in ("ours", "ours_det"):
            made[name] = functools.partial(ours, implementation="fa4", deterministic=name == "ours_det")
        elif name in ("cudnn", "xla"):
            made[name] = functools.partial(peer, implementation=name)
        elif name == "tokamax":
            try:
                import tokamax
            except ImportError:
                continue
            window = None if case.window is None else (case.window, 0)
            if not case.packed:
                made[name] = functools.partial(
                    tokamax.dot_product_attention, is_causal=case.causal or window is not None, local_window_size=window
                )
        else:
            raise ValueError(f"unknown implementation {name!r}; there are {', '.join(NAMES)}")
    return made


def calls(case: Case) -> tuple[Any, Any]:
    """(our call, jax.nn's) of q, k, v and implementation."""
    peer: Any = jax.nn.dot_product_attention
    if case.packed:
        return packed_calls(case, peer)
    window = None if case.window is None else (case.window, 0)
    return (
        functools.partial(attention, is_causal=case.causal, local_window_size=window),
        functools.partial(peer, is_causal=case.causal or window is not None, local_window_size=window),
    )


def packed_calls(case: Case, peer: Any) -> tuple[Any, Any]:
    """As `calls`. The peer takes one example a sequence: sequences are spread, and the results packed, inside."""
    lengths = np.array(case.sequences, np.int32)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    longest = int(lengths.max())
    place = np.minimum(np.arange(longest)[None], lengths[:, None] - 1) + cu[:-1, None]  # past a length its last row
    back = np.concatenate([n * longest + np.arange(length) for n, length in enumerate(lengths)])

    def segments(q: Any, k: Any, v: Any, **how: Any) -> Any:
        return attention(q, k, v, is_causal=case.causal, query_segment_ids=ids, key_value_segment_ids=ids, **how)

    def varlen(q: Any, k: Any, v: Any, **how: Any) -> Any:
        how |= {"max_seqlen_q": longest, "max_seqlen_k": longest, "is_causal": case.causal}
        return attention_varlen(q[0], k[0], v[0], cu, cu, **how)[None]

    def spread(q: Any, k: Any, v: Any, **how: Any) -> Any:
        how |= {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "is_causal": case.causal}
        out = peer(*(x[0][place] for x in (q, k, v)), **how)
        return out.reshape(-1, *out.shape[2:])[back][None]

    return varlen if case.packed == "varlen" else segments, spread


def inputs(case: Case) -> list[tuple[Any, Any, Any, Any]]:
    """(q, k, v, dout) for each of the sets."""
    t, k, v = case.queries or case.length, case.kv_heads or case.heads, case.value_depth or case.depth
    shapes = [(t, case.heads, case.depth), (case.length, k, case.depth), (case.length, k, v), (t, case.heads, v)]
    sets: list[Any] = []
    for n in range(SETS):
        keys = jax.random.split(jax.random.key(n), len(shapes))
        sets.append(
            tuple(jax.random.normal(key, (case.batch, *s), case.dtype) for key, s in zip(keys, shapes, strict=True))
        )
    return sets


def forward_of(call: Call) -> Callable[[Any], Any]:
    return jax.jit(lambda sets: [call(q, k, v) for q, k, v, _ in sets])


def both_of(call: Call) -> Callable[[Any], Any]:
    def one(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(call, q, k, v)
        return (out, *back(dout))

    return jax.jit(lambda sets: [one(*s) for s in sets])


def sample(program: Callable[[Any], Any], sets: Any, repeats: int) -> float:
    """Seconds for one call (one set)."""
    start = time.perf_counter()
    for _ in range(repeats):
        last = program(sets)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / repeats / SETS


def time_in_turn(
    programs: dict[Key, Callable[[Any], Any]], sets: Any, samples: int = SAMPLES, seconds: float | None = None
) -> dict[Key, list[float]]:
    """Samples of every program, taken in turn, see `order_of`; of SAMPLE_SECONDS each, or of other ones.

    Before each, the program runs half as long without the clock: at the card's power limit whoever comes behind a slow
    program finds a higher clock, and the limit takes tens of milliseconds to settle.
    """
    seconds = SAMPLE_SECONDS if seconds is None else seconds
    repeats = {}
    for name, program in programs.items():
        for _ in range(WARM):
            jax.block_until_ready(program(sets))
        once = sample(program, sets, 1) * SETS
        repeats[name] = max(1, round(seconds / once))
    found: dict[Key, list[float]] = {name: [] for name in programs}
    for n in range(samples):
        for name in order_of(n, list(programs)):
            sample(programs[name], sets, (repeats[name] + 1) // 2)
            found[name].append(sample(programs[name], sets, repeats[name]))
    return found


def order_of(n: int, names: list[Key]) -> list[Key]:
    """The n-th sample's: E. J. Williams's design (1949), and every other time backwards, so that over twice as many
    samples as there are programs each has every place, and every other one before it, equally often."""
    count = len(names)
    turned = [names[((i + 1) // 2 * (1 if i % 2 else -1) + n // 2) % count] for i in range(count)]
    return turned[::-1] if n % 2 else turned


def error(got: Any, want: Any) -> float:
    """Relative L2 distance, computed on the device in float32."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm((got - want).ravel()) / jnp.maximum(jnp.linalg.norm(want.ravel()), 1e-30))


@dataclass
class Row:
    """What was measured for one case and one implementation."""

    case: str
    name: str
    fwd_us: float = 0.0
    fwd_tflops: float = 0.0
    bwd_us: float = 0.0
    bwd_tflops: float = 0.0
    spread: float = 0.0
    error: float = 0.0
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)


def reference_results(case: Case, sets: Any, backward: bool) -> Any:
    """Results of the XLA path on the first set."""
    call = functools.partial(calls(case)[0], implementation="xla")
    return jax.device_get((both_of if backward else forward_of)(call)(sets[:1])[0])


def measure(case: Case, names: list[str], backward: bool = True, samples: int = SAMPLES) -> list[Row]:
    """Rows for every implementation that takes the case and is right on it."""
    sets = inputs(case)
    want = reference_results(case, sets, backward)
    rows, forwards, boths = [], {}, {}
    for name, call in implementations(case, names).items():
        row = Row(case.label, name)
        rows.append(row)
        try:
            fwd, both = forward_of(call), both_of(call)
            got = both(sets)[0] if backward else (fwd(sets)[0],)
            pairs = zip(got, want if backward else (want,), strict=True)
            row.error = float(np.max([error(a, jnp.asarray(b)) for a, b in pairs]))  # NaN if one is: max() is not
        except Exception as problem:
            row.note = f"{type(problem).__name__}: {str(problem)[:160]}"
            continue
        if not row.error <= TOLERANCE:
            row.note = f"wrong: {row.error:.1e} from the XLA path"
            continue
        forwards[name] = fwd
        boths[name] = both
    programs = {("fwd", name): fwd for name, fwd in forwards.items()}
    programs |= {("both", name): both for name, both in boths.items() if backward}
    times = time_in_turn(programs, sets, samples)
    for row in rows:
        if row.name in forwards:
            _fill(row, case, times["fwd", row.name], times.get(("both", row.name)))
    return rows


def _fill(row: Row, case: Case, fwd: list[float], both: list[float] | None) -> None:
    one = statistics.median(fwd)
    row.fwd_us, row.fwd_tflops = one * 1e6, case.flops / one / 1e12
    quarter = statistics.quantiles(fwd, n=4)
    row.spread = (quarter[2] - quarter[0]) / one
    row.samples = {"fwd": fwd, "both": both or []}
    if both:
        back = statistics.median(both) - one
        row.bwd_us, row.bwd_tflops = back * 1e6, 2.5 * case.flops / back / 1e12


def matmul_tflops(size: int = 8192) -> float:
    """The rate of a plain bf16 matrix product, XLA's own."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    program = jax.jit(lambda s: [s[0] @ s[1]])
    found = time_in_turn({"matmul": program}, (a, b), 3)["matmul"]
    return 2 * size**3 / (statistics.median(found) * SETS) / 1e12


def machine() -> dict[str, Any]:
    """Card, driver, clocks and versions, as far as they can be read."""
    info: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jax_fa4": __version__,
    }
    query = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        ).stdout
        info["nvidia_smi"] = dict(
            zip(query.split(","), [x.strip() for x in text.splitlines()[0].split(",")], strict=True)
        )
    except (OSError, IndexError, ValueError, subprocess.TimeoutExpired):
        info["nvidia_smi"] = None
    return info


def table(rows: list[Row]) -> str:
    lines = [f"{'case':38s} {'who':9s} {'fwd us':>9s} {'TFLOP/s':>8s} {'bwd us':>9s} {'TFLOP/s':>8s} {'error':>8s}"]
    for r in rows:
        note = f"  {r.note}" if r.note else ""
        lines.append(
            f"{r.case:38s} {r.name:9s} {r.fwd_us:9.1f} {r.fwd_tflops:8.0f} {r.bwd_us:9.1f} {r.bwd_tflops:8.0f}"
            f" {r.error:8.1e}{note}"
        )
    return "\n".join(lines)


def standard_cases(args: argparse.Namespace) -> list[Case]:
    """The named ones; or `tokens` in all, 2048 / D heads, full, causal and windows; each also with fewer key heads."""
    made = []
    if args.cases:
        names = list(NAMED) if "all" in args.cases else dict.fromkeys(args.cases)
        cases = [replace(case, dtype=args.dtype) for name in names for case in NAMED[name]]
        return list(dict.fromkeys(cases))
    for depth in args.depths:
        heads = max(1, 2048 // depth)
        bad = [ratio for ratio in args.gqa if ratio < 1 or heads % ratio]
        if bad:
            raise ValueError(f"--gqa {bad[0]} does not divide the {heads} query heads of depth {depth}")
        masks: list[dict[str, Any]] = [{}, {"causal": True}, *({"causal": True, "window": w} for w in args.window)]
        for mask in masks:
            for ratio in args.gqa:
                kv_heads = 0 if ratio == 1 else heads // ratio
                for n in args.lengths:
                    batch = max(1, args.tokens // n)
                    made.append(Case(depth, n, batch, heads, kv_heads, dtype=args.dtype, **mask))
    return made


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depths", type=int, nargs="+", default=[64, 128], metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], metavar="S")
    parser.add_argument("--tokens", type=int, default=16384, help="in all; the batch follows (default: %(default)s)")
    named = f"instead of a sweep of these: all, or of {', '.join(NAMED)}"
    parser.add_argument("--cases", nargs="+", choices=("all", *NAMED), metavar="NAME", help=named)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--gqa", type=int, nargs="+", default=[1], metavar="R", help="query heads for each key head")
    parser.add_argument("--window", type=int, nargs="+", default=[], metavar="W", help="also causal windows of W keys")
    parser.add_argument(
        "--peers", nargs="+", default=["ours", "cudnn"], choices=NAMES, metavar="NAME", help=f"of {NAMES}"
    )
    parser.add_argument("--deterministic", action="store_true", help="also our bitwise reproducible backward")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="at least 2 (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="JSON", help="where the report goes, after each case")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also draw the report, as PNG files")
    parser.add_argument("--from-json", type=Path, metavar="JSON", help="no measuring: print and draw this report")
    parser.add_argument(
        "--docs", type=Path, metavar="DIR", help="no measuring: write performance.md from measured/*.json"
    )


def run(args: argparse.Namespace) -> int:
    """The command's exit code: 0, or 2 where there is nothing to measure or the arguments do not fit."""
    if args.docs:
        for path in report.write_docs(args.docs, __doc__ or ""):
            print(path)
        return 0
    if args.from_json:
        found = json.loads(args.from_json.read_text())
        return _show(found, args, args.from_json.stem)
    if jax.default_backend() != "gpu":
        print(f"benchmark: the backend is {jax.default_backend()}; times are only of interest on a GPU")
        return 2
    if args.samples < 2:
        print(f"benchmark: --samples must be at least 2, for the spread; it is {args.samples}")
        return 2
    try:
        cases = standard_cases(args)
    except ValueError as error:
        print(f"benchmark: {error}")
        return 2
    names = list(dict.fromkeys([*args.peers, *["ours_det"] * args.deterministic]))
    found = take(cases, names, not args.forward_only, args.samples, args.out)
    return _show(found, args, args.out.stem if args.out else "benchmark")


def take(cases: list[Case], names: list[str], backward: bool, samples: int, out: Path | None = None) -> dict[str, Any]:
    """Measures the cases, printing as it goes; the report, as JSON holds it. out: where it is written, case by case."""
    found: dict[str, Any] = {
        "machine": machine(),
        "after": None,
        "matmul_tflops": matmul_tflops(),
        "cases": len(cases),
        "measured": 0,
        "rows": [],
    }
    for case in cases:
        new = measure(case, names, backward and case.queries != 1, samples)  # nobody differentiates a decoding step
        found["rows"] += [asdict(row) for row in new]
        found["measured"] += 1
        found["after"] = machine()
        print(table(new).split("\n", 1)[1], flush=True)
        write(found, out)
    found["matmul_tflops"] = matmul_tflops()  # at the clocks and temperatures that the cases met
    write(found, out)
    return found


def write(found: dict[str, Any], out: Path | None) -> None:
    """The report so far in place of the one before, which stays whole if this is interrupted."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".part")
    beside.write_text(json.dumps(found, indent=1))
    beside.replace(out)


def _show(found: dict[str, Any], args: argparse.Namespace, stem: str) -> int:
    print(table([Row(**r) for r in found["rows"]]))
    for case, ratio in report.deterministic_ratios(found).items():
        print(f"{case:38s} deterministic backward at {ratio:.2f} of the plain one's rate")
    print(f"matmul 8192^3: {found['matmul_tflops']:.0f} TFLOP/s")
    if text := report.cut_off(found):
        print(text)
    if args.plots:
        for path in report.write_plots(found, args.plots, stem):
            print(path)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    raise SystemExit(run(parser.parse_args()))
