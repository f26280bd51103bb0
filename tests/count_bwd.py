"""Clocks of a 128 x 128 tile of the Blackwell backward, counted in the emulator: `python tests/count_bwd.py [--write]`.

Two runs that differ by query tiles are subtracted, so prologue, epilogue and what is done once cancel. By the counting
rules: tensor = 2 M N K / rate, exp = ex2 elements / 16, shared memory = bytes / 128. --write: to docs/measured, and a
picture to docs/plots.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
COUNTS = ROOT / "docs" / "measured" / "blackwell_backward_counts.json"
PICTURE = ROOT / "docs" / "plots" / "blackwell_backward_counts.png"
STATISTICS = 8  # clocks of a tile's 128 LSE and 128 delta on their way into shared memory
PLANS = {
    "D64": (64, 64, False),
    "D128": (128, 128, False),
    "D192,128": (192, 128, False),
    "D128 pair": (128, 128, True),
    "D256": (256, 256, True),
}
PARTS = {
    "operand reads": "#2f9c5a",
    "dS and dQ stored": "#5cb37c",
    "dQ and dS read": "#86bb8d",
    "fills": "#b5d6ba",
    "statistics": "#dcebdd",
}


def chosen(depth: int, value_depth: int, pair: bool) -> tuple[Any, Any, int]:
    """(plan, bind, CTAs that share a query tile's step) of an unmasked bfloat16 call."""
    from jax_fa4.kernels.sm100.bwd import plan as single
    from jax_fa4.kernels.sm100.bwd.pair import plan as pairs
    from jax_fa4.spec import AttentionSpec, Problem

    module = pairs if pair else single
    problem = Problem(AttentionSpec(), 1, 512, 256, 1, 1, depth, value_depth, "bfloat16", "bwd")
    plan = module.choose(problem)
    return plan, importlib.import_module(type(plan).__module__).bind, 2 if pair else 1


def counted(plan: Any, bind: Any, queries: int, keys: int) -> list[Any]:
    """The counters of the main kernel, or of each sweep."""
    from emulated import ptx_of
    from emulator import run
    from launch import launches, to_emulator
    from problems import Case, inputs
    from test_compile_bwd import operands
    from test_emulated_sm100_bwd import empty_outputs

    case = Case("count", b=1, t=queries, s=keys, n=1, k=1, d=plan.depth, v=plan.value_depth)
    given = operands(plan, case, inputs(case, plan.dtype))
    shapes = {"B": 1, "T": queries, "S": keys, "N": 1, "K": 1}
    memory = {b.name: given[b.name] for b in plan.inputs} | empty_outputs(plan, shapes)
    pre, *mains = launches(plan, bind, shapes, ptx_of(plan))
    memory |= run(pre.ptx, to_emulator(pre), dict(memory)).check().outputs
    mains = mains[: len(getattr(plan, "sweeps", "-"))]
    return [run(main.ptx, to_emulator(main, plan.roles), memory).check().counters for main in mains]


def per_tile(plan: Any, bind: Any, ctas: int = 1) -> dict[str, float]:
    """{resource: clocks} of one CTA's tile; of sweeps, of all of them."""
    found = per_sweep(plan, bind, ctas)
    return {name: sum(one[name] for one in found) for name in found[0]}


def per_sweep(plan: Any, bind: Any, ctas: int = 1) -> list[dict[str, float]]:
    """{resource: clocks} of one CTA's tile of each main kernel: of two steps more, of queries or of a sweep's keys."""
    from count import cycles, difference

    own = 128 * ctas
    few, more = counted(plan, bind, 256, own), counted(plan, bind, 512, own)
    keys = counted(plan, bind, 256, 512) if hasattr(plan, "sweeps") else []
    if keys:  # own is 256, so the first run is the same for either side
        more = [k if sweep.by_query else q for sweep, q, k in zip(plan.sweeps, more, keys, strict=True)]
    return [cycles(difference(a, b, 2 * ctas)) for a, b in zip(few, more, strict=True)]


def statistics(plan: Any) -> int:
    """Clocks of statistics on their way into shared memory."""
    return STATISTICS * sum(ring.name == "stats" for main in getattr(plan, "sweeps", (plan,)) for ring in main.rings)


def sorted_out(found: dict[str, float], filled: int = STATISTICS) -> dict[str, float]:
    """Shared memory by what it is used for. Statistics are read by broadcast: 16 bytes a lane, of which a warp's are at
    most 64 different ones, is one wavefront, where the counter counts four. filled: clocks of their way in."""
    return {
        "tensor": found["tensor"],
        "exp": found["exp"],
        "operand reads": found["mma.read"],
        "dS and dQ stored": found["store.shared"] + found["bulk.write"] - filled,
        "dQ and dS read": found["bulk.read"],
        "fills": found["tma.write"],
        "statistics": found["load.shared"] / 4 + filled,
    }


def draw(cases: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    at, width = np.arange(len(cases)), 0.26
    of = lambda key: np.array([case[key] for case in cases.values()])  # noqa: E731
    axes.bar(at - width, of("tensor"), width, label="tensor", color="#33658a")
    axes.bar(at, of("exp"), width, label="exp (MUFU)", color="#f26419")
    base = np.zeros(len(cases))
    for key, colour in PARTS.items():
        axes.bar(at + width, of(key), width, base, label=f"shared memory: {key}", color=colour)
        base += of(key)
    axes.set_xticks(at, list(cases))
    axes.set_ylabel("clocks of an SM for a 128 x 128 tile")
    axes.set_title("Blackwell backward: clocks by unit, counted in the emulator (not measured)")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="to docs/measured and docs/plots")
    args = parser.parse_args()
    cases = {}
    for name, which in PLANS.items():
        one = chosen(*which)
        cases[name] = sorted_out(per_tile(*one), statistics(one[0]))
        shared = sum(cases[name][key] for key in PARTS)
        print(name, {key: round(x) for key, x in cases[name].items()}, "shared memory", round(shared), flush=True)
    if args.write:
        report = {"what": "clocks of a 128 x 128 tile of the Blackwell backward, counted in the emulator, not measured"}
        report |= {"command": "python tests/count_bwd.py --write", "date": datetime.date.today().isoformat()}
        COUNTS.write_text(json.dumps(report | {"cases": cases}, indent=1) + "\n")
        draw(cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
