"""Hopper attention beside its best peers in one run: ours, cuDNN, FlashAttention-4's own kernels, tokamax; a table.

    FA4_PACKAGES=FOLDER python benchmarks/peers.py fill       # where the DSL is: our kernels and theirs into the store
    python benchmarks/peers.py time --out peers.json          # on the GPU; JAX_FA4_STORE names the filled store
    python benchmarks/peers.py table peers.json               # the table of a report again
    python benchmarks/peers.py brief peers.json               # ours over the best peer, as in README.md

Twelve columns: depth 64 and 128, full and causal, 1k, 4k and 16k, bf16, 16,384 tokens in all, 2048 / depth heads.
Inputs, clock, FLOP and order are those of `python -m jax_fa4 benchmark`. Three passes are timed, and all passes of all
implementations take turns: forward; forward and backward; and backward alone, from what the forward saved. "backward"
is the second less the first, as everywhere here; "alone" has only the backward's kernels, and with cuDNN what XLA adds
to such a program: it clears dq, dk, dv and the workspace before each call (78 us at 1k, D128), which it does not where
the forward is in the program too (profiles of both, H200, 2026-11-30). So no rate of cuDNN's is to be read off "alone".

Before anything is timed, out, dq, dk and dv of every implementation, and the gradients of its backward alone, are
compared on the card, over the whole case, with float32 attention in plain XLA, one head at a time; what is wrong gets
no number. FlashAttention-4's kernels (benchmarks/fa4_hopper.py) are behind a custom_vjp like ours; tokamax must take
its Mosaic kernels, at what it chooses by itself for this card. A report is written whole after each case.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fa4_hopper import DEPTHS, Fa4Backward, Fa4Forward

from jax_fa4 import benchmark
from jax_fa4.cases import Case
from jax_fa4.ffi import call

NAMES = ("ours", "cudnn", "fa4", "tokamax", "ours_det")
LENGTHS = (1024, 4096, 16384)
# Short turns: the clock dips by a tenth for a few of 50 ms (H200, 2026-11-30).
SAMPLES, SECONDS = 8, 0.04
PASSES = ("fwd", "both", "alone")
# For what is not timed: XLA's search for float32 products would take longer than anything that is.
UNTUNED = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False"}
RESULTS = {"fwd": ("out",), "both": ("out", "dq", "dk", "dv"), "alone": ("dq", "dk", "dv")}


def columns(depths: list[int], lengths: list[int], tokens: int = 16384) -> list[Case]:
    shapes = [(d, n, causal) for n in lengths for d in sorted(depths, reverse=True) for causal in (False, True)]
    return [Case(d, n, max(1, tokens // n), 2048 // d, causal=causal) for d, n, causal in shapes]


def fa4(causal: bool) -> benchmark.Call:
    """FlashAttention-4's own kernels as a differentiable call of q, k, v."""

    def run(plan: Any, operands: dict[str, Any]) -> dict[str, Any]:
        (b, t, n, _), (_, s, k, _) = operands["q"].shape, operands["k"].shape
        return call.call(plan, call.compiled(plan), operands, {"B": b, "T": t, "S": s, "N": n, "K": k})

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v)[0]

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, dict[str, Any]]:
        saved = {"q": q, "k": k, "v": v}
        made = run(Fa4Forward(q.shape[-1], causal), saved)
        return made["out"], saved | made

    def backward(saved: dict[str, Any], dout: Any) -> tuple[Any, ...]:
        made = run(Fa4Backward(dout.shape[-1], causal), saved | {"dout": dout})
        return made["dq"], made["dk"], made["dv"]

    attend.defvjp(forward, backward)
    return attend


def implementations(case: Case, names: list[str]) -> dict[str, benchmark.Call]:
    """Callables by name, of those that take the case and are installed."""
    made = benchmark.implementations(case, [n for n in names if n != "fa4"])
    if "tokamax" in made:  # nothing of it but its own kernels for this card: NotImplementedError otherwise
        made["tokamax"] = functools.partial(made["tokamax"], implementation="mosaic")
    if "fa4" in names and case.depth in DEPTHS:
        made["fa4"] = fa4(case.causal)
    return {name: made[name] for name in names if name in made}


# ---- what is right ---------------------------------------------------------------------------------------------------


def exact(case: Case) -> Callable[..., tuple[Any, ...]]:
    """(out, dq, dk, dv) of q, k, v, dout in float32: the plain formula, one head after the other."""

    def head(xs: tuple[Any, Any, Any, Any]) -> tuple[Any, ...]:
        q, k, v, dout = (x.astype(jnp.float32) for x in xs)

        def attend(q: Any, k: Any, v: Any) -> Any:
            scores = q @ k.T * case.depth**-0.5
            seen = jnp.tri(*scores.shape, dtype=bool) if case.causal else True
            return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v

        out, back = jax.vjp(attend, q, k, v)
        return (out, *back(dout))

    def every(*xs: Any) -> tuple[Any, ...]:
        b, t, n, d = xs[0].shape
        heads = tuple(x.swapaxes(1, 2).reshape(b * n, t, d) for x in xs)
        with jax.default_matmul_precision("highest"):
            made = jax.lax.map(head, heads, batch_size=max(1, (4096 // t) ** 2))
        return tuple(x.reshape(b, n, t, d).swapaxes(1, 2) for x in made)

    return every


def errors(got: Any, want: dict[str, Any], which: str) -> dict[str, float]:
    """Relative L2 distance of each result of a pass."""
    return {name: benchmark.error(x, want[name]) for name, x in zip(RESULTS[which], got, strict=True)}


# ---- what is timed ---------------------------------------------------------------------------------------------------


def programs(attend: benchmark.Call) -> dict[str, Any]:
    """The passes of an implementation over all sets, jitted; "save" makes what "alone" starts from.

    One set is a jitted function of its own, so that it is traced and lowered once and not once a set.
    """

    @jax.jit
    def forward(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return (attend(q, k, v),)

    @jax.jit
    def both(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        out, back = jax.vjp(attend, q, k, v)
        return (out, *back(dout))

    @jax.jit
    def save(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1]

    @jax.jit
    def alone(back: Any, dout: Any) -> tuple[Any, ...]:
        return back(dout)

    return {
        "fwd": jax.jit(lambda sets: [forward(*s[:3]) for s in sets]),
        "both": jax.jit(lambda sets: [both(*s) for s in sets]),
        "save": jax.jit(lambda sets: [save(*s[:3]) for s in sets]),
        "alone": jax.jit(lambda backs, sets: [alone(b, s[3]) for b, s in zip(backs, sets, strict=True)]),
    }


@dataclass
class Row:
    """What was measured for one case and one implementation. Seconds of one call; error: the worst result's."""

    case: str
    name: str
    seconds: dict[str, float] = field(default_factory=dict)  # fwd, both, alone
    tflops: dict[str, float] = field(default_factory=dict)  # fwd, bwd (both - fwd), alone
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)


def stages(
    attend: benchmark.Call, sets: Any, want: dict[str, Any], row: Row, pool: ThreadPoolExecutor
) -> Iterator[Any]:
    """Three steps to the passes of an implementation as programs of `sets`; the last gives them, None if one is wrong.

    Each hands XLA's slow compiler to the pool, so that all implementations' steps are taken before it is waited for.
    """
    jitted = programs(attend)
    compiling = {name: pool.submit(jitted[name].lower(sets).compile) for name in ("fwd", "both", "save")}
    yield
    made: dict[str, Any] = {name: compiling[name].result() for name in compiling}
    backs = made.pop("save")(sets)
    last = pool.submit(jitted["alone"].lower(backs, sets).compile)
    yield
    alone = last.result()
    made["alone"] = lambda sets: alone(backs, sets)
    for which in PASSES:
        for name, x in errors(made[which](sets)[0], want, which).items():
            row.errors[name] = float(np.max([x, row.errors.get(name, 0.0)]))  # NaN if one is: max() is not
    worst = float(np.max(list(row.errors.values())))
    if not worst <= benchmark.TOLERANCE:
        row.note = f"wrong: {worst:.1e} from float32"
    yield None if row.note else made


def measure(case: Case, names: list[str], samples: int) -> list[Row]:
    """A row for every implementation that takes the case."""
    clock = [time.perf_counter()]
    sets = benchmark.inputs(case)
    settled = jax.jit(exact(case)).lower(*sets[0]).compile(compiler_options=UNTUNED)
    want = dict(zip(RESULTS["both"], jax.block_until_ready(settled(*sets[0])), strict=True))
    clock.append(time.perf_counter())
    takers = implementations(case, names)
    rows = {name: Row(case.label, name) for name in takers}
    with ThreadPoolExecutor(8) as pool:
        steps = {name: stages(attend, sets, want, rows[name], pool) for name, attend in takers.items()}
        for _ in range(3):
            made = {}
            for name, step in steps.items():
                with noting(rows[name]):
                    made[name] = next(step)
            steps = {name: steps[name] for name in made}
    made = {name: one for name, one in made.items() if one is not None}
    clock.append(time.perf_counter())
    every = {(which, name): one[which] for which in PASSES for name, one in made.items()}
    for (which, name), found in benchmark.time_in_turn(every, sets, samples, SECONDS).items():
        rows[name].samples[which] = found
        rows[name].seconds[which] = statistics.median(found)
    for name in made:
        rate(rows[name], case)
    clock.append(time.perf_counter())
    spent = ", ".join(f"{b - a:.1f} s" for a, b in itertools.pairwise(clock))
    print(f"{case.label}: {spent} for float32, compiling and checking, timing", flush=True)
    return list(rows.values())


class noting:
    """What goes wrong with one implementation is its row's note, and the others' business no further."""

    def __init__(self, row: Row):
        self.row = row

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        self.row.note = f"{kind.__name__}: {str(problem)[:200]}"
        return True


def rate(row: Row, case: Case) -> None:
    backward = row.seconds["both"] - row.seconds["fwd"]
    parts = {"fwd": (1.0, row.seconds["fwd"]), "bwd": (2.5, backward), "alone": (2.5, row.seconds["alone"])}
    row.tflops = {name: much * case.flops / seconds / 1e12 for name, (much, seconds) in parts.items()}


# ---- what is told ----------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """TFLOP/s of everybody, then ratios, a column a line; means are geometric, over columns that have all numbers."""
    cases = sorted({r["case"]: None for r in rows}, key=_place)
    names = [name for name in NAMES if any(r["name"] == name and r["tflops"] for r in rows)]
    lines = []
    for which, title in (("fwd", "forward"), ("bwd", "backward"), ("alone", "backward's kernels alone")):
        rates = {c: {r["name"]: r["tflops"][which] for r in rows if r["case"] == c and r["tflops"]} for c in cases}
        made = ratios(rates)
        heads = [*names, *(head for head in next(iter(made.values()), {}))]
        lines.append(f"{title:32s}" + "".join(f"{head:>16s}" for head in heads))
        for case in cases:
            numbers = [f"{rates[case][n]:.0f}" if n in rates[case] else "-" for n in names]
            numbers += ["-" if math.isnan(x) else f"{x:.3f}" for x in made[case].values()]
            lines.append(f"{case:32s}" + "".join(f"{x:>16s}" for x in numbers))
        means = [mean([made[case][head] for case in cases]) for head in heads[len(names) :]]
        texts = ["" for _ in names] + ["-" if math.isnan(x) else f"{x:.3f}" for x in means]
        lines += [f"{'geometric mean':32s}" + "".join(f"{x:>16s}" for x in texts), ""]
    notes = [f"{r['case']} {r['name']}: {r['note']}" for r in rows if r["note"]]
    return "\n".join(lines + notes).rstrip()


def brief(rows: list[dict[str, Any]]) -> str:
    """Ours over the best peer in Markdown: a line for a direction and kind, a column for a length; means geometric."""
    cases = [Case.from_label(label) for label in sorted({r["case"] for r in rows}, key=_place)]
    lengths = sorted({case.length for case in cases})
    lines = [["ours / best peer", *(f"{n // 1024}k" for n in lengths), "mean"], ["---"] * (len(lengths) + 2)]
    for which, title in (("fwd", "forward"), ("bwd", "backward")):
        rates = {
            c.label: {r["name"]: r["tflops"][which] for r in rows if r["case"] == c.label and r["tflops"]}
            for c in cases
        }
        found = {case: ratios(rates)[case.label]["ours/best peer"] for case in cases}
        for depth, causal in dict.fromkeys((case.depth, case.causal) for case in cases):
            here = {c.length: x for c, x in found.items() if (c.depth, c.causal) == (depth, causal)}
            values = [*(here.get(n, math.nan) for n in lengths), mean(list(here.values()))]
            lines.append([f"{title} D{depth} {'causal' if causal else 'full'}", *map(_told, values)])
        lines.append([f"{title}, all", *[""] * len(lengths), _told(mean(list(found.values())))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _told(x: float) -> str:
    """Two places; what is behind is bold, to be seen."""
    return "" if math.isnan(x) else f"{x:.2f}" if round(x, 2) >= 1 else f"**{x:.2f}**"


def ratios(rates: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """By case: ours and the peers over cuDNN, and ours over the best peer. NaN where a number is missing."""
    pairs = {"ours/cudnn": ("ours", "cudnn"), "fa4/cudnn": ("fa4", "cudnn"), "tokamax/cudnn": ("tokamax", "cudnn")}
    found = {}
    for case, of in rates.items():
        made = {head: of.get(a, math.nan) / of.get(b, math.nan) for head, (a, b) in pairs.items()}
        peers = [of[name] for name in ("cudnn", "fa4", "tokamax") if name in of]
        made["ours/best peer"] = of.get("ours", math.nan) / max(peers) if peers else math.nan
        found[case] = made
    return found


def mean(values: list[float]) -> float:
    """Geometric, of those that are there."""
    there = [math.log(x) for x in values if not math.isnan(x)]
    return math.exp(sum(there) / len(there)) if there else math.nan


def _place(label: str) -> tuple[int, bool, int]:
    case = Case.from_label(label)
    return case.depth, case.causal, case.length


# ---- commands --------------------------------------------------------------------------------------------------------


def fill(cases: list[Case], names: list[str]) -> None:
    """Builds what `time` needs into the process's store."""
    from jax_fa4.ffi import bundle, store
    from jax_fa4.precompile import plans_for, wanted

    pairs = []
    for case in cases:
        row = jax.ShapeDtypeStruct((case.batch, case.length, case.heads, case.depth), case.dtype)
        for attend in implementations(case, [name for name in names if name.startswith("ours")]).values():
            pairs += wanted(programs(attend)["both"], ([(row,) * 4],), ["sm_90a"])
    plans, refused = plans_for(dict.fromkeys(pairs))
    if refused:
        raise RuntimeError(f"no kernel of ours for {refused}")
    if "fa4" in names:
        plans += [kind(d, causal) for kind in (Fa4Forward, Fa4Backward) for d in DEPTHS for causal in (False, True)]
    bundle.precompile(plans, store.default_store(), jobs=1)


def take(cases: list[Case], args: argparse.Namespace) -> dict[str, Any]:
    """Measures the cases, printing as it goes. What fails, or might not end in time, is named as left."""
    begun = time.perf_counter()
    found: dict[str, Any] = {"machine": machine(), "rows": [], "left": []}
    found["product_tflops"] = [benchmark.matmul_tflops()]
    longest = 0.0
    for case in cases:
        started = time.perf_counter()
        if started - begun + longest > args.seconds:
            found["left"].append(case.label)
            continue
        try:
            new = measure(case, args.names, args.samples)
        except Exception as problem:  # the card's memory, say: the other cases are still worth their time
            found["left"].append(case.label)
            print(f"{case.label}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            continue
        longest = max(longest, time.perf_counter() - started)
        found["rows"] += [asdict(row) for row in new]
        benchmark.write(found, args.out)
        words = [
            f"{r.name} {r.tflops['fwd']:.0f} {r.tflops['bwd']:.0f} {r.tflops['alone']:.0f}" for r in new if r.tflops
        ]
        words += [f"{r.name}: {r.note}" for r in new if r.note]
        print(f"{time.perf_counter() - begun:4.0f} s  {case.label:30s} {', '.join(words)}", flush=True)
    found["product_tflops"].append(benchmark.matmul_tflops())
    found["after"] = machine()
    benchmark.write(found, args.out)
    return found


def machine() -> dict[str, Any]:
    """Card, driver, versions of everybody; what cannot be read is None."""
    import importlib.metadata

    found = benchmark.machine()
    for package in ("jaxlib", "tokamax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("command", choices=("fill", "time", "table", "brief"))
    made.add_argument("report", nargs="?", type=Path, help="for table and brief: a report of time")
    made.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES[:4]))
    made.add_argument("--depths", nargs="+", type=int, choices=DEPTHS, default=list(DEPTHS))
    made.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    made.add_argument("--samples", type=int, default=SAMPLES)
    made.add_argument("--seconds", type=float, default=math.inf, help="no case is begun that might end after these")
    made.add_argument("--out", type=Path, metavar="JSON")
    return made


def main() -> int:
    args = parser().parse_args()
    cases = columns(args.depths, args.lengths)
    if args.command in ("table", "brief"):
        print({"table": table, "brief": brief}[args.command](json.loads(args.report.read_text())["rows"]))
    elif args.command == "fill":
        fill(cases, args.names)
    elif jax.default_backend() != "gpu":
        print(f"the backend is {jax.default_backend()}; times are only of interest on a GPU")
        return 2
    else:
        found = take(cases, args)
        print(table(found["rows"]))
        print(f"8192^3 product before and after: {', '.join(f'{x:.0f}' for x in found['product_tflops'])} TFLOP/s")
        if found["left"]:
            print(f"not measured: {', '.join(found['left'])}")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
