"""Writes docs/plans.md from the kernels' plans, and counts cycles of Blackwell forward tiles in the emulator.

python tools/draw_plans.py             # the page: roles, rings, memory, from the plans alone
python tools/draw_plans.py --count     # also counts (needs the CuTe DSL, minutes): docs/measured and docs/plots
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from jax_fa4 import kernels  # noqa: E402
from jax_fa4.spec import AttentionSpec, Problem, Unsupported  # noqa: E402

COUNTS = ROOT / "docs" / "measured" / "blackwell_forward_counts.json"
PICTURE = ROOT / "docs" / "plots" / "blackwell_forward_counts.png"
PAGE = ROOT / "docs" / "plans.md"
DEPTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
KINDS = {"full": AttentionSpec(), "causal": AttentionSpec(band=True)}
ARCHS = {"sm_90a": "Hopper", "sm_100a": "Blackwell"}


def plan(arch: str, direction: str, depths: tuple[int, int], spec: AttentionSpec) -> Any:
    """What runs a bfloat16 problem of this kind, or None."""
    try:
        return kernels.select(Problem(spec, 1, 4096, 4096, 16, 16, *depths, "bfloat16", direction), arch)
    except Unsupported:
        return None


def shown() -> list[tuple[str, Any]]:
    """(title, plan) of the page."""
    found = []
    for arch, name in ARCHS.items():
        for direction, word in (("fwd", "forward"), ("bwd", "backward")):
            for depths in DEPTHS[:2] if arch == "sm_90a" else DEPTHS:
                one = plan(arch, direction, depths, KINDS["causal"])
                d, v = depths
                title = f"{name} {word}, depth {d if d == v else f'{d} and {v}'}, causal"
                sweeps = getattr(one, "sweeps", ())  # a kernel each
                found += [(f"{title}: d{sweep.gradient[1].upper()}", sweep) for sweep in sweeps]
                if one is not None and not sweeps:
                    found.append((title, one))
    return found


# ---- the page ------------------------------------------------------------------------------------------------------


def ring_rows(one: Any) -> list[str]:
    return [
        "| "
        + " | ".join(map(str, (r.name, r.producer, r.consumer, r.stages, r.full, r.empty or "-", r.bytes or "-")))
        + " |"
        for r in one.rings
    ]


def flow(one: Any) -> list[str]:
    """The rings as a mermaid picture: roles are boxes, a ring with its stages is an arrow."""
    lines = ["```mermaid", "flowchart LR", '  memory[("global memory")] --> load']
    for ring in one.rings:
        for producer in ring.producer.split("+"):
            for consumer in ring.consumer.split("+"):
                lines.append(f'  {producer} -->|"{ring.name} x{ring.stages}"| {consumer}')
    last = {"store", "reduce"} & {r.consumer for r in one.rings} or {"compute"} & {r.consumer for r in one.rings}
    return [*lines, *(f'  {role} --> results[("global memory")]' for role in sorted(last) or ["math"]), "```"]


def section(title: str, one: Any) -> list[str]:
    facts = [f"{one.threads} threads", f"{one.smem} bytes of shared memory"]
    if hasattr(one, "registers"):
        facts.append(f"registers a thread {', '.join(map(str, one.registers))}")
    out = [f"## {title}", "", f"{', '.join(facts)}.", "", *flow(one), ""]
    if hasattr(one, "roles"):
        named = {name: f"{w[0]}-{w[-1]}" if len(w) > 1 else f"{w[0]}" for name, w in one.roles.items()}
        spans = [f"{name} {numbers}" for name, numbers in named.items()]
        out += [f"Warps: {', '.join(spans)}.", ""]
    head = "| ring | filled by | drained by | stages | arrivals to fill | to free | bytes a stage |"
    out += [head, "|---|---|---|---|---|---|---|", *ring_rows(one), ""]
    if hasattr(one, "regions"):
        out += ["Tensor memory, columns of 128 lanes:", "", "| region | columns | shares them with |", "|---|---|---|"]
        for r in one.regions:
            first, count, over = r[1], r[2], (r[3] if len(r) > 3 else "") or ""
            out.append(f"| {r[0]} | {first} to {first + count - 1} | {over} |")
        out.append("")
    return out


def by_rule(one: Any) -> dict[str, float]:
    """Cycles of a 128 x 128 tile by the counting rules, for the query tiles of a CTA against the same keys."""
    d, v = one.inner, one.inner_value
    return {
        "tensor": 4 * (d + v),
        "exp": 128 * (128 - one.emulated_columns) / 16,
        "operand reads": 2 * d + (2 * d + 2 * v) / one.ctas,
        "fills": (2 * d + 2 * v) / one.queries / one.ctas,
    }


def counted_rows(report: dict[str, Any]) -> list[str]:
    rows = []
    for name, case in report["cases"].items():
        cells = (
            f"{case['counted'][k]:.0f} ({case['rule'][k]:.0f})" for k in ("tensor", "exp", "operand reads", "fills")
        )
        shared = sum(case["counted"][k] for k in ("operand reads", "fills", "statistics"))
        rows.append(f"| {name} | {' | '.join(cells)} | {shared:.0f} | {case['bound']} |")
    return rows


HEAD = """\
# The plans

<!-- Generated by `python tools/draw_plans.py` from the plans in jax_fa4/kernels; edit nothing here. -->

A plan is all that decides a kernel but its run-time values. These are some of them (bfloat16). A **ring** is a
pipeline of `stages` places: so many arrivals fill a stage (the bytes of a transaction come on top), and so many
free it ("-": a later ring's arrival does, or it is never filled again). [How the kernels work](kernels.md) explains
the roles.
"""
COUNTED = """\
## Cycles of a tile, Blackwell forward

Counted in the emulator ({date}), not measured: no Blackwell card has run them. Cycles that each unit of an SM
is busy for one 128 x 128 tile; in parentheses by the rules: tensor 4 (D + V), exp 128 x (128 - columns on the FMA
pipe) / 16, shared memory bytes / 128. Units work side by side: the longest is a lower bound.

![cycles of a tile by unit](plots/{picture})

| plan | tensor | exp | operand reads | fills by TMA | shared memory in all | longest |
|---|---|---|---|---|---|---|
{rows}

Exp is 8 above the rule: one more for each row, the factor by which a new maximum shrinks older sums. To count
again: `python tools/draw_plans.py --count`.
"""


def page() -> str:
    lines = [HEAD]
    if COUNTS.exists():
        report = json.loads(COUNTS.read_text())
        rows = "\n".join(counted_rows(report))
        lines.append(COUNTED.format(date=report["date"], picture=PICTURE.name, rows=rows))
    for title, one in shown():
        lines += section(title, one)
    return "\n".join(lines).rstrip() + "\n"


# ---- counting ------------------------------------------------------------------------------------------------------


def count() -> dict[str, Any]:
    """Counts of each Blackwell forward plan, beside the rule."""
    import cutlass
    from count import cycles, per_tile

    from jax_fa4.ffi.compile import build
    from jax_fa4.kernels.sm100.fwd.plan import bind

    cases = {}
    for d, v in DEPTHS:
        for kind, spec in KINDS.items():
            one = plan("sm_100a", "fwd", (d, v), spec)
            table = per_tile(one, bind, build(one, keep_ptx=True).ptx, queries=one.span)
            c = cycles(table)
            counted = {"tensor": c["tensor"], "exp": c["exp"], "operand reads": c["mma.read"], "fills": c["tma.write"]}
            counted["statistics"] = c["load.shared"] + c["store.shared"]
            shared = c["mma.read"] + c["tma.write"] + counted["statistics"]
            busy = {"tensor": c["tensor"], "exp": c["exp"], "shared memory": shared}
            name = f"D{d if d == v else f'{d},{v}'} {kind}{', pairs of CTAs' * one.pair}"
            cases[name] = {"counted": counted, "rule": by_rule(one), "bound": max(busy, key=lambda k: busy[k])}
            print(name, {k: round(x, 1) for k, x in counted.items()}, flush=True)
    return {
        "what": "cycles of a 128 x 128 tile of the Blackwell forward, counted in the emulator; measured on no hardware",
        "command": "python tools/draw_plans.py --count",
        "date": datetime.date.today().isoformat(),
        "versions": {"nvidia-cutlass-dsl": cutlass.__version__},
        "cases": cases,
    }


def draw(report: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    names = list(report["cases"])
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    at, width = np.arange(len(names)), 0.26
    counted = lambda key: np.array([report["cases"][n]["counted"][key] for n in names])  # noqa: E731
    rule = lambda key: np.array([report["cases"][n]["rule"][key] for n in names])  # noqa: E731
    axes.bar(at - width, counted("tensor"), width, label="tensor", color="#33658a")
    axes.bar(at, counted("exp"), width, label="exp (MUFU)", color="#f26419")
    base = np.zeros(len(names))
    for key, colour in (("operand reads", "#2f9c5a"), ("fills", "#86bb8d"), ("statistics", "#cfe3d2")):
        axes.bar(at + width, counted(key), width, base, label=f"shared memory: {key}", color=colour)
        base += counted(key)
    marks = {-width: rule("tensor"), 0: rule("exp"), width: rule("operand reads") + rule("fills")}
    for shift, value in marks.items():
        axes.plot(at + shift, value, "_", color="black", markersize=18, label="by the rule" if not shift else None)
    axes.set_xticks(at, [n.replace(", pairs", "\npairs") for n in names])
    axes.set_ylabel("cycles of an SM for a 128 x 128 tile")
    axes.set_title("Blackwell forward: cycles by unit, counted in the emulator (not measured)")
    axes.legend(frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", action="store_true", help="count cycles in the emulator again and draw them")
    if p.parse_args().count:
        report = count()
        COUNTS.write_text(json.dumps(report, indent=1) + "\n")
        draw(report)
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
