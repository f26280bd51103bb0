"""The command line: precompile, doctor, benchmark. Arguments and what is printed; the work is done elsewhere."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_fa4 import benchmark, doctor, kernels
from jax_fa4.ffi import bundle
from jax_fa4.ffi.compile import CompilerMissing
from jax_fa4.ffi.store import Store
from jax_fa4.precompile import describe, fill, plans_for, wanted
from jax_fa4.spec import KERNEL_DTYPES, AttentionSpec, Problem
from jax_fa4.version import __version__

HOST_TARGETS = {"x86-64-v2": "x86-64-v2", "aarch64": "linux-aarch64", "linux-aarch64": "linux-aarch64"}
PRECOMPILE = """\
Builds kernels into a store, in parallel over cores, on a machine with no GPU. Give it the kinds of calls a program
makes; batch, lengths, heads, window, scale and cap are run-time values, one kernel serves them all. Where shapes decide
which of a few kernels is the fastest (few queries, few heads, long), all of these are built.
On the machine that runs them, set JAX_FA4_STORE=DIR: nothing is compiled there, and no compiler is needed.

    python -m jax_fa4 precompile --arch sm_90a sm_100a --head-dim 64 128 192,128 --causal --store kernels

Exit code: 0 if all that was asked for is in the store; 1 if something was refused (there is no such kernel) or could
not be built, the rest is there; 2 for wrong arguments or a store that cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit code."""
    args = parser().parse_args(arguments)
    return args.run(args)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m jax_fa4", description="FlashAttention-4 kernels for JAX.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(metavar="command", required=True)
    for name, text, long, add, run in (
        ("precompile", "build kernels into a store, with no GPU", PRECOMPILE, _precompile_arguments, _precompile),
        ("doctor", "what runs here, and why not the faster thing", doctor.__doc__, doctor.arguments, doctor.run),
        ("benchmark", "time attention against its peers", benchmark.__doc__, benchmark.arguments, benchmark.run),
    ):
        raw = argparse.RawDescriptionHelpFormatter
        one = commands.add_parser(name, help=text, description=long, formatter_class=raw)
        add(one)
        one.set_defaults(run=run)
    return top


# ---- precompile ----------------------------------------------------------------------------------------------------


def _depths(text: str) -> tuple[int, int]:
    """ "128" or "192,128": depth of query and key, depth of the values."""
    parts = text.split(",")
    try:
        d, v = int(parts[0]), int(parts[-1])
    except ValueError:
        d = v = 0
    if len(parts) > 2 or d < 1 or v < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a depth (128) nor two (192,128: keys, values)")
    return d, v


def _precompile_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--arch", nargs="+", action="extend", required=True, choices=kernels.ARCHITECTURES)
    p.add_argument("--head-dim", nargs="+", type=_depths, required=True, metavar="D[,V]", help="128; 192,128 for MLA")
    p.add_argument("--dtype", nargs="+", choices=KERNEL_DTYPES, default=["bfloat16"], help="default: bfloat16")
    p.add_argument("--causal", action="store_true", help="calls with is_causal or a window (default: these and --full)")
    p.add_argument("--full", action="store_true", help="calls with neither")
    for name, what in (
        ("soft-cap", "logits_soft_cap"),
        ("sinks", "sinks"),
        ("segments", "segment ids"),
        ("deterministic", "a backward pass of the same bits in each run"),
    ):
        p.add_argument(
            f"--{name}", nargs="?", choices=("only", "both"), const="only", metavar="both",
            help=f"calls with {what}; 'both': with and without",
        )  # fmt: skip
    p.add_argument("--forward-only", action="store_true", help="no backward pass: inference")
    p.add_argument("--store", type=Path, required=True, metavar="DIR", help="the folder that is filled")
    p.add_argument("--host-target", choices=HOST_TARGETS, help="processor of the machines (default: this one's kind)")
    p.add_argument("--jobs", type=int, metavar="N", help="processes at a time (default: one for each core)")
    p.add_argument("--skip-unsupported", action="store_true", help="what is refused does not make the exit code 1")
    p.add_argument("--quiet", action="store_true", help="no progress bar")


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """The kinds of problems that the arguments name; shapes are stand-ins, `precompile` takes all of a kind."""
    kinds = {None: (False,), "only": (True,), "both": (False, True)}
    bands = [band for band, asked in ((False, args.full), (True, args.causal)) if asked] or [False, True]
    for direction in ("fwd",) if args.forward_only else ("fwd", "bwd"):
        for dtype, (d, v), band, cap, sinks, segments, deterministic in itertools.product(
            args.dtype, args.head_dim, bands,
            *(kinds[x] for x in (args.soft_cap, args.sinks, args.segments, args.deterministic)),
        ):  # fmt: skip
            for lengths in (False, True):  # one plan where the arch does not tell them apart
                spec = AttentionSpec(
                    band=band, lengths=lengths, soft_cap=cap, sinks=sinks, segments=segments,
                    deterministic=deterministic and direction == "bwd",
                )  # fmt: skip
                yield Problem(spec, 1, 1024, 1024, 8, 8, d, v, dtype, direction)


def _precompile(args: argparse.Namespace) -> int:
    if args.jobs is not None and args.jobs < 1:
        print(f"precompile: --jobs must be at least 1; it is {args.jobs}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    into = Store([args.store], host_target=HOST_TARGETS.get(args.host_target))
    if into.home is None:
        print(f"precompile: {args.store} cannot be used as a store, see the warning above", file=sys.stderr)
        return 2
    plans, refused = plans_for(wanted(list(problems(args)), (), list(dict.fromkeys(args.arch))))
    failures: list[tuple[Any, str]] = []
    try:
        made = fill(plans, refused, into, jobs=args.jobs, progress=not args.quiet)
        entries = list(made.entries)
    except bundle.BundleError as error:
        failures = error.failures
        keys = {into.key(plan) for plan in plans}
        written = [bundle.Entry(**entry) for entry in bundle.read_manifest(into.home)["entries"]]
        entries = [entry for entry in written if entry.key in keys]
    except CompilerMissing as error:
        print(f"precompile: {error}", file=sys.stderr)
        return 1
    _print_entries(dict(zip((into.key(p) for p in plans), plans, strict=True)), entries, into.host_target)
    for plan, text in failures:
        print(f"FAILED  {label(plan)}: {text if len(text) < 1500 else text[:1500] + ' ...'}")
    for (arch, reason), kinds in _by_reason(refused).items():
        print(f"REFUSED on {arch}: {reason}\n        asked for by {'; '.join(kinds)}")
    total, unmet = sum(e.bytes for e in entries), sum(map(len, _by_reason(refused).values()))
    print(f"{len(entries)} kernels ({total / 1e6:.2f} MB), {len(failures)} failed, {unmet} refused,", end=" ")
    print(f"{time.perf_counter() - start:.1f} s; listed in {into.home / bundle.MANIFEST}")
    print(f"to use them: JAX_FA4_STORE={into.home}")
    return int(bool(failures) or (bool(refused) and not args.skip_unsupported))


def _by_reason(refused: list[Any]) -> dict[tuple[str, str], list[str]]:
    """(arch, reason): the kinds of problems that it refuses, each once."""
    out: dict[tuple[str, str], list[str]] = {}
    for r in refused:
        spec = replace(r.problem.spec, lengths=False)
        kinds = out.setdefault((r.arch, r.reason), [])
        if (kind := describe(replace(r.problem, spec=spec))) not in kinds:
            kinds.append(kind)
    return out


KINDS = ("band", "segments", "soft_cap", "sinks", "ordered")  # fields of plans that the caller's arguments decide


def label(plan: Any) -> str:
    """A plan in a few words: what it is for, and its form where shapes decide between several."""
    depth, value_depth = plan.depth, getattr(plan, "value_depth", plan.depth)
    flags = [kind for kind in KINDS if getattr(plan, kind, False)]
    depths = f"D{depth}" if depth == value_depth else f"D{depth},{value_depth}"
    return " ".join(
        [plan.arch, plan.direction, plan.dtype, depths, "+".join(flags) or "full", *getattr(plan, "form", ())]
    )


def _print_entries(plans: dict[str, Any], entries: list[Any], host_target: str) -> None:
    if not entries:
        return
    width = max(len(label(plans[e.key])) for e in entries)
    print(f"{'kernel':{width}}  {'KB':>7}  {'built in':>9}  entry   (host {host_target})")
    for e in entries:
        built = f"{e.seconds:7.1f} s" if e.seconds else "was there"
        print(f"{label(plans[e.key]):{width}}  {e.bytes / 1e3:7.1f}  {built:>9}  {e.key[:16]}")
