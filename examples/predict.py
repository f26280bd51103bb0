"""Predicts sharded attention and a training step on many GPUs from rates measured on one and two of them.

    python examples/predict.py docs/measured/2026-11-29_h200x2_sharding.json --out docs/scaling.md

The model, per forward and backward pass of causal attention over T tokens on P devices:

    step = one(T) / P * imbalance + exposed + call,        one(T) = a T^2 + b T, through two measured lengths

  * imbalance = 1, or (2P - 1) / P with the contiguous layout in the ring and all_gather modes: the last device then
    attends P - 1/2 of the P^2 / 2 blocks of pairs.
  * all_gather and all_to_all wait for their transfers: exposed = bytes sent / rate.
  * the ring computes while it sends: each of its P steps costs max(compute, transfer), a forward step computing
    1 / 3.5 of what both passes do; its last turn of dK and dV waits. Its compute is longer by the share `ring_extra`
    that two GPUs showed (blocks apart, merged outside the kernels, beside running transfers).
  * call = what launching on several devices costs, measured where nothing is computed or sent.

A training step (weak scaling, data x model mesh): the step of one GPU plus all transfers, none of them hidden:
gradients over `data` in float32; activations over `model`, for each layer two sums forward and four backward (those of
the query, key and value projections come apart in the compiled program).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FORWARD = 1 / 3.5  # share of the FLOPs of forward and backward together
Row = dict[str, Any]


@dataclass(frozen=True)
class Fabric:
    """GPUs in hosts: NVLink inside at measured rates, one network card a GPU between them at an assumed rate."""

    host: int = 8
    network: float = 40.0  # GB/s a GPU sends to other hosts: 400 Gb/s, of which four fifths are reached

    def gathering_ms(self, moved_mb: float, rate: float, devices: int, in_host: int) -> float:
        """A gather, scatter or all-reduce: pieces run round every GPU by NVLink, and in and out of each host once."""
        if devices <= in_host:
            return moved_mb / rate
        hosts = devices / in_host
        outside = moved_mb * devices / (devices - 1) * (hosts - 1) / hosts / in_host  # MB a card sends
        return max(moved_mb / rate, outside / self.network)

    def exchange_ms(self, moved_mb: float, rate: float, devices: int) -> float:
        """An all-to-all: what goes to GPUs of other hosts goes by the network."""
        outside = moved_mb * max(0, devices - self.host) / (devices - 1)
        return max((moved_mb - outside) / rate, outside / self.network)

    def turn_ms(self, moved_mb: float, rate: float, devices: int) -> float:
        """One turn of a ring, as fast as its slowest link."""
        return moved_mb / (rate if devices <= self.host else min(rate, self.network))


@dataclass(frozen=True)
class Rates:
    """What was measured on one and two GPUs. Milliseconds, tokens, GB/s sent by a GPU."""

    quadratic: float
    linear: float
    links: dict[str, float]
    call: float
    shapes: dict[str, int]
    ring_extra: float = 0.0
    itemsize: int = 2
    fabric: Fabric = field(default_factory=Fabric)

    @classmethod
    def of(cls, rows: Sequence[Row], shapes: dict[str, int], itemsize: int = 2, ring: bool = True) -> Rates:
        """From rows of `shardmeasure` on one and two GPUs; `ring` takes the ring's extra from its rows on two."""
        ones = sorted((r["length"], r["ms"]) for r in rows if r["what"] == "one GPU" and "batch" not in r)
        links = {r["what"].split()[1]: r["gb_per_s"] for r in rows if r["what"].startswith("link ")}
        if len({length for length, _ in ones}) < 2 or not {"ppermute", "all_gather", "all_to_all"} <= set(links):
            raise ValueError(
                "rates need one GPU at two lengths and the links ppermute, all_gather and all_to_all;"
                f" there are the lengths {[x for x, _ in ones]} and the links {sorted(links)}"
            )
        (short, short_ms), (long, long_ms) = ones[0], ones[-1]
        quadratic = (long_ms / long - short_ms / short) / (long - short)
        quadratic = min(max(quadratic, 0.0), long_ms / long**2)  # neither term below zero
        linear = max(0.0, long_ms / long - quadratic * long)
        links = {"all_reduce": links["all_gather"]} | links
        found = cls(quadratic, linear, links, _call_ms(rows), shapes, itemsize=itemsize)
        rings = [r for r in rows if r["what"] == "ring zigzag"] if ring else []
        extra = [
            (r["ms"] - sequence(found, r["length"], 2, "ring", "zigzag")["ms"]) * 2 / found.one_ms(r["length"])
            for r in rings
        ]
        return replace(found, ring_extra=max(0.0, sum(extra) / len(extra)) if extra else 0.0)

    def one_ms(self, length: int) -> float:
        """Causal attention over `length` tokens on one GPU, forward and backward."""
        return self.quadratic * length**2 + self.linear * length


def _call_ms(rows: Sequence[Row]) -> float:
    """Of a small call on two GPUs, or what a batch cut in two takes beyond half."""
    for row in rows:
        if row["what"] == "small call":
            return max(0.0, row["ms"] - row["one_ms"] / 2)
    whole = next((r["ms"] for r in rows if r["what"] == "one GPU" and "batch" in r), None)
    halved = next((r["ms"] for r in rows if r["what"] == "batch sharded"), None)
    return max(0.0, halved - whole / 2) if whole and halved else 0.0


def possible(mode: str, devices: int, shapes: dict[str, int]) -> bool:
    """Whether the heads allow the mode; only all_to_all asks for anything."""
    n, k = shapes["heads"], shapes["kv_heads"]
    return mode != "all_to_all" or (n % devices == 0 and (k % devices == 0 or devices % k == 0))


def imbalance(mode: str, layout: str, devices: int) -> float:
    """Causal work of the busiest device over that of the mean one."""
    return (2 * devices - 1) / devices if layout == "contiguous" and mode != "all_to_all" else 1.0


def moved_mb(mode: str, devices: int, shapes: dict[str, int], itemsize: int = 2) -> dict[str, float]:
    """MB that one device sends for a sequence of shapes["length"], forward and backward, in either layout.

    The ring's `turn` moves K and V, its `home` dK and dV in float32.
    """
    n, k, d = (shapes[x] for x in ("heads", "kv_heads", "depth"))
    local = shapes["length"] / devices
    kv = 2 * local * k * d / 1e6  # million elements of K and V on one device
    others = devices - 1
    if mode == "all_gather":
        return {"forward": kv * others * itemsize, "backward": kv * others * itemsize}
    if mode == "ring":
        turn, home = kv * itemsize, kv * 4
        return {"forward": turn * others, "backward": turn * others + home * devices, "turn": turn, "home": home}
    share = others / devices
    queries = 2 * n * d * local * share * itemsize / 1e6
    keys = kv * itemsize * (share if k % devices == 0 else others)
    lse = n * local * share * 4 / 1e6
    return {"forward": queries + keys + lse, "backward": queries + keys}


def sequence(rates: Rates, length: int, devices: int, mode: str, layout: str) -> Row:
    """The predicted row of context-parallel attention, named as a measured one."""
    shapes = rates.shapes | {"length": length}
    moved = moved_mb(mode, devices, shapes, rates.itemsize)
    fabric, total = rates.fabric, moved["forward"] + moved["backward"]
    busy = rates.one_ms(length) / devices * imbalance(mode, layout, devices)
    extra = 0.0
    if mode == "ring":
        rate = rates.links["ppermute"]
        turn, home = (fabric.turn_ms(moved[x], rate, devices) for x in ("turn", "home"))
        forward, backward = busy / devices * FORWARD, busy / devices * (1 - FORWARD)
        waits = max(0.0, turn - forward) + max(0.0, turn + home - backward)
        transfer, exposed = (2 * turn + home) * (devices - 1) + home, waits * (devices - 1) + home
        extra = rates.ring_extra * busy
    elif mode == "all_gather":
        transfer = exposed = fabric.gathering_ms(total, rates.links["all_gather"], devices, fabric.host)
    else:
        transfer = exposed = fabric.exchange_ms(total, rates.links["all_to_all"], devices)
    ms = busy + exposed + extra + rates.call
    return {
        "what": f"{mode} {layout}",
        "length": length,
        "ms": ms,
        "efficiency": rates.one_ms(length) / devices / ms,
        "exposed_ms": exposed + extra + rates.call,
        "waiting_ms": exposed,
        "transfer_ms": transfer,
        "moved_mb": total,
    }


def placed(rates: Rates, what: str, row: Row, devices: int, one_ms: float) -> Row:
    """The predicted row of batch- or head-sharded attention; dK and dV are summed where key heads are repeated."""
    k, d = rates.shapes["kv_heads"], rates.shapes["depth"]
    moved = 0.0
    if what == "heads sharded" and k % devices:
        moved = 2 * 2 * (devices - 1) / devices * row["batch"] * row["length"] * k * d * rates.itemsize / 1e6
    exposed = moved / rates.links["all_reduce"] + rates.call
    ms = one_ms / devices + exposed
    return {"what": what, "ms": ms, "efficiency": one_ms / devices / ms, "exposed_ms": exposed, "moved_mb": moved}


@dataclass(frozen=True)
class Model:
    """What the step of a model moves. `tokens` are those of one GPU; `whole` counts weights that are not cut."""

    layers: int
    width: int
    tokens: int
    cut: int
    whole: int
    one_ms: float
    itemsize: int = 2


def model_step(rates: Rates, model: Model, data: int, parts: int) -> Row:
    """The predicted row of a training step on a data x model mesh, each GPU doing the work of the one-GPU step."""
    fabric, rate = rates.fabric, rates.links["all_reduce"]
    gradients = 2 * (data - 1) / data * (model.cut / parts + model.whole) * 4 / 1e6
    activations = 6 * model.layers * 2 * (parts - 1) / parts * model.tokens * parts * model.width * model.itemsize / 1e6
    in_host = max(1, fabric.host // parts)
    exposed = activations / rate + (fabric.gathering_ms(gradients, rate, data, in_host) if data > 1 else 0.0)
    ms = model.one_ms + exposed + rates.call
    return {
        "what": f"model {data} x {parts}",
        "ms": ms,
        "efficiency": model.one_ms / ms,
        "exposed_ms": exposed + rates.call,
        "waiting_ms": exposed,
        "moved_mb": gradients + activations,
    }


# ---- the page ------------------------------------------------------------------------------------------------------

COUNTS = (8, 64, 512)
PER_GPU = 32768


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown."""
    return ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"] + [
        "| " + " | ".join(row) + " |" for row in rows
    ]


def sequence_table(rates: Rates) -> list[str]:
    """Context parallelism at PER_GPU tokens a GPU, zigzag layout."""
    rows = []
    for devices in COUNTS:
        length = PER_GPU * devices
        for mode in ("ring", "all_gather", "all_to_all"):
            start = [str(devices), f"{length / 2**20:g} Mi", mode]
            if not possible(mode, devices, rates.shapes):
                rows.append([*start, f"{rates.shapes['heads']} heads do not divide", "", "", "", "", ""])
                continue
            r = sequence(rates, length, devices, mode, "zigzag")
            rows.append([
                *start, f"{r['moved_mb'] / 1e3:.2f}", f"{r['transfer_ms']:.1f}", f"{r['waiting_ms']:.1f}",
                f"{r['ms']:.0f}", f"{length / r['ms'] * 1e3 / 1e6:.2f}", f"{r['efficiency']:.3f}",
            ])  # fmt: skip
    heads = (
        "GPUs", "tokens", "mode", "GB a GPU sends", "transfer, ms", "of it exposed, ms", "step, ms", "million tokens/s",
        "efficiency",
    )  # fmt: skip
    return table(heads, rows)


def model_table(rates: Rates, model: Model) -> list[str]:
    """Training steps, data x model."""
    rows = []
    for devices in COUNTS:
        for parts in (1, 2, 4):
            r = model_step(rates, model, devices // parts, parts)
            rows.append([
                str(devices), f"{devices // parts} x {parts}", f"{r['moved_mb'] / 1e3:.2f}", f"{r['waiting_ms']:.1f}",
                f"{r['ms']:.0f}", f"{model.tokens * devices / r['ms'] * 1e3 / 1e6:.2f}", f"{r['efficiency']:.3f}",
            ])  # fmt: skip
    heads = (
        "GPUs", "data x model", "GB a GPU sends", "transfer, exposed, ms", "step, ms", "million tokens/s", "efficiency",
    )  # fmt: skip
    return table(heads, rows)


def measured_table(report: Row) -> list[str]:
    """Measured beside predicted. Reports without predictions get those of their own one-GPU and link rows."""
    count, rows = report["count"], []
    ones = {r["length"]: r["ms"] for r in report["rows"] if r["what"] == "one GPU" and "batch" not in r}
    own = None
    for r in report["rows"]:
        guess = {x: r.get(f"predicted_{x}") for x in ("ms", "exposed_ms", "moved_mb")}
        if guess["ms"] is None and r["what"].split()[0] in ("ring", "all_gather", "all_to_all"):
            own = own or Rates.of(report["rows"], report["shapes"], ring=False)
            mode, layout = r["what"].split()
            guess = sequence(own, r["length"], count, mode, layout)
            r = r | {"exposed_ms": r["ms"] - ones[r["length"]] / count * imbalance(mode, layout, count)}
        if guess["ms"] is None:
            continue
        moved = "-" if r.get("moved_mb") is None else f"{r['moved_mb']:.0f}"
        rows.append([
            r["what"], str(r["length"]), f"{r['ms']:.2f}", f"{guess['ms']:.2f}", f"{r['ms'] / guess['ms'] - 1:+.1%}",
            f"{r['exposed_ms']:.2f}", f"{guess['exposed_ms']:.2f}", f"{moved} / {guess['moved_mb']:.0f}",
            f"{r['efficiency']:.3f}",
        ])  # fmt: skip
    heads = (
        "what", "tokens", "ms", "predicted", "off", "exposed, ms", "predicted", "MB sent / predicted", "efficiency"
    )  # fmt: skip
    return table(heads, rows)


def model_of(reports: Sequence[Row]) -> tuple[Model, str]:
    """The 12-layer model of a scaling run, or twice the six layers that the Flax benchmark timed on one GPU."""
    for report in reports:
        if "model" in report:
            return Model(**report["model"]), "measured as it is"
    for report in reports:
        if "steps" in report:
            size, step = report["size"], report["steps"]["8192"]
            layers, width = 2 * size["layers"], size["width"]
            one_ms = 2e3 * step["jax_fa4"]["forward_backward"]["median_s"]
            whole = (2 * size["vocabulary"] + 8192) * width
            model = Model(layers, width, 8192 * step["batch"], 12 * width**2 * layers, whole, one_ms)
            return model, f"twice the measured step of {size['layers']} layers, loss and gradients without an optimiser"
    raise ValueError("no report holds the step of a model: give a scaling report, or one of benchmarks/flax_step.py")


def page(named: Sequence[tuple[str, Row]]) -> str:
    """docs/scaling.md. The first report of sharded attention on two GPUs gives the rates."""
    name, first = next((n, r) for n, r in named if r.get("count") == 2)
    rows, shapes = first["rows"], first["shapes"]
    rates = Rates.of([*rows, *first.get("rate_rows", [])], shapes)
    model, how = model_of([r for _, r in named])
    held = 4 * shapes["kv_heads"] * shapes["depth"] * PER_GPU * COUNTS[-1] * rates.itemsize / 1e9
    links = ", ".join(f"{x.replace('_', '-')} {rate:.0f}" for x, rate in rates.links.items())
    lines = [
        "# Scaling: 8, 64 and 512 GPUs, predicted",
        "",
        "<!-- Generated by the command below; edit neither text nor tables. -->",
        "",
        "**Nothing above two GPUs on this page was measured**, unless a section below says so: the tables extend",
        "rates of one and two GPUs by the model of [`examples/predict.py`](../examples/predict.py). To make them",
        "again, and to measure on the GPUs of your host beside the predictions:",
        "",
        "```bash",
        "python examples/predict.py " + " ".join(f"docs/measured/{n}" for n, _ in named) + " --out docs/scaling.md",
        "python examples/scaling.py --out scaling.json --plot scaling.png",
        "```",
        "",
        "## Rates",
        "",
        f"From [`{name}`](measured/{name}): {first['count']} x {first['device']}, {first['date']}, jax {first['jax']},",
        f"bfloat16, {shapes['heads']} query and {shapes['kv_heads']} key heads of {shapes['depth']}.",
        "",
        *table(("rate", "value"), [
            ["causal attention over T tokens on one GPU, forward and backward",
             f"{rates.quadratic:.3e} T² + {rates.linear:.2e} T ms"],
            ["sent by a GPU over NVLink, GB/s", links],
            ["launching on several GPUs", f"{rates.call:.2f} ms a step"],
            ["computing in the ring, beyond one call's time", f"{rates.ring_extra:.1%}"],
            ["sent by a GPU to other hosts (assumed)", f"{rates.fabric.network:g} GB/s"],
        ]),
        "",
        f"## Context parallelism: causal, zigzag, {PER_GPU // 1024}k tokens a GPU, one attention, forward and backward",
        "",
        *sequence_table(rates),
        "",
        "Efficiency is against one GPU that could hold the whole sequence. The work of a GPU grows with their number,",
        "as attention is quadratic in the sequence; a step of the ring computes and moves the same on any number.",
        "all_gather holds K and V of the whole sequence on each GPU, and their gradients:",
        f"{held:.0f} GB on {COUNTS[-1]} GPUs.",
        "",
        "## Training step: data x model mesh, weak scaling",
        "",
        f"{model.layers} layers of width {model.width}, {model.tokens} tokens a GPU; one GPU takes",
        f"{model.one_ms:.1f} ms ({how}).",
        "",
        *model_table(rates, model),
        "",
    ]  # fmt: skip
    for name, report in named:
        if "count" in report:
            lines += [
                f"## Measured beside predicted: {report['count']} x {report['device']}, {report['date']}",
                "",
                f"[`{name}`](measured/{name}), jax {report['jax']}. Exposed is the time beyond the busiest GPU's",
                "share of the one-GPU time, launches included."
                + (" Predicted without the ring's extra, which these rows gave." if report["count"] == 2 else ""),
                "",
                *measured_table(report),
                "",
            ]
    return "\n".join(lines + ASSUMPTIONS.splitlines()) + "\n"


ASSUMPTIONS = """## Assumptions

* Kernel rates do not depend on the number of GPUs: each computes blocks of 16k tokens or more, at which the kernels
  have reached their rate. Clocks stay as on one and two GPUs; all GPUs are equally fast.
* Collectives send at the rates measured between two GPUs, on any number of them: hosts of 8 GPUs, all joined by NVLink.
* Hosts have a 400 Gb/s card for each GPU, of which 40 GB/s are reached, and no congestion. **This is not measured.**
  A gather or an all-reduce passes each byte once into each host; a ring turns as slowly as its slowest link; an
  all-to-all sends what is for other hosts by the card.
* The ring hides a transfer behind the compute of its step, a third of it forward (1 / 3.5); its last turn of dK and dV,
  and all transfers of the other two modes, are waited for. In a training step nothing is hidden, so its exposed times
  are upper bounds: XLA may overlap gradient sums with the backward pass.
* Latencies of collectives (tens of microseconds each) and the growth of launch cost with the number of GPUs are left
  out, which matters where steps are short.
* Sends are counted by ring algorithms: (P-1)/P of the result for a gather, twice that for an all-reduce. A run with
  several hosts needs `jax.distributed`; none has been timed.

## Where measurements differ, and why

* The ring in zigzag order computes longer than one call does, by the same share at 64k and at 128k tokens. Merging in
  float32 outside the kernels would lose weight with the length, so it is not all of it; calls on half
  of a device's tokens each, and transfers that take multiprocessors while kernels run, may be. None was measured apart.
* MB sent of a measured row are read from the compiled program where the report has them so (`scaling.py`), else counted
  from the shapes. In one program with both passes XLA can find that the backward pass of an unrolled ring (up to 9
  devices) turns the same K and V as the forward pass, and keep them: fewer bytes, more memory. It does so on CPUs, and
  on two H200s (268 MB of 403). The other modes send what is predicted, to 0.3 % (lse is left out of one).
* Batch and heads over two GPUs lose 0.5 to 0.7 ms of 3.8 (2026-11-30). Half of the work alone on one GPU takes 4.0 ms
  (`share_ms`): a smaller call fills the card less well, which is 0.24 ms of it. The rest is launching on two GPUs;
  a small call showed 0.13 ms of that in the same run.
* The model's step over two model shards takes less than predicted (-19 %), since sums of activations run beside
  products: the prediction hides nothing.
* all_gather and all_to_all also concatenate and reorder what they gather, which the model leaves out; the zigzag layout
  more than the contiguous one.
* Contiguous layouts take half as long again on two GPUs, as `imbalance` says: not a matter of transfers.
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the page from committed reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="JSON of several_gpus.py, scaling.py, flax_step.py")
    parser.add_argument("--out", type=Path, help="file to write (default: stdout)")
    options = parser.parse_args(argv)
    named = [(p.name, json.loads(p.read_text())) for p in options.reports]
    if not any(r.get("count") == 2 for _, r in named):
        parser.error("rates come from a report on two GPUs; none of these is: " + ", ".join(n for n, _ in named))
    text = page(named)
    if options.out:
        options.out.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
