"""What a benchmark measured, as Markdown and as plots. Reads reports (JSON) only: it measures nothing, needs no GPU."""

from __future__ import annotations

import json
import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = {"ours": "#d1495b", "ours_det": "#edae49", "cudnn": "#00798c", "xla": "#66a182", "tokamax": "#2e4057"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
NEEDED = {"machine", "matmul_tflops", "rows"}

Report = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One curve of a plot: what is the same along it, and its points."""

    panel: str  # depth, mask, heads
    name: str  # implementation
    lengths: tuple[int, ...]
    tflops: tuple[float, ...]
    spread: tuple[float, ...]


def lines(report: Report, direction: str) -> list[Line]:
    """TFLOP/s against length, for each kind of case and implementation that has a number."""
    from jax_fa4.cases import Case

    points: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for row in report["rows"]:
        if row[f"{direction}_tflops"] > 0:
            case = Case.from_label(row["case"])
            spread = row["spread"] if direction == "fwd" else 0.0  # a difference of medians has none
            points[case.kind, row["name"]].append((case.length, row[f"{direction}_tflops"], spread))
    out = []
    for (panel, name), found in points.items():
        lengths, rates, spreads = zip(*sorted(found), strict=True)
        out.append(Line(panel, name, lengths, rates, spreads))
    return out


def is_peer(name: str) -> bool:
    return not name.startswith("ours")


def ratios(report: Report, direction: str) -> dict[str, float]:
    """Our rate over that of the best peer, for each case that both have a number for."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for row in report["rows"]:
        if row[f"{direction}_tflops"] > 0:
            rates[row["case"]][row["name"]] = row[f"{direction}_tflops"]
    out = {}
    for case, found in rates.items():
        peers = [rate for name, rate in found.items() if is_peer(name)]
        if "ours" in found and peers:
            out[case] = found["ours"] / max(peers)
    return out


def deterministic_ratios(report: Report) -> dict[str, float]:
    """The rate of our reproducible backward over that of the plain one, for each case that has both."""
    rates = {(row["case"], row["name"]): row["bwd_tflops"] for row in report["rows"] if row["bwd_tflops"] > 0}
    pairs = {case: (rates.get((case, "ours_det")), rates.get((case, "ours"))) for case, _ in rates}
    return {case: det / plain for case, (det, plain) in pairs.items() if det and plain}


# ---- plots ---------------------------------------------------------------------------------------------------------


def write_plots(report: Report, folder: Path, stem: str) -> list[Path]:
    """PNG files of what the report has: rates and ratios, forward and backward."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for direction in DIRECTIONS:
        drawn = lines(report, direction)
        if not drawn:
            continue
        made.append(_save(_rates(report, drawn, direction), folder / f"{stem}_{direction}.png"))
        if ratios(report, direction):
            made.append(_save(_ratios(report, direction), folder / f"{stem}_{direction}_ratio.png"))
    return made


def plot_names(report: Report, stem: str) -> list[str]:
    """The files that `write_plots` makes, without making them."""
    names = []
    for direction in DIRECTIONS:
        names += [f"{stem}_{direction}.png"] if lines(report, direction) else []
        names += [f"{stem}_{direction}_ratio.png"] if ratios(report, direction) else []
    return names


def _title(report: Report, direction: str) -> str:
    m = report["machine"]
    return f"{DIRECTIONS[direction]}, {m['device']}, {m['date']}, jax {m['jax']}, jax_fa4 {m['jax_fa4']}"


def _length(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _axes_of_lengths(axes: Any, lengths: set[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(lengths), [_length(n) for n in sorted(lengths)])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _rates(report: Report, drawn: list[Line], direction: str) -> Any:
    """One panel for each kind of case; dashed: a plain matrix product in the same run."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(line.panel for line in drawn))
    columns = min(len(panels), 4 if len(panels) % 2 == 0 else 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(1 + 3 * columns, 1 + 2.7 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for n, (panel, axes) in enumerate(zip(panels, grid.flat, strict=False)):
        here = [line for line in drawn if line.panel == panel]
        for line in here:
            bars = [rate * spread / 2 for rate, spread in zip(line.tflops, line.spread, strict=True)]
            axes.errorbar(
                line.lengths,
                line.tflops,
                bars,
                marker="o",
                ms=4,
                capsize=2,
                color=COLOURS.get(line.name),
                label=line.name,
            )
        axes.axhline(report["matmul_tflops"], color="grey", ls="--", lw=1, label="matmul 8192³, same run")
        _axes_of_lengths(axes, {n for line in here for n in line.lengths})
        axes.set_title(panel, fontsize=10)
        axes.set_ylim(bottom=0)
        if n % columns == 0:
            axes.set_ylabel("TFLOP/s")
        if n + columns >= len(panels):
            axes.set_xlabel("length")
    by_label = {}
    for axes in grid.flat[: len(panels)]:
        by_label.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=len(by_label), frameon=False)
    figure.suptitle(_title(report, direction), fontsize=10)
    return figure


def _ratios(report: Report, direction: str) -> Any:
    """Ours over the best peer; above 1 we are faster."""
    from matplotlib.figure import Figure

    from jax_fa4.cases import Case

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    at: dict[str, dict[int, float]] = defaultdict(dict)
    for case, ratio in ratios(report, direction).items():
        at[Case.from_label(case).kind][Case.from_label(case).length] = ratio
    for n, (panel, found) in enumerate(at.items()):
        dashes = "-" if "full" in panel else "--"
        axes.plot(sorted(found), [found[x] for x in sorted(found)], label=panel, marker="osD^v"[n // 10 % 5], ls=dashes)
    axes.axhline(1, color="grey", lw=1)
    _axes_of_lengths(axes, {x for found in at.values() for x in found})
    axes.set_xlabel("length")
    axes.set_ylabel("TFLOP/s, ours / best peer")
    axes.legend(frameon=False, fontsize=9)
    figure.suptitle(_title(report, direction), fontsize=10)
    return figure


def _save(figure: Any, path: Path) -> Path:
    """As PNG, by the Agg canvas that a bare Figure has; without the date and version that would change each time."""
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


# ---- documentation -------------------------------------------------------------------------------------------------

HEAD = """\
# Performance

<!-- Generated from docs/measured/*.json by `python -m jax_fa4 benchmark --docs docs`; edit neither text nor tables. -->

Every number on this page comes from a report in [`docs/measured`](measured), which holds all samples. To measure on
your machine, and to draw what you measured:

```bash
python -m jax_fa4 benchmark --depths 64 128 --lengths 1024 4096 16384 --out mine.json --plots plots
python -m jax_fa4 benchmark --cases all --peers ours cudnn xla --deterministic --out named.json
python -m jax_fa4 benchmark --cases deterministic --peers ours --deterministic --out deterministic.json
python -m jax_fa4 benchmark --from-json mine.json --plots plots
```

"""
FLOPS = """\
## Counting FLOPs

XLA cannot know what a custom call computes: `compiled.cost_analysis()` counts each call of our kernels as -1 FLOP, its
word for unknown, and it reads no attribute of an FFI call that would tell it more. What the XLA path runs is counted as
usual. For a GPU with kernels, `attention_flops` gives what to add: the FLOPs of all attention passes in a traced
function, full squares of scores. JAX's own roofline has a rule for both passes, and counts their bytes too.

```python
import jax
import jax.numpy as jnp
import jax_fa4
from jax_fa4.traced import attention_flops

q = jax.ShapeDtypeStruct((2, 1024, 16, 128), jnp.bfloat16)
loss = lambda q: jax_fa4.attention(q, q, q, is_causal=True).astype(jnp.float32).sum()
assert attention_flops(jax.grad(loss), q) == 7 * 2 * (2 * 16 * 1024 * 1024 * 128)  # 2 products forward, 5 backward

from jax.experimental.roofline import roofline

shapes, cost = roofline(jax.grad(loss))(q)
assert cost.flops == attention_flops(jax.grad(loss), q)
print(cost.flops / cost.hbm_bytes, "FLOPs a byte")
```
"""


def reports_in(folder: Path) -> dict[str, Report]:
    """The benchmark reports by stem, newest first; other JSON files are passed over."""
    found = {}
    for path in folder.glob("*.json"):
        report = json.loads(path.read_text())
        if isinstance(report, dict) and NEEDED <= set(report):
            found[path.stem] = report
    return dict(sorted(found.items(), key=lambda item: (item[1]["machine"]["date"], item[0]), reverse=True))


def write_docs(docs: Path, protocol: str) -> list[Path]:
    """performance.md and its plots, from measured/*.json. `protocol`: the text with the rules of measuring."""
    reports = reports_in(docs / "measured")
    made = []
    for stem, report in reports.items():
        made += write_plots(report, docs / "plots", stem)
    page = docs / "performance.md"
    page.write_text(markdown(reports, protocol))
    return [page, *made]


def markdown(reports: dict[str, Report], protocol: str) -> str:
    """The page's text."""
    rules = textwrap.dedent(protocol.partition("Protocol\n")[2]).strip()
    assert rules, "the benchmark's docstring has no section Protocol"
    parts = [HEAD, "## How it is measured\n\n", rules, "\n\n"]
    for stem, report in reports.items():
        parts.append(_section(stem, report))
    return "".join([*parts, FLOPS])


def cut_off(report: Report) -> str:
    """What is to be said of a report of a run that did not come to its end; "" of a whole one."""
    measured, cases = report.get("measured", 0), report.get("cases", 0)
    return f"The run was cut off: {measured} of {cases} cases." if measured < cases else ""


def _section(stem: str, report: Report) -> str:
    m, after = report["machine"], report.get("after") or {}
    smi, smi_after = m.get("nvidia_smi") or {}, after.get("nvidia_smi") or {}
    out = [f"## {m['device']}, {m['date']}: {stem.split('_', 1)[-1].replace('_', ' ')}\n\n"]
    out.append(f"[`{stem}.json`](measured/{stem}.json): jax {m['jax']}, jax_fa4 {m['jax_fa4']}")
    if smi:
        out.append(
            f", driver {smi['driver_version']}; SM clock {smi['clocks.sm']} at the start,"
            f" {smi_after.get('clocks.sm')} at the end, memory {smi['clocks.mem']}"
        )
    out.append(f". A bf16 matrix product of 8192³ ran at {report['matmul_tflops']:.0f} TFLOP/s in the same run.\n\n")
    if text := cut_off(report):
        out.append(f"{text}\n\n")
    plots = plot_names(report, stem)
    for direction, word in DIRECTIONS.items():
        if text := _table(report, direction):
            out += [f"### {word.capitalize()}\n\n", text]
            out += [f"\n![{word}](plots/{p})\n" for p in plots if p.startswith(f"{stem}_{direction}")]
            out.append("\n")
    notes = [f"* {r['case']}, {r['name']}: {r['note']}\n" for r in report["rows"] if r["note"]]
    if notes:
        out += ["Without a number:\n\n", *notes, "\n"]
    return "".join(out)


def _table(report: Report, direction: str) -> str:
    """TFLOP/s (microseconds) for each case and implementation; "" where the report has none of that direction."""
    rows = [r for r in report["rows"] if r[f"{direction}_tflops"] > 0]
    if not rows:
        return ""
    names = list(dict.fromkeys(r["name"] for r in rows))
    cases = list(dict.fromkeys(r["case"] for r in rows))
    ratio = ratios(report, direction)
    ordered = deterministic_ratios(report) if direction == "bwd" else {}
    found = {(r["case"], r["name"]): f"{r[f'{direction}_tflops']:.0f} ({r[f'{direction}_us']:.0f})" for r in rows}
    head = ["case", *names, *["ours / best peer"] * bool(ratio), *["ours_det / ours"] * bool(ordered)]
    out = ["TFLOP/s (µs). D depth, S length, B batch, N heads (query:key).\n\n"]
    out.append(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}\n")
    for case in cases:
        cells = [case, *(found.get((case, name), "-") for name in names)]
        for column in filter(None, (ratio, ordered)):
            cells.append(f"{column[case]:.2f}" if case in column else "-")
        out.append(f"| {' | '.join(cells)} |\n")
    if ratio:
        mean = math.exp(sum(map(math.log, ratio.values())) / len(ratio))
        faster = sum(x > 1 for x in ratio.values())
        low, high = min(ratio, key=ratio.__getitem__), max(ratio, key=ratio.__getitem__)
        out.append(
            f"\nOurs is faster than the best peer in {faster} of {len(ratio)} cases: {ratio[low]:.2f} times its rate"
            f" ({low}) to {ratio[high]:.2f} times ({high}), {mean:.2f} in the geometric mean. Largest spread of the"
            f" forward samples: {max(r['spread'] for r in rows):.0%}; a difference below it means little.\n"
        )
    return "".join(out)
