"""FlashAttention-4's own Blackwell kernels in our emulator, counters and verifier: `python tests/public/measure.py`.

Fetches the package into --folder (default: a temporary one), compiles there, runs everything and writes
docs/measured/public_fa4.json. Needs torch (CPU), the CuTe DSL and, unless --no-verifier, sentryward.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
OUT = ROOT / "docs" / "measured" / "public_fa4.json"
PACKAGES = ("flash-attn-4==4.0.0b36", "quack-kernels==0.6.5", "einops==0.8.2", "apache-tvm-ffi==0.1.15.post2")
# What CuTe DSL 4.8.1 has not: `to` for tensors in registers, an ellipsis in a tensor's index.
ADAPTED = "quack/copy_utils.py"
EDITS = {
    r"src = src\.to\(dst\.element_type, loc=loc, ip=ip\)": (
        "to = cute.make_rmem_tensor_like(src, dst.element_type); to.store(src.load().to(dst.element_type)); src = to"
    ),
    r"else tRS_sC\[\.\.\., dst_idx\]": "else tRS_sC[(*[None] * (cute.rank(tRS_sC) - 1), dst_idx)]",
}
SHAPES = {"fwd": [(256, 256), (512, 384)], "bwd": [(256, 256), (384, 512)]}
SMALL = {"fwd": [(256, 128)], "bwd": [(128, 128), (256, 128)]}  # the verifier's, one CTA or a pair


def fetch(folder: Path) -> None:
    """The packages, without what they depend on, which is here."""
    if (folder / "flash_attn").exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES]
    subprocess.run(pip, check=True)
    path = folder / ADAPTED
    text = path.read_text()
    for old, new in EDITS.items():
        text, n = re.subn(old, new, text)
        if not n:
            raise RuntimeError(f"{path}: {old} is not there: another version than {PACKAGES[1]}?")
    path.write_text(text)


def text_of(folder: Path, variant: str) -> str:
    """PTX of a variant, compiled in a process of its own."""
    at = folder / "ptx" / variant
    if not at.exists():
        at.mkdir(parents=True)
        build = Path(__file__).with_name("build.py")
        subprocess.run([sys.executable, str(build), str(folder), str(at), variant], check=True, capture_output=True)
    found = sorted(at.glob("*_sm100*.ptx"), key=lambda p: p.stat().st_size)
    return found[-1].read_text().rstrip("\0")


def tiles(call, many: bool) -> tuple[int, int, int]:
    """(queries, keys, 128 x 128 tiles) of a short and a long run: their difference is steady state."""
    side = 256 if call.pair else 128
    if call.direction == "fwd":
        queries, keys = 2 * side, 1024 if many else 512
    else:
        queries, keys = 1024 if many else 512, side
    return queries, keys, queries * keys // 128**2


def counted(call) -> dict:
    """Clocks and instructions of one 128 x 128 tile."""
    from count import cycles

    (few, many), amount = [call.run(*tiles(call, more)[:2])[0].counters for more in (False, True)], 0
    amount = tiles(call, True)[2] - tiles(call, False)[2]
    table: dict = {}
    for kind in ("instructions", "amounts"):
        short = getattr(few, kind)
        for role, counts in getattr(many, kind).items():
            row = {name: (x - short[role].get(name, 0)) / amount for name, x in counts.items()}
            table.setdefault(role, {}).update({name: x for name, x in row.items() if x})
    return {"clocks": cycles(table), "by role": table}


def emulated(call) -> dict:
    """Errors against float64 and findings, over shapes and schedules."""
    from emulator import SEEDS

    from public.calls import relied

    sizes = [(256, 256)] if call.causal else SHAPES[call.direction]
    found: Counter = Counter()
    worst: dict = {}
    forgives: Counter = Counter()
    started = time.process_time()
    for queries, keys in sizes:
        for seed in SEEDS:
            report, errors = call.run(queries, keys, seed)
            forgiven = {id(f): relied(f, report) for f in report.errors}
            wrong = [f for f in report.errors if not forgiven[id(f)]]
            if report.deadlock is not None or wrong:
                raise AssertionError(f"{queries} x {keys}, seed {seed}: {report.deadlock} {wrong[:3]}")
            forgives.update(set(forgiven.values()))
            found.update({f.kind for f in report.findings if id(f) not in forgiven})
            worst = {name: max(x, worst.get(name, 0.0)) for name, x in errors.items()}
    runs = len(sizes) * len(SEEDS)
    seconds = round((time.process_time() - started) / runs, 2)
    return {
        "shapes": sizes,
        "seeds": SEEDS,
        "error": worst,
        "relied on": dict(forgives),
        "advisory": dict(found),
        "runs": runs,
        "seconds a run": seconds,
    }


def shapes_verified(call) -> list[tuple[int, int]]:
    """(queries, keys) that the verifier is asked about."""
    if call.causal:
        return [(256, 256)]
    if call.direction == "fwd":
        return [(queries * (1 + call.pair), keys) for queries, keys in SMALL["fwd"]]
    return [(queries, keys * (1 + call.pair)) for queries, keys in SMALL["bwd"][: 1 if call.pair else 2]]


def verified(call, shape: tuple[int, int], timeout: int) -> dict:
    from sentryward import verify
    from verifier.describe import normal

    from public.calls import verifier_input

    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "k.ptx").write_text(normal(call.ptx))
        (at / "k.json").write_text(json.dumps(verifier_input(call, *shape, True)))
        r = verify(str(at / "k.ptx"), input=str(at / "k.json"), timeout_seconds=timeout, memory_limit_mib=6000)
    found = [str(d.get("message"))[:200] for d in r.get("diagnostics", [])[:3]]
    seconds = round(float(r.get("elapsed_seconds") or 0), 1)
    return {"shape": shape, "result": r.get("result"), "warnings": r.get("warning_count"), "seconds": seconds,
            "found": found}  # fmt: skip


def main() -> None:
    from public.build import VARIANTS
    from public.calls import Call

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-verifier", action="store_true")
    parser.add_argument("--timeout", type=int, default=900, help="seconds of the verifier a kernel")
    parser.add_argument("variants", nargs="*", help=f"of {', '.join(VARIANTS)}")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="public_fa4_"))
    fetch(folder)
    made = json.loads(OUT.read_text()) if OUT.exists() else {"kernels": {}}
    made |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": "no GPU, emulator"}
    made["versions"] = dict(p.split("==") for p in PACKAGES)
    made["versions"] |= {p: importlib.metadata.version(p) for p in ("nvidia-cutlass-dsl", "sentryward", "torch")}
    for name in args.variants or VARIANTS:
        call = Call(*VARIANTS[name], text_of(folder, name))
        entry = {"lines": call.ptx.count("\n"), "emulator": emulated(call)}
        if not call.causal:
            entry["tile"] = counted(call)
        if not args.no_verifier:
            entry["verifier"] = [verified(call, shape, args.timeout) for shape in shapes_verified(call)]
        made["kernels"][name] = {**made["kernels"].get(name, {}), **entry}
        OUT.write_text(json.dumps(made, indent=1) + "\n")
        print(name, entry["emulator"], entry.get("tile", {}).get("clocks"), entry.get("verifier"), flush=True)


if __name__ == "__main__":
    main()
