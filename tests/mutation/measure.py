"""Plants faults in every known-good kernel and tabulates which tier notices: `python tests/mutation/measure.py`.

--each N M: at most N faults of asynchronous code a kernel and M of control flow and arithmetic, spread over the kinds.
--write: also write docs/measured/mutants.json and .md. --only PART: kernels whose name has it. --jobs N: that many at a
time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
OUT = ROOT / "docs" / "measured"
TIERS = ("lint", "emulator", "verifier", "nothing")


def spread(found: list, most: int, seed: int) -> list:
    """At most `most`, the same number of every kind as far as there are any; the same ones for a seed."""
    by_kind = defaultdict(list)
    for m in found:
        by_kind[m.kind].append(m)
    order = random.Random(seed)
    for ms in by_kind.values():
        order.shuffle(ms)
    picked: list = []
    while len(picked) < most and any(by_kind.values()):
        for ms in by_kind.values():
            if ms and len(picked) < most:
                picked.append(ms.pop())
    return sorted(picked, key=lambda m: (m.line, m.kind))


def judge_one(subject: Any, each: tuple[int, int], seed: int, verify: bool) -> tuple[list, str]:
    """The fates of one kernel's mutants, and what to say of them."""
    from emulator.mutants import ARITHMETIC, mutants

    from mutation.judge import Judge

    started, judge = time.process_time(), Judge(subject)
    first, last = subject.lines
    found = [m for m in mutants(subject.ptx) if first <= m.line <= last]
    groups = ([m for m in found if (m.kind in ARITHMETIC) == arithmetic] for arithmetic in (False, True))
    picked = [m for group, most in zip(groups, each, strict=True) for m in spread(group, most, seed)]
    made = [f for m in picked if (f := judge.fate(m, verify))]
    tiers = dict(Counter(f.tier for f in made))
    lines = [f"{subject.name}: {len(made)} of {len(found)}, {tiers}, {time.process_time() - started:.0f} s of CPU"]
    for f in made:
        if f.tier == "nothing" or f.how == "other bits":
            lines.append(f"    {f.how}: {f.kind}, line {f.line}: {f.code[:130]}")
    return made, "\n".join(lines)


def judge_named(name: str, each: tuple[int, int], seed: int, verify: bool) -> tuple[list, str]:
    """As `judge_one`, in a process of its own."""
    from mutation.subjects import subjects

    return judge_one(next(s for s in subjects(name) if s.name == name), each, seed, verify)


def judge_all(each: tuple[int, int], part: str = "", seed: int = 0, verify: bool = True, *, show: Callable = print,
              keep: Callable = id, jobs: int = 1) -> list:  # fmt: skip
    """The fates of all mutants; those whose text is no program are left out. `jobs`: kernels at a time."""
    from mutation.subjects import names, subjects

    with contextlib.ExitStack() as stack:
        if jobs == 1:
            results = (judge_one(s, each, seed, verify) for s in subjects(part))
        else:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")))
            todo = [pool.submit(judge_named, n, each, seed, verify) for n in reversed(names(part))]
            results = (f.result() for f in as_completed(todo))
        fates = []
        for made, text in results:
            fates += made
            keep(made)
            show(text)
    return fates


def table(fates: list) -> str:
    """Markdown: kinds of fault by tier."""
    rows = defaultdict(Counter)
    for f in fates:
        rows[f.kind][f.tier] += 1
    lines = ["| fault | planted | lint | emulator | verifier | nothing |", "|---|---|---|---|---|---|"]
    for kind, tiers in [*sorted(rows.items()), ("all", Counter(f.tier for f in fates))]:
        lines.append(f"| {kind} | {sum(tiers.values())} | " + " | ".join(str(tiers[t] or "") for t in TIERS) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, nargs=2, default=(50, 12))
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-verifier", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at a time, a process each")
    args = parser.parse_args()
    keep = (lambda made: write(made, args)) if args.write else id  # after every kernel: a full run takes long
    say = partial(print, flush=True)
    fates = judge_all(args.each, args.only, args.seed, not args.no_verifier, show=say, keep=keep, jobs=args.jobs)
    print(table(fates))
    caught = sum(f.tier != "nothing" for f in fates)
    print(f"{caught} of {len(fates)} noticed, {100 * caught / max(len(fates), 1):.1f} %")


def write(fates: list, args: argparse.Namespace) -> None:
    """JSON and a page, with date and versions. Entries of other kernels stay."""
    from mutation.judge import Fate

    at = OUT / "mutants.json"
    done = {f.subject for f in fates}
    before = json.loads(at.read_text())["fates"] if at.exists() else []
    place = {name: n for n, name in enumerate(dict.fromkeys(x["subject"] for x in before))}  # kernels end in any order
    fates = [f for f in (Fate(**x) for x in before) if f.subject not in done] + fates
    fates.sort(key=lambda f: place.get(f.subject, len(place)))
    versions = {p: importlib.metadata.version(p) for p in ("nvidia-cutlass-dsl", "sentryward", "numpy")}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = {"date": date, "versions": versions, "device": "no GPU, emulator", "seed": args.seed, "each": args.each}
    at.write_text(json.dumps(made | {"fates": [asdict(f) for f in fates]}, indent=1) + "\n")
    (OUT / "mutants.md").write_text(page(fates, made))


def page(fates: list, made: dict) -> str:
    """Rates by kernel and by kind, and every fault that nothing noticed, with the reason."""
    from emulator.mutants import ARITHMETIC

    def rate(group: list) -> str:
        caught = sum(f.tier != "nothing" for f in group)
        equal = sum(f.tier == "nothing" and f.why.startswith("equal") for f in group)
        weak = (
            f", {100 * caught / max(len(group) - equal, 1):.1f} % without the {equal} that are equal" if equal else ""
        )
        return f"{caught} of {len(group)} noticed, {100 * caught / max(len(group), 1):.1f} %{weak}"

    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items())
    lines = ["# Measured: faults planted in compiled kernels", "",
             f"{made['date']}, {made['device']}; {versions}. `python tests/mutation/measure.py --each "
             f"{made['each'][0]} {made['each'][1]} --write`{made.get('note', '')}.", ""]  # fmt: skip
    groups = {"asynchronous code": [f for f in fates if f.kind not in ARITHMETIC],
              "control flow and arithmetic": [f for f in fates if f.kind in ARITHMETIC], "all": fates}  # fmt: skip
    lines += [f"* {name}: {rate(group)}" for name, group in groups.items()]
    lines += ["", "`other bits`: results within the error rule but not the same; noticed by the emulator: "
              f"{sum(f.how == 'other bits' for f in fates)} of them.", ""]  # fmt: skip
    lines += ["| kernel | planted | lint | emulator | verifier | nothing |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(f.subject for f in fates):
        tiers = Counter(f.tier for f in fates if f.subject == name)
        lines.append(f"| {name} | {sum(tiers.values())} | " + " | ".join(str(tiers[t] or "") for t in TIERS) + " |")
    lines += ["", table(fates), "", "## Not noticed", "", "| kernel | fault | instruction | why |", "|---|---|---|---|"]
    for f in fates:
        if f.tier == "nothing":
            code = f.code.replace("|", "\\|").replace("\t", " ")[:70]
            lines.append(f"| {f.subject}, line {f.line} | {f.kind} | `{code}` | {f.why or 'not explained'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
